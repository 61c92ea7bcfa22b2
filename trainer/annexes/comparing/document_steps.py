"""Finds the steps at which a run saw a document, from its configuration and caches' lineage.

This also works after a takedown has changed the caches, which keep their earlier lineage.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from tasks.cache import old_states
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import as_flag
from trainer.checkpoints import metadata
from trainer.config import Config, field_paths
from trainer.data.batches import Source, TrainingBatches
from trainer.data.cached import CachedData
from trainer.data.caches import caches_of
from trainer.data.run import Data, Run
from trainer.reporting.metrics import read_metrics
from trainer.setup import prepare

_PART = "#part"
_NAMED = 5  # most documents named on a line
_DOCUMENT_PART = re.compile(rf"{_PART}\d+$")


@dataclasses.dataclass(frozen=True)
class Sighting:
    """A row of a batch that held a part of a document; `step` counts from 1, `row` from 0.

    If `skipped`, the run's `--data.skip`, left the batch out, `step` is the batch's number.
    """

    document: str
    step: int
    row: int
    task: str
    epoch: int
    window: int
    skipped: str = ""

    def __str__(self) -> str:
        what, why = "step", ""
        if self.skipped:
            what, why = "batch", f", skipped by --data.skip={self.skipped}"
        return (
            f"{what} {self.step:,}, row {self.row:,}: {self.document} ({self.task}, epoch "
            f"{self.epoch:,}, window {self.window:,}){why}"
        )


class Sightings:
    """The documents that a run has seen; `cache_dir` is its caches' folder, if moved."""

    def __init__(self, model_dir: str, cache_dir: str | None = None):
        run, data = prepared(*metadata.load_config(model_dir), cache_dir)
        saved, description = metadata.newest(model_dir)
        self.steps = max([saved, *(line["step"] for line in read_metrics(model_dir))])
        # The run that it branched from made the updates before.
        self._first = run.config.branch[1] + 1 if run.config.branch else 1
        self.count = max(0, self.steps + 1 - self._first)
        caches = caches_of(run.config)
        tasks, self._paths = [], []
        _ = data.sources  # reads which shards are built so far
        for task in data.tasks:
            if task.manifest.plan.adopted:
                raise UserError(f"{task.cache} is from another program, which records no documents")
            now = task.manifest.plan.fingerprint
            then = description.get("cache_fingerprints", {}).get(task.task.name, now)
            if then != now:
                task = caches.as_it_was(task, old_states.load(task.cache, then))
            paths = old_states.lineage_paths(task.cache, task.manifest, "train", then)
            self._paths.append(paths)
            tasks.append(task)
        self._data = CachedData(run.config, tasks, run.converter)
        whole = field_paths.replace(run.config, "data.skip", ())
        self._whole = CachedData(whole, tasks, run.converter)
        self._skip = run.config.data

    def of(self, documents: Collection[str]) -> Iterator[Sighting]:
        """Yields the rows that held a part of one of the documents, by step.

        Rows of batches that the run has skipped follow.
        """
        found: dict[tuple[int, ...], list[dict[int, list[str]]]] = {}  # by lengths of windows
        for step, batches, skipped in self._read():
            sources = batches.sources(step - 1)
            widths = tuple(each.maker.windows.window_tokens for each in sources)
            if widths not in found:
                found[widths] = [
                    self._windows(number, source, set(documents))
                    for number, source in enumerate(sources)
                ]
            windows = found[widths]
            known = [np.array(sorted(each), np.int64) for each in windows]
            if not any(map(len, known)):
                continue
            rows_E, places, _ = batches.examples(step - 1)
            seen = np.zeros(len(rows_E), bool)
            for number, values in enumerate(known):
                seen |= (places.sources == number) & np.isin(places.windows, values)
            for place in np.flatnonzero(seen).tolist():
                number, window = int(places.sources[place]), int(places.windows[place])
                for document in windows[number][window]:
                    yield Sighting(
                        document, step, int(rows_E[place]), sources[number].task,
                        int(places.epochs[place]), window, skipped,
                    )  # fmt: skip

    def _read(self) -> Iterator[tuple[int, TrainingBatches, str]]:
        """Yields (step, batches by step, "") of updates, then (batch, batches, why) of others."""
        batches, skips = self._data.batches(), self._skip.skips
        yield from ((step, batches, "") for step in range(self._first, self.steps + 1))
        batches, passed = self._whole.batches(), skips.batch(self._first - 1)
        for first, following in skips.up_to(skips.batch(self.steps)):
            left_out = range(max(first, passed + 1), following)
            yield from ((number, batches, as_flag(self._skip.skip)) for number in left_out)

    def _windows(self, number: int, source: Source, documents: set[str]) -> dict[int, list[str]]:
        """Returns window -> documents, for the windows of a task that hold any of them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        listed = pa.array(sorted(documents), pa.string())
        found: dict[int, dict[str, None]] = {}
        for shard, path in enumerate(self._paths[number]):
            table = _lineage(path)
            # Filter in Arrow: there may be a billion ids.
            ids = table.column("id")
            table = table.filter(pc.or_(pc.is_in(ids, listed), pc.match_substring(ids, _PART)))
            for name, *place in zip(*(column.to_pylist() for column in table.columns), strict=True):
                name = name if name in documents else _DOCUMENT_PART.sub("", name)
                if name in documents:
                    for window in source.maker.windows.holding(shard, *place):
                        # A dict keeps the order of the names.
                        found.setdefault(window, {})[name] = None
        return {window: list(names) for window, names in found.items()}


def _lineage(path: str) -> Any:
    from pyarrow import parquet

    try:
        with files.open_read(path) as file:
            return parquet.read_table(file, columns=["id", "row", "position", "tokens"])
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing because the cache was extended after the run: restore the cache "
            "that the run was trained on"
        ) from error


def prepared(config: Config, origins: dict[str, str], cache_dir: str | None) -> tuple[Run, Data]:
    """Returns a run and its data; raises UserError if the data is not cached."""
    if cache_dir:
        config = field_paths.replace(config, "cache_dir", cache_dir)
    run = prepare(config, origins)
    if not run.data.tasks:
        raise UserError(
            f"task {config.task} is read through seqio, which does not record documents"
        )
    return run, run.data


def print_sightings(model_dirs: str, documents: str, cache_dir: str | None) -> None:
    """Prints a line per row that held a document.

    `model_dirs` are separated by commas; `documents` is an id, or @FILE with one id per line.
    """
    names = [documents]
    try:
        if documents.startswith("@"):
            lines = files.read_lines(documents[1:])
            names = list(dict.fromkeys(line for line in lines if line.strip()))
    except FileNotFoundError as error:
        raise UserError(f"--document={documents}: there is no such file") from error
    if not any(names):
        raise UserError(f"--document={documents} names no document: give an id, or @FILE with ids")
    for model_dir in model_dirs.split(","):
        sightings = Sightings(model_dir, cache_dir)
        seen: set[str] = set()
        steps: set[int] = set()
        for each in sightings.of(names):
            print(f"{model_dir}: {each}")
            if each.skipped:
                continue
            seen.add(each.document)
            steps.add(each.step)
        others = [name for name in names if name not in seen]
        of_steps = f"of its {sightings.count:,} steps"
        if seen:
            what = f"{len(seen):,} of {len(names):,} documents" if len(names) > 1 else names[0]
            print(f"{model_dir} saw {what} in {len(steps):,} {of_steps}")
        if others:
            more = ", …" if len(others) > _NAMED else ""
            print(f"{model_dir} did not see {', '.join(others[:_NAMED])}{more} in any {of_steps}")
