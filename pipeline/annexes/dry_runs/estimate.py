"""Estimates a build's size, time and cost by building a sample in a temporary folder.

The sample is a random slice of each of several equal stretches of the corpus. A ratio estimator
scales counts by bytes (Source: Cochran, Sampling Techniques, chapter 6). Its standard error is too
high, as it treats slices as drawn from the whole corpus. A small corpus is built completely.
"""

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from pipeline.building import graph
from pipeline.runners.engines import Engine
from tasks.cache.manifest import Shard
from tasks.cache.receipts import finished
from tasks.reading import cutting
from tasks.reading.corpus import FilePart, FileRange
from tasks.reading.formats.registry import FORMATS
from tasks.reading.sources import Piece
from tasks.storage import files
from tasks.terminal import processes
from tasks.vocabulary import Vocabulary

SAMPLE_BYTES = 16 << 20
_SLICE_BYTES = 128 << 10
_MIN_SLICES = 4  # per set of splits, enough to estimate an error
_EMPTY_PIECES = 5
# Parquet stores equal texts once. Above this ratio of text to file bytes, scale by file bytes.
_REPEATED = 1.5
# Slices to time: few, and long enough to make a piece's fixed cost negligible.
_TIMED_BYTES = 4 << 20
_TIMED_SLICES = 3  # per process


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An estimate and its variance; sums assume that the terms are independent, as strata are."""

    value: float = 0.0
    variance: float = 0.0

    def __add__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.value + other.value, self.variance + other.variance)

    def __truediv__(self, unit: float) -> "Quantity":
        return Quantity(self.value / unit, self.variance / unit**2)

    def __str__(self) -> str:
        is_whole = self.value % 1 == 0 or self.value > 100
        value = f"{self.value:,.0f}" if is_whole else f"{self.value:.2f}"
        share = math.sqrt(self.variance) / self.value if self.variance and self.value else 0
        return f"{value} ± {share:.1%}" if share else value


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The expected size and time of a build."""

    # "documents", "tokens", "rows" and "disk" (bytes) of the whole cache, by split.
    counts: dict[str, dict[str, Quantity]]
    # Documents that filters judge and drop, by the keys of `Stage.tally`.
    filtered: dict[tuple[str, str], Quantity]
    shards: list[Shard]  # of the sample
    sampled: int  # bytes of the corpus built for the estimate
    core_seconds: float  # time for unfinished pieces, summed over local processes
    seconds: float  # the runner's wall time on this machine


@dataclasses.dataclass(frozen=True)
class _Built:
    """A built piece: its process, start time, duration, shards, and the filters' tally."""

    piece: Piece
    process: int
    begin: float
    seconds: float
    shards: dict[str, Shard]
    tally: Counter[tuple[str, str]]


def estimate(
    job: graph.Job,
    loaded: Vocabulary,
    to_do: list[Piece],
    workers: int,
    runner: Engine,
    copies: Mapping[str, str],
    seed: int = 0,
) -> Estimate:
    """Builds a sample of the pieces `to_do` in a temporary folder and scales the result up.

    `copies`: paths of further files, by name. An empty job by `runner` is timed.
    """
    generator = random.Random(seed)
    # A small corpus is built and timed as a whole.
    slices = timed = list(job.corpus.pieces)
    if sum(piece.bytes for piece in slices) > SAMPLE_BYTES:
        slices = _draw(job.corpus.pieces, generator)
        timed = _spread(timed, _TIMED_BYTES, _TIMED_SLICES * workers, generator)
    nothing = dataclasses.replace(slices[0], parts=(), members=(), bytes=0)
    # Build slices first, so that processes are warm when pieces are timed.
    to_build = [*slices, *[nothing] * _EMPTY_PIECES, *timed]
    with tempfile.TemporaryDirectory() as scratch:
        files.write_bytes(files.join(scratch, loaded.record.file_name), loaded.model)
        for name, path in copies.items():
            files.copy(path, files.join(scratch, name))
        plan = dataclasses.replace(job.plan, shards=dict.fromkeys(job.plan.shards, len(to_build)))
        aside = graph.for_workers(dataclasses.replace(job, folder=scratch, plan=plan))
        built = _build(aside, to_build, workers)
        start = time.monotonic()
        graph.run(aside, [], runner)
        runner_seconds = time.monotonic() - start
    sampled, measured = built[: len(slices)], built[len(slices) :]
    per_piece = statistics.median(each.seconds for each in measured if not each.piece.bytes)
    longer = [each for each in measured if each.piece.bytes]
    seconds = sum(each.seconds - per_piece for each in longer)
    per_byte = max(seconds, 0.0) / sum(each.piece.bytes for each in longer)
    costs = [per_piece + per_byte * piece.bytes for piece in to_do]
    first = {each.process: each for each in sorted(sampled, key=lambda each: -each.begin)}
    loading = max(each.seconds - per_piece - per_byte * each.piece.bytes for each in first.values())
    return Estimate(
        counts=_scale_up(job.corpus.pieces, sampled, list(job.plan.shards)),
        filtered=_filtered(job.corpus.pieces, sampled),
        shards=[shard for each in sampled for shard in each.shards.values()],
        sampled=sum(piece.bytes for piece in slices),
        core_seconds=sum(costs),
        seconds=runner_seconds + max(loading, 0.0) + _longest(costs, workers) if to_do else 0.0,
    )


def _draw(pieces: tuple[Piece, ...], generator: random.Random) -> list[Piece]:
    """Returns random slices of the pieces, stratified by the splits they feed."""
    total = sum(piece.bytes for piece in pieces)
    drawn = []
    for stratum in _strata(pieces).values():
        size = sum(piece.bytes for piece in stratum)
        wanted = max(_MIN_SLICES, round(SAMPLE_BYTES / _SLICE_BYTES * size / total))
        drawn += _spread(stratum, _SLICE_BYTES, wanted, generator)
    generator.shuffle(drawn)
    return drawn


def _spread(pieces: list[Piece], size: int, wanted: int, generator: random.Random) -> list[Piece]:
    """Draws one slice of about `size` bytes from each of `wanted` equal stretches of the pieces."""
    counts = [_slices(piece, size) for piece in pieces]
    ends = list(itertools.accumulate(counts))
    wanted = min(wanted, ends[-1])
    drawn = []
    for draw in range(wanted):
        number = int((draw + generator.random()) * ends[-1] / wanted)
        place = bisect.bisect_right(ends, number)
        drawn.append(_slice(pieces[place], size, number - (ends[place] - counts[place])))
    return drawn


def _strata(pieces: "tuple[Piece, ...] | list[Piece]") -> dict[tuple[str, ...], list[Piece]]:
    strata: dict[tuple[str, ...], list[Piece]] = {}
    for piece in pieces:
        strata.setdefault(piece.splits, []).append(piece)
    return strata


def _slices(piece: Piece, size: int) -> int:
    """Returns the number of slices of a piece; 1 if only its reader can find places to cut."""
    if piece.members or (len(piece.parts) == 1 and piece.parts[0].stop is None):
        return 1
    count = max(1, math.ceil(piece.bytes / size))
    (first, *more) = piece.parts
    return count if more or first.stop is None else min(max(1, first.stop - first.start), count)


def _slice(piece: Piece, size: int, number: int) -> Piece:
    """Returns slice `number` of a piece: an equal share of its bytes, cut where it can be cut."""
    count = _slices(piece, size)
    if count == 1:
        return piece
    begin, end = (piece.bytes * cut // count for cut in (number, number + 1))
    taken = [each for each in _cut_parts(piece, size) if each[0] < end and each[1] > begin]
    if len(taken) > 1 and taken[0][0] < begin:  # belongs to the previous slice
        del taken[0]
    parts = tuple(part for _, _, part in taken)
    size = sum(part.bytes for part in parts)
    return dataclasses.replace(piece, name=f"{piece.name}/{number}", parts=parts, bytes=size)


def _cut_parts(piece: Piece, size: int) -> Iterator[tuple[int, int, FilePart]]:
    """Yields (begin, end, part) for parts of about `size` bytes; offsets are bytes of the piece."""
    end = 0
    for part in piece.parts:
        whole = FileRange(part.start, part.stop, part.bytes, part.cuts)
        for each in cutting.cut([whole], size):
            begin, end = end, end + each.bytes
            yield begin, end, FilePart(part.file, each.start, each.stop, each.bytes, each.cuts)


def _build(job: graph.Job, pieces: list[Piece], workers: int) -> list[_Built]:
    sizes, numbered = [piece.bytes for piece in pieces], list(enumerate(pieces))
    of = functools.partial, (_time, job)
    return list(processes.in_order("sampling", *of, numbered, sizes, workers))


def _time(job: graph.Job, numbered: tuple[int, Piece]) -> _Built:
    number, piece = numbered
    begin = time.monotonic()
    shards = tuple((split, number) for split in piece.splits)
    filters = graph.filtering("stage")(job.plan.filters) if job.plan.filters else None
    graph.build_piece(job, graph.Assignment(piece, shards), filters)
    seconds = time.monotonic() - begin
    sizes = files.list_sizes(job.folder)
    found = {
        split: finished(job.folder, job.plan, split, number, sizes, others=(job.fingerprint,))
        for split in piece.splits
    }
    there = {split: shard for split, shard in found.items() if shard}
    for shard in there.values():
        for name in shard.files:
            files.remove(files.join(job.folder, name))
    tally = filters.tally if filters else Counter[tuple[str, str]]()
    return _Built(piece, os.getpid(), begin, seconds, there, tally)


def _scale_up(
    pieces: tuple[Piece, ...], built: list[_Built], splits: list[str]
) -> dict[str, dict[str, Quantity]]:
    names = ("documents", "tokens", "rows", "disk")
    counts = {split: dict.fromkeys(names, Quantity()) for split in splits}
    for key, stratum in _strata(pieces).items():
        mine = [each for each in built if each.piece.splits == key]
        for split in key:
            for name in names:
                shards = [each.shards[split] for each in mine]
                if name == "disk":
                    values = [sum(file.bytes for file in shard.files.values()) for shard in shards]
                else:
                    values = [getattr(shard, name) for shard in shards]
                nominal = name == "documents"
                sizes = [each.piece.bytes if nominal else _text(each) for each in mine]
                # A sample without any text says nothing by its text.
                if not 0 < sum(sizes) <= _REPEATED * sum(each.piece.bytes for each in mine):
                    sizes = [each.piece.bytes for each in mine]
                total = sum(piece.bytes for piece in stratum)
                whole = sum(each.piece.bytes for each in mine) >= total
                counts[split][name] += _ratio(values, sizes, total, whole)
    return counts


def _filtered(pieces: tuple[Piece, ...], built: list[_Built]) -> dict[tuple[str, str], Quantity]:
    found = dict.fromkeys(sorted({key for each in built for key in each.tally}), Quantity())
    for splits, stratum in _strata(pieces).items():
        mine = [each for each in built if each.piece.splits == splits]
        sizes = [each.piece.bytes for each in mine]
        total = sum(piece.bytes for piece in stratum)
        for key in found:
            tallies = [each.tally[key] for each in mine]
            found[key] += _ratio(tallies, sizes, total, sum(sizes) >= total)
    return found


def _text(built: _Built) -> int:
    """Returns a slice's size; in bytes of text if its file bytes are a guess, as in Parquet."""
    form = FORMATS.get(built.piece.format)
    if not form or not form.ranges_are_rows or not built.piece.bytes:
        return built.piece.bytes
    return sum(shard.text_bytes for shard in built.shards.values())


def _ratio(values: list[int], sizes: list[int], total: int, whole: bool = False) -> Quantity:
    """Scales the sum of `values` from the sum of `sizes` to `total`; exact if `whole`."""
    if whole:
        return Quantity(sum(values))
    sampled, count = sum(sizes), len(values)
    ratio = sum(values) / sampled
    if count < 2:
        return Quantity(ratio * total, math.inf)
    squares = sum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    mean = sampled / count
    variance = max(1 - sampled / total, 0.0) * squares / (count - 1) / count / mean**2
    return Quantity(ratio * total, variance * total**2)


def _longest(costs: list[float], workers: int) -> float:
    """Returns the seconds until all workers finish, if each idle worker takes the next piece."""
    busy = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)
