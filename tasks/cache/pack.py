"""Packs documents of any length into rows, in constant memory, without losing tokens.

A packer accepts batches of documents and returns completed rows. Rows depend only on the documents
and their order, not on the batches.
"""

import bisect
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tasks import arrow
from tasks.cache.records import Row
from tasks.vocabulary import EOS_ID

# Open rows of best_fit, each of at most `row_tokens` int32. With 2,900 English paragraphs and 5,900
# Romanian sentences in rows of 568 tokens, 8 open rows left 2.9% and 2.1% of positions empty,
# 64 left 0.5% and 1.5%, and 256 left no less than 64 did.
OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokenized documents."""

    ids: pa.StringArray  # string [documents]
    tokens: np.ndarray  # int32 [sum of lengths], the documents concatenated
    lengths: np.ndarray  # int64 [documents], 1 or more

    def separated(self, separator: str, eos: int) -> "Documents":
        """Returns the documents with a separator, "none" or "eos", after each; `eos` is its id."""
        if separator == "none":
            return self
        tokens = np.insert(self.tokens, np.cumsum(self.lengths), eos)
        return Documents(self.ids, tokens, self.lengths + 1)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Tokenized pairs."""

    ids: pa.StringArray  # string [pairs]
    # inputs, targets: int32 [sum of lengths], the sides of all pairs, concatenated.
    inputs: np.ndarray
    # inputs_lengths, targets_lengths: int64 [pairs], 1 or more.
    inputs_lengths: np.ndarray
    targets: np.ndarray
    targets_lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rows:
    """Complete rows, and the document pieces that begin in them, in order."""

    tokens: np.ndarray  # int32 [sum of lengths], the rows concatenated; for pairs, the targets
    lengths: np.ndarray  # int64 [rows], number of tokens per row
    ids: pa.StringArray  # string [pieces], id of each piece's document
    row: np.ndarray  # int64 [pieces], index of the row in which each piece begins
    position: np.ndarray  # int64 [pieces], its start in that row
    # int64 [pieces], its length including the separator; with `concat` a piece may continue in
    # later rows.
    piece_tokens: np.ndarray
    document_offset: np.ndarray  # int64 [pieces], number of the document's tokens before the piece
    # inputs, inputs_lengths: the same for the inputs of pairs; None for texts.
    inputs: np.ndarray | None = None
    inputs_lengths: np.ndarray | None = None

    def __iter__(self) -> Iterator[Row]:
        ends = np.cumsum(self.lengths)
        starts = np.searchsorted(self.row, np.arange(len(self.lengths) + 1))
        for number, (begin, end) in enumerate(zip(ends - self.lengths, ends, strict=True)):
            position = self.position[starts[number] : starts[number + 1]]
            yield Row(self.tokens[begin:end], position.astype(np.int32))


def packer(packing: str, row_tokens: int, separator: str, eos: int = EOS_ID) -> Any:
    """Returns a packer for one shard; see tasks.cache.manifest.PACKINGS. `eos` is the id of EOS.

    Its method `add` takes Documents or Pairs and returns the rows that they complete; `finish`
    returns the rows still open.
    """
    if packing == "pairs":
        return _OnePair()
    kind = _BestFit if packing == "best_fit" else _Concat
    return kind(row_tokens, separator, eos)


class _OnePair:
    def add(self, documents: Pairs) -> Rows:
        count = len(documents.ids)
        none = np.zeros(count, np.int64)
        return Rows(
            tokens=documents.targets,
            lengths=documents.targets_lengths,
            ids=documents.ids,
            row=np.arange(count),
            position=none,
            piece_tokens=documents.inputs_lengths + documents.targets_lengths,
            document_offset=none,
            inputs=documents.inputs,
            inputs_lengths=documents.inputs_lengths,
        )

    def finish(self) -> Rows:
        return _stack([])


class _Concat:
    """Concatenates documents and cuts rows of exactly `row_tokens`; the last row may be shorter.

    Source: T5 `data/preprocessors.py`, reduce_concat_tokens and split_tokens, over a whole shard.
    """

    def __init__(self, row_tokens: int, separator: str, eos: int):
        self._row_tokens = row_tokens
        self._separator, self._eos = separator, eos
        self._tokens = np.zeros(0, np.int32)
        self._ids = pa.nulls(0, pa.string())
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)

    def add(self, documents: Documents) -> Rows:
        documents = documents.separated(self._separator, self._eos)
        ends = len(self._tokens) + np.cumsum(documents.lengths)
        self._tokens = np.concatenate([self._tokens, documents.tokens])
        self._ids = pa.concat_arrays([self._ids, documents.ids])
        self._starts = np.concatenate([self._starts, ends - documents.lengths])
        self._lengths = np.concatenate([self._lengths, documents.lengths])
        return self._take(len(self._tokens) // self._row_tokens * self._row_tokens)

    def finish(self) -> Rows:
        return self._take(len(self._tokens))

    def _take(self, count: int) -> Rows:
        """Removes the first `count` tokens and the documents that begin in them."""
        begun = int(np.searchsorted(self._starts, count))
        lengths = np.full(-(-count // self._row_tokens), self._row_tokens, np.int64)
        if count % self._row_tokens:
            lengths[-1] = count % self._row_tokens
        row, position = np.divmod(self._starts[:begun], self._row_tokens)
        rows = Rows(
            tokens=self._tokens[:count],
            lengths=lengths,
            ids=self._ids[:begun],
            row=row,
            position=position,
            piece_tokens=self._lengths[:begun],
            document_offset=np.zeros(begun, np.int64),
        )
        self._tokens = self._tokens[count:].copy()
        self._ids = self._ids[begun:]
        self._starts = self._starts[begun:] - count
        self._lengths = self._lengths[begun:]
        return rows


@dataclasses.dataclass
class _OpenRow:
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    pieces: list[tuple[str, int, int, int]] = dataclasses.field(default_factory=list)
    length: int = 0

    def place(self, name: str, tokens: np.ndarray, offset: int) -> None:
        self.pieces.append((name, self.length, len(tokens), offset))
        self.tokens.append(tokens)
        self.length += len(tokens)


class _BestFit:
    """Packs documents so that only those longer than a row are cut; a row is then a window.

    A longer document gives full rows and a remainder. A remainder or short document goes into the
    open row with the least sufficient space, the oldest among equals, or into a new row. If more
    than OPEN_ROWS are open, the fullest is closed. Rows are not padded.

    Source: best-fit packing for language models, Ding et al. 2024 (arXiv:2404.10830).
    Differences: documents are packed as they arrive, not sorted by length.
    """

    def __init__(self, row_tokens: int, separator: str, eos: int):
        self._row_tokens = row_tokens
        self._separator, self._eos = separator, eos
        self._opened = 0
        # (space left, order of opening) of the open rows, sorted, and the rows by order of opening.
        self._spaces: list[tuple[int, int]] = []
        self._open: dict[int, _OpenRow] = {}

    def add(self, documents: Documents) -> Rows:
        documents = documents.separated(self._separator, self._eos)
        closed: list[_OpenRow] = []
        ends = np.cumsum(documents.lengths)
        bounds = ((ends - documents.lengths).tolist(), ends.tolist())
        for name, begin, end in zip(documents.ids.to_pylist(), *bounds, strict=True):
            for offset in range(0, end - begin, self._row_tokens):
                # Copy it, so that an open row does not keep the whole batch in memory.
                at = begin + offset
                piece = documents.tokens[at : min(at + self._row_tokens, end)].copy()
                self._place(name, piece, offset, closed)
        return _stack(closed)

    def _place(self, name: str, piece: np.ndarray, offset: int, closed: list[_OpenRow]) -> None:
        best = bisect.bisect_left(self._spaces, (len(piece), -1))
        if best < len(self._spaces):
            space, order = self._spaces.pop(best)
        else:
            space, order = self._row_tokens, self._opened
            self._open[order] = _OpenRow()
            self._opened += 1
        self._open[order].place(name, piece, offset)
        if space == len(piece):
            closed.append(self._open.pop(order))
            return
        bisect.insort(self._spaces, (space - len(piece), order))
        if len(self._spaces) > OPEN_ROWS:
            closed.append(self._open.pop(self._spaces.pop(0)[1]))

    def finish(self) -> Rows:
        closed = [self._open[order] for order in sorted(self._open)]
        self._open, self._spaces = {}, []
        return _stack(closed)


def _stack(rows: list[_OpenRow]) -> Rows:
    pieces = [piece for row in rows for piece in row.pieces]
    numbers = np.array([piece[1:] for piece in pieces], np.int64).reshape(-1, 3)
    tokens = [np.zeros(0, np.int32), *(part for row in rows for part in row.tokens)]
    return Rows(
        tokens=np.concatenate(tokens),
        lengths=np.array([row.length for row in rows], np.int64),
        ids=arrow.of_names([piece[0] for piece in pieces]),
        row=np.repeat(np.arange(len(rows)), [len(row.pieces) for row in rows]),
        position=numbers[:, 0],
        piece_tokens=numbers[:, 1],
        document_offset=numbers[:, 2],
    )
