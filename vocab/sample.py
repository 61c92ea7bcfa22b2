"""A uniform sample of a corpus in bounded memory, the same in whatever order it is read."""

import hashlib
import heapq
from collections.abc import Iterator

# SentencePiece works on passages, not documents; in characters. Of the size of its own default for
# the longest sentence (4,192 bytes).
PASSAGE_CHARACTERS = 4096


def passages(text: str) -> Iterator[str]:
    """Cuts a document at ends of lines, else of sentences, else of words."""
    start = 0
    while start < len(text):
        end = start + PASSAGE_CHARACTERS
        if end < len(text):
            cuts = (text.rfind(mark, start, end) + len(mark) for mark in ("\n", ". ", " "))
            end = next((cut for cut in cuts if cut > start + PASSAGE_CHARACTERS // 2), end)
        if passage := text[start:end].strip():
            yield passage
        start = end


class Sample:
    """Keeps the passages whose keyed hash is lowest, as many as `limit` bytes hold.

    Every passage of the corpus has the same chance, and the result depends on `seed` and the set of
    passages alone. Memory: `limit` plus about 150 bytes a passage.
    """

    def __init__(self, limit: int, seed: int):
        self._limit = limit
        self._seed = seed.to_bytes(8, signed=True)
        self._kept: list[tuple[int, bytes]] = []  # a heap with the highest hash first
        self._threshold = 1 << 64
        self.bytes = 0
        self.seen = 0
        self.seen_bytes = 0

    def add(self, id: str, text: str) -> None:
        """Offers the passages of a document."""
        for number, passage in enumerate(passages(text)):
            data = passage.encode()
            self.seen += 1
            self.seen_bytes += len(data)
            key = f"{number}:{id}:".encode()
            digest = hashlib.blake2b(key + data, digest_size=8, key=self._seed).digest()
            rank = int.from_bytes(digest)
            if rank < self._threshold:
                heapq.heappush(self._kept, (-rank, data))
                self.bytes += len(data)
                self._shrink()

    def _shrink(self) -> None:
        # All of a rank go together: passages that are equal in everything must not depend on order.
        while self.bytes > self._limit or (self._kept and -self._kept[0][0] >= self._threshold):
            rank, data = heapq.heappop(self._kept)
            self._threshold = -rank
            self.bytes -= len(data)

    def passages(self) -> list[str]:
        """The sample, in the order of the hash."""
        return [data.decode() for _, data in sorted(self._kept, reverse=True)]

    def __len__(self) -> int:
        return len(self._kept)
