"""Cuts a corpus's files into pieces of about equal size, and joins small ones."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tasks.reading.corpus import FileRange

Part = TypeVar("Part")

# A small corpus still becomes this many pieces, to occupy several workers, unless they would be too
# small.
_LEAST_PIECES = 8
_LEAST_PIECE_BYTES = 64 << 10


def target_bytes(total: int, piece_bytes: int) -> int:
    """Returns the largest piece size for a corpus of `total` bytes; at most `piece_bytes`."""
    return max(1, min(piece_bytes, max(_LEAST_PIECE_BYTES, math.ceil(total / _LEAST_PIECES))))


def cut(ranges: Iterable[FileRange], target: int) -> Iterator[FileRange]:
    """Cuts a file's ranges into ranges of at most `target` bytes, and joins small neighbours.

    A range is cut evenly, or at its `cuts`; a part between two `cuts` may be larger than `target`.
    """
    parts = itertools.chain.from_iterable(_evenly(whole, target) for whole in ranges)
    for some in join(parts, lambda part: part.bytes, target):
        size, cuts = sum(part.bytes for part in some), sum((part.cuts for part in some), ())
        yield FileRange(some[0].start, some[-1].stop, size, cuts)


def _evenly(whole: FileRange, target: int) -> Iterator[FileRange]:
    if whole.stop is None:
        yield whole
        return
    if whole.cuts:
        starts = [start for start, _ in whole.cuts]
        for cut, stop in zip(whole.cuts, [*starts[1:], whole.stop], strict=True):
            yield FileRange(cut[0], stop, stop - cut[0], (cut,))
        return
    length = whole.stop - whole.start
    count = max(1, min(length, math.ceil(whole.bytes / target)))
    cuts = [whole.start + length * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(cuts):
        yield FileRange(start, stop, whole.bytes * (stop - start) // length)


def join(
    parts: Iterable[Part], size: Callable[[Part], int], target: int
) -> Iterator[tuple[Part, ...]]:
    """Groups consecutive parts, with at most `target` bytes per group unless one part is larger."""
    joined: list[Part] = []
    total = 0
    for part in parts:
        if joined and total + size(part) > target:
            yield tuple(joined)
            joined, total = [], 0
        joined.append(part)
        total += size(part)
    if joined:
        yield tuple(joined)
