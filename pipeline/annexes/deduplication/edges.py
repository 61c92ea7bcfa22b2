"""The second stage: pairs of units with a common key, one partition of keys at a time.

A partition holds all pieces' keys that begin with certain bytes. Memory holds about 60 bytes per
unit with a key in it and, for one band at a time, a signature per unit that shares a key.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.annexes.deduplication import arrays, kernels
from pipeline.annexes.deduplication.plan import EDGES, NONE, PREFIXES, SIGNATURES, Job

# Maximum number of leaders, all unlike each other, in a group of units with one key.
_LEADERS = 64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The opened files of all pieces, by number; units are numbered across the whole corpus."""

    opened: list[arrays.Arrays]
    starts: np.ndarray  # int64[pieces + 1], each piece's first number

    @classmethod
    def open(cls, job: Job, count: int) -> "Pieces":
        opened = [arrays.Arrays(job.path(SIGNATURES, number)) for number in range(count)]
        return cls(opened, np.cumsum([0, *(each.shape("owner")[0] for each in opened)]))

    def grouped(self, units: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (piece, where its units are in `units`, their indices in the piece)."""
        if not len(units):
            return
        piece = np.searchsorted(self.starts, units, side="right") - 1
        order = np.argsort(piece, kind="stable")
        numbers, begins = np.unique(piece[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
            yield number, places, units[places] - self.starts[number]

    def signatures(self, units: np.ndarray) -> np.ndarray:
        """Returns uint8[units, hashes], the signatures of `units`, numbers in the corpus."""
        width = self.opened[0].shape("signatures")[1]
        found = np.empty((len(units), width), np.uint8)
        for number, places, rows in self.grouped(units):
            found[places] = self.opened[number].read("signatures")[rows]
        return found


def write_partition(job: Job, pieces: int, partitions: int, number: int) -> Counter[str]:
    """Writes the pairs of partition `number`; returns counts for the job's metrics."""
    opened = Pieces.open(job, pieces)
    width = PREFIXES // partitions
    prefixes = (number * width, (number + 1) * width)
    nothing = np.zeros((0, 2), np.int64)
    exact, near = [nothing], [nothing]
    candidates = unlike = 0
    if job.rules.duplicates != NONE:
        keys, units = _gathered(opened, "exact", 0, prefixes)
        exact.append(_pairs(opened, keys, units, least=0)[0])
    if job.rules.near:
        for band in range(job.rules.bands):
            keys, units = _gathered(opened, "band", band, prefixes)
            pairs, *counts = _pairs(opened, keys, units, job.rules.least_equal())
            near.append(pairs)
            candidates, unlike = candidates + counts[0], unlike + counts[1]
    found = {
        "exact": np.concatenate(exact),
        "near": np.unique(np.concatenate(near), axis=0),
        "repeated": _repeated(opened, prefixes),
        "counts": np.array([candidates, unlike]),
    }
    arrays.write(job.path(EDGES, number), found)
    return Counter(partitions=1)


def _gathered(
    pieces: Pieces, name: str, band: int, prefixes: tuple[int, int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns a partition's (keys, units); second halves of the keys, if any, come first."""
    keys, seconds, units = [], [], []
    for opened, start in zip(pieces.opened, pieces.starts.tolist(), strict=False):
        bounds = opened.part(f"{name}_prefixes", prefixes[0], prefixes[1] + 1, band)
        begin, end = int(bounds[0]), int(bounds[-1])
        if begin == end:
            continue
        keys.append(opened.part(f"{name}_keys", begin, end, band))
        units.append(opened.part(f"{name}_rows", begin, end, band).astype(np.int64) + start)
        if f"{name}_seconds" in opened:
            seconds.append(opened.part(f"{name}_seconds", begin, end))
    columns = [np.concatenate(each) for each in (seconds, keys) if each]
    return columns, np.concatenate(units) if units else np.zeros(0, np.int64)


def _groups(keys: Sequence[np.ndarray], units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (members of groups of two or more equal keys, int64[groups + 1] bounds).

    `keys` are columns, the most significant one last. Members are ascending indices in `units`.
    """
    if not len(units):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    order = np.lexsort((units, *keys))
    same = np.ones(len(order) - 1, bool)
    for column in keys:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    first = np.concatenate([[True], ~same])
    member = ~first | np.concatenate([same, [False]])
    begins = np.flatnonzero(first[member])
    return order[member], np.append(begins, int(member.sum()))


def _pairs(
    pieces: Pieces, keys: Sequence[np.ndarray], units: np.ndarray, least: int
) -> tuple[np.ndarray, int, int]:
    """Returns (int64[pairs, 2] units, earlier first; number of candidates; of unlike ones)."""
    members, bounds = _groups(keys, units)
    found = units[members]
    signatures, rows = np.zeros((0, 0), np.uint8), np.zeros(len(found), np.int64)
    if least and len(found):
        different, rows = np.unique(found, return_inverse=True)
        signatures = pieces.signatures(different)
    pairs, candidates, unlike = kernels.similar_pairs(bounds, rows, signatures, least, _LEADERS)
    return found[pairs], candidates, unlike


def _repeated(pieces: Pieces, prefixes: tuple[int, int]) -> np.ndarray:
    (*columns,), rows = _gathered(pieces, "id", 0, prefixes)
    members, bounds = _groups(columns, rows)
    if not len(members):
        return np.zeros((0, 2), np.uint64)
    seconds, keys = columns
    firsts = members[bounds[:-1]]
    return np.stack([keys[firsts], seconds[firsts]], 1)
