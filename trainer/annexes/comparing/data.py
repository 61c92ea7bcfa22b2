"""Finds the first token that differs between two runs' batches, and records that explain it.

Recorded tasks and caches are compared first. Batches are then made again from the configuration
and caches, which determine them.
"""

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks import decode
from tasks.cache.manifest import CacheManifest
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.annexes.comparing.document_steps import prepared
from trainer.annexes.comparing.explanation import Explanation
from trainer.checkpoints import metadata
from trainer.data import task_record
from trainer.reporting.history import History


@dataclasses.dataclass(frozen=True)
class Batch:
    """The first difference between the batches: update (from 1), row, feature and position.

    `pieces` are the ids' pieces; `documents` has one line per run about the row's documents; `rows`
    counts the batch's differing rows. `note` says why rows cannot be compared; `row` is then None.
    """

    step: int
    row: int | None
    feature: str
    position: int | None = None
    values: tuple[Any, Any] | None = None
    pieces: tuple[str, str] | None = None
    documents: tuple[str, ...] = ()
    rows: int = 0
    note: str = ""


@dataclasses.dataclass
class Compared:
    """The comparison of two runs' data.

    `records` lists differences between recorded tasks, rates, vocabularies and caches; `compared`
    is (first, last) of the updates compared, if any; `lost` is True if batches cannot be remade.
    """

    records: list[str] = dataclasses.field(default_factory=list)
    batch: Batch | None = None
    compared: tuple[int, int] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    lost: bool = False


def records(one: History, other: History, last: int) -> Compared:
    """Compares the runs' records of their data up to update `last`, and their caches."""
    read = one.config.data.skips.batch(last)
    found = Compared(task_record.changes(one.record, other.record, read))
    tasks = [each.record.get("tasks", {}).keys() for each in (one, other)]
    if all(tasks) and tasks[0] != tasks[1]:
        lists = [", ".join(sorted(each)) for each in tasks]
        found.records.append(f"the tasks are {lists[0]} in A, {lists[1]} in B")
    if not all(tasks):
        found.notes.append("a run has no record of its tasks")
    stored = [metadata.newest(each.folder)[1] for each in (one, other)]
    hashes = [str(each.get("vocabulary_sha256") or "") for each in stored]
    if all(hashes) and hashes[0] != hashes[1]:
        found.records.append(f"vocabulary SHA-256: {hashes[0][:12]} in A, {hashes[1][:12]} in B")
    prints = [each.get("cache_fingerprints", {}) for each in stored]
    found.records += [
        f"the caches of {task} differ in plan: {prints[0][task][:12]} and {prints[1][task][:12]}"
        for task in prints[0].keys() & prints[1].keys()
        if prints[0][task] != prints[1][task]
    ]
    return found


class Batches:
    """The batches of two runs, made again; `cache_dirs` are their caches' folders, if moved."""

    def __init__(self, one: History, other: History, cache_dirs: tuple[str | None, str | None]):
        self._runs, self._cache_dirs = (one, other), cache_dirs
        self._data = []
        for run, folder in zip(self._runs, cache_dirs, strict=True):
            with contextlib.redirect_stdout(io.StringIO()):
                self._data.append(prepared(run.config, dict(run.origins), folder)[1])
        self._batches = [each.batches() for each in self._data]

    def shards(self) -> list[str]:
        """Returns a line about each shard whose checksum differs between a task's two caches."""
        sides = [{each.task.name: each.manifest for each in data.tasks} for data in self._data]
        return [
            line
            for task in sides[0].keys() & sides[1].keys()
            for line in _shards(task, sides[0][task], sides[1][task])
        ]

    def changed_since(self) -> Iterator[str]:
        """Yields the changes to each run's data since it was trained."""
        for run, data in zip(self._runs, self._data, strict=True):
            read = run.config.data.skips.batch(run.step)
            for change in task_record.changes(run.record, data.record, read):
                yield f"{run.name}: since it was trained, {change}"

    def first_difference(self, first: int, last: int) -> Batch | None:
        """Returns the first difference between the batches of updates `first` to `last`."""
        with progress.shown("comparing batches", last - first + 1) as bar:
            for number, step in enumerate(range(first, last + 1), 1):
                # Update k uses batch k - 1.
                one, other = (batches[step - 1] for batches in self._batches)
                found = self._compare(step, one, other)
                if found:
                    return found
                bar.update(number)
        return None

    def _compare(self, step: int, one: dict, other: dict) -> Batch | None:
        if one.keys() != other.keys():
            names = sorted(one.keys() ^ other.keys())
            return Batch(step, None, names[0], note=f"only one run has {', '.join(names)}")
        differ = {
            name: np.argwhere(one[name] != other[name])
            for name in one
            if one[name].shape == other[name].shape
        }
        for name in one:
            if name not in differ:
                shapes = " and ".join(str(each[name].shape) for each in (one, other))
                return Batch(step, None, name, note=f"its shapes are {shapes}")
        places = {name: found[0].tolist() for name, found in differ.items() if len(found)}
        if not places:
            return None
        # The first differing row, and its first differing feature.
        name = min(places, key=lambda each: places[each])
        row, *rest = places[name]
        values = one[name][tuple(places[name])].item(), other[name][tuple(places[name])].item()
        rows = np.unique(np.concatenate([found[:, 0] for found in differ.values()]))
        pieces = None
        if name.endswith("_tokens"):
            pieces = tuple(map(decode.piece, values, (data.tasks[0].ids for data in self._data)))
        return Batch(
            step,
            row,
            name,
            rest[0] if rest else None,
            values,
            pieces,  # type: ignore[arg-type]
            tuple(self._documents(step, row)),
            len(rows),
        )

    def _documents(self, step: int, row: int) -> Iterator[str]:
        for run, folder in zip(self._runs, self._cache_dirs, strict=True):
            try:
                found = Explanation(run.folder, step, folder)
                yield "; ".join(found.line(row, each) for each in range(found.examples(row)))
            except UserError as error:
                yield f"row {row}: {error}"


def _shards(task: str, one: CacheManifest, other: CacheManifest) -> Iterator[str]:
    for split in sorted(one.splits.keys() & other.splits.keys()):
        sides = [
            {
                name: entry.sha256
                for shard in each.splits[split]
                for name, entry in shard.files.items()
                if "tfrecord" in name
            }
            for each in (one, other)
        ]
        differ = sorted({name for name, _ in sides[0].items() ^ sides[1].items()})
        if differ:
            more = f", and {len(differ) - 1} more of {split}" if len(differ) > 1 else ""
            yield f"{files.join(task, differ[0])} has different bytes{more}"
