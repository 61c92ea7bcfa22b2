"""The last stage: one process writes clusters of duplicates and the exclude list.

A cluster keeps its first uncontaminated unit in corpus order. Memory holds 12 bytes per unit of the
corpus (20 above 2**32 units; one more with evaluation sets), one partition's pairs, and one piece's
units.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.annexes.deduplication import arrays, kernels
from pipeline.annexes.deduplication.contamination import Judge
from pipeline.annexes.deduplication.edges import Pieces
from pipeline.annexes.deduplication.plan import EDGES, LIST, PARAGRAPH, PREFIXES, Job, partitions
from pipeline.annexes.deduplication.signatures import COUNTS, file_names
from pipeline.exclusion import lists, origins
from tasks.reading.corpus import file_of
from tasks.storage import files
from tasks.terminal import progress

_BLOCK = 1 << 24  # units counted at a time
_REASONS = [lists.EXACT, lists.NEAR, lists.CONTAMINATED]
_EXACT, _NEAR, _CONTAMINATED = range(3)


@dataclasses.dataclass
class Result:
    """The findings of a search."""

    # "documents", "text_bytes", "units", "groups"; by reason, "exact", "near", "contaminated";
    # "candidates", which share a band with an earlier unit, and the "unlike" ones among them;
    # "repeated", ids of several documents; "places", entries that need a place.
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    # Number of clusters by size in units.
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    # Expected number of near duplicates less similar to the kept twin than `Rules.wanted`.
    unlike_twin: float = 0


def write_list(job: Job, pieces: int, of_keys: int, header: dict[str, Any]) -> Result:
    """Joins the pairs of all `of_keys` partitions into clusters and writes the exclude list."""
    opened = Pieces.open(job, pieces)
    result = Result()
    total = int(opened.starts[-1])
    roots = np.arange(total, dtype=np.uint32 if total < 1 << 32 else np.uint64)
    firsts = roots.copy()  # first units with the same text
    repeated = [np.zeros((0, 2), np.uint64)]
    for number in range(of_keys):
        found = arrays.Arrays(job.path(EDGES, number))
        for name in ("exact", "near"):
            pairs = found.read(name)
            kernels.join(roots, pairs[:, 0].copy(), pairs[:, 1].copy())
        firsts[found.read("exact")[:, 1]] = found.read("exact")[:, 0]
        repeated.append(found.read("repeated"))
        for name, count in zip(("candidates", "unlike"), found.read("counts"), strict=True):
            result.counts[name] += int(count)
    kernels.flatten(roots)
    others = kernels.others_of(roots)
    sizes: Counter[int] = Counter()
    for begin in range(0, len(others), _BLOCK):
        some = others[begin : begin + _BLOCK]
        found_sizes, counts = np.unique(some[some > 0], return_counts=True)
        sizes.update(dict(zip((found_sizes + 1).tolist(), counts.tolist(), strict=True)))
    result.sizes = dict(sorted(sizes.items()))
    result.counts["groups"] = sizes.total()
    shared = np.concatenate(repeated)
    of_list, of_pieces = _located(job, opened)
    result.counts.update(units=total, repeated=len(shared))
    judge = Judge(job, opened.opened) if job.contaminated else None
    shown = [judge.contaminated(each) for each in opened.opened] if judge else []
    if judge:
        out = np.zeros(total, bool)
        for start, (units, _) in zip(opened.starts.tolist(), shown, strict=False):
            out[units + start] = True
        kernels.reroot(roots, out)
    unlike = job.rules.unlike()
    clusters = _Clusters(job, opened, roots, firsts, judge, shared, of_pieces, unlike)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        bar = stack.enter_context(progress.shown("listing", pieces))
        for number in range(pieces):
            of_sets = shown[number] if judge else None
            clusters.write_entries(number, of_sets, os.path.join(scratch, str(number)), result)
            bar.update(number + 1)
        _merge(job, scratch, of_list, header, result)
    return result


@dataclasses.dataclass(frozen=True)
class _Clusters:
    """Clusters of all pieces."""

    job: Job
    pieces: Pieces
    roots: np.ndarray  # the unit kept in place of each unit; a kept unit is its own root
    firsts: np.ndarray  # the first unit with the same text as each unit
    judge: Judge | None  # finds contaminated units; None without evaluation sets
    # uint64[ids, 2], sorted and salted digests of ids shared by several documents of a corpus
    repeated: np.ndarray
    files: list[np.ndarray]  # each piece's files, as indices in the list's origins
    unlike: np.ndarray

    def write_entries(
        self,
        number: int,
        contaminated: tuple[np.ndarray, np.ndarray] | None,
        path: str,
        result: Result,
    ) -> None:
        """Writes a piece's sorted entries to a local file and counts them."""
        own = self.pieces.opened[number]
        start, end = self.pieces.starts[number : number + 2].tolist()
        roots_here = self.roots[start:end].astype(np.int64)
        here = np.arange(start, end)
        is_listed = roots_here != here
        if contaminated:
            is_listed[contaminated[0]] = False  # listed for another reason
        units = np.flatnonzero(is_listed)
        roots = roots_here[units]
        reasons = np.where(self.firsts[here[units]] == self.firsts[roots], _EXACT, _NEAR)
        twins = self._names(roots)
        similarity = np.full(len(units), np.nan, np.float32)
        if self.job.rules.near and len(units):
            signatures = self.pieces.signatures
            equal = (signatures(here[units]) == signatures(roots)).sum(1)
            similarity = self.job.rules.estimate(equal).astype(np.float32)
            result.unlike_twin += float(self.unlike[equal[reasons == _NEAR]].sum())
        if self.judge and contaminated:
            more, examples = contaminated
            units = np.concatenate([units, more])
            reasons = np.concatenate([reasons, np.full(len(more), _CONTAMINATED)])
            twins += [self.judge.grams.name(example) for example in examples.tolist()]
            nothing = np.full(len(more), np.nan, np.float32)
            similarity = np.concatenate([similarity, nothing])
        owners = own.read("owner")[units].astype(np.int64)
        high, low = (own.read(name)[owners] for name in ("high", "low"))
        name, _ = self.job.pieces[number]
        shared = _has(self.repeated, high ^ self.job.salt(name), low)
        place = np.where(shared, own.read("places")[owners], np.uint64(0))
        paragraph = own.read("paragraph")[units]
        order = np.lexsort((paragraph, place, low, high))
        entries = pa.record_batch(
            {
                "high": high[order], "low": low[order], "place": place[order],
                "paragraph": paragraph[order], "reason": reasons[order].astype(np.uint8),
                "twin": pa.array([twins[row] for row in order.tolist()], pa.large_string()),
                "similarity": similarity[order],
                "file": self.files[number][own.read("file")[owners]][order],
                "row": own.read("row")[owners][order], "part": own.read("part")[owners][order],
            }
        )  # fmt: skip
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, entries.schema) as writer:
            writer.write_batch(entries)
        names = ("exact", "near", "contaminated")
        counted = np.bincount(reasons, minlength=len(names)).tolist()
        result.counts.update(dict(zip(names, counted, strict=True)))
        result.counts["places"] += int(shared.sum())
        of_piece = own.read("counts").tolist()
        result.counts.update(dict(zip(COUNTS, of_piece, strict=True)))

    def _names(self, units: np.ndarray) -> list[str]:
        found = [""] * len(units)
        for number, places, rows in self.pieces.grouped(units):
            opened = self.pieces.opened[number]
            name, _ = self.job.pieces[number]
            begin = f"{name}:" if name else ""
            data, bounds = opened.read("ids"), opened.read("id_bounds")
            owners = opened.read("owner")[rows].astype(np.int64)
            for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
                found[place] = begin + data[bounds[owner] : bounds[owner + 1]].tobytes().decode()
        return found


def _located(job: Job, pieces: Pieces) -> tuple[list[origins.Origin], list[np.ndarray]]:
    """Returns (the list's origins; of each piece, uint32 indices of its files in them)."""
    members = [json.loads(each.read("members").tobytes()) for each in pieces.opened]
    found, places = [], dict[tuple[str, str], int]()
    for name, corpus in job.corpora.items():
        origin = origins.of_corpus(corpus)
        by_name = {file.name: file for file in origin.files}
        inner = {
            each: by_name[file_of(each, by_name)].within(each)
            for (of, _), some in zip(job.pieces, members, strict=True)
            for each in some
            if of == name
        }
        own = [*origin.files, *(inner[each] for each in sorted(inner))]
        begin = len(places)
        places |= {(name, file.name): begin + at for at, file in enumerate(own)}
        found.append(dataclasses.replace(origin, files=tuple(own)))
    return found, [
        np.array([places[name, file] for file in [*(file_names(piece) or [""]), *more]], np.uint32)
        for (name, piece), more in zip(job.pieces, members, strict=True)
    ]


def _has(pairs: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    if not len(pairs) or not len(high):
        return np.zeros(len(high), bool)
    kind = np.dtype([("high", "<u8"), ("low", "<u8")])
    wanted = np.stack([high, low], 1).view(kind).ravel()
    return np.isin(wanted, np.ascontiguousarray(pairs).view(kind).ravel())


def _merge(
    job: Job,
    scratch: str,
    of_list: list[origins.Origin],
    header: dict[str, Any],
    result: Result,
) -> None:
    """Merges all pieces' sorted entries into the list, one key range at a time."""
    spilled = [
        pa.ipc.open_file(pa.memory_map(os.path.join(scratch, str(number)))).get_batch(0)
        for number in range(len(job.pieces))
    ]
    highs = [batch.column("high").to_numpy() for batch in spilled]  # mapped
    entries = sum(map(len, spilled))
    parts = partitions(entries)
    marks = np.arange(1, parts, dtype=np.uint64) * np.uint64(1 << 56) * np.uint64(PREFIXES // parts)
    bounds = [[0, *np.searchsorted(high, marks).tolist(), len(high)] for high in highs]
    paragraphs = entries if job.rules.unit == PARAGRAPH else 0
    counts = {"documents": entries - paragraphs, "paragraphs": paragraphs}
    counts["places"] = result.counts["places"]

    def columns(part: int) -> dict[str, pa.ChunkedArray]:
        some = pa.Table.from_batches(
            batch.slice(bound[part], bound[part + 1] - bound[part])
            for batch, bound in zip(spilled, bounds, strict=True)
        )
        keys = [some.column(name).to_numpy() for name in ("paragraph", "place", "low", "high")]
        ordered = some.take(np.lexsort(keys)).combine_chunks()
        return dict(zip(ordered.column_names, ordered.columns, strict=True))

    full = {**header, "reasons": _REASONS, "counts": counts}
    with files.atomic_write(files.join(job.folder, LIST)) as file:
        lists.write(file, full, map(columns, range(parts)), of_list)
