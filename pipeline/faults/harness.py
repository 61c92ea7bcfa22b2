"""Fault injection into builds: trials, what they must end in, and how many are run.

The harness builds a small corpus once without faults. Each trial then injects one kind of fault
into builds of its own cache, repeats the build until it succeeds, and compares every file with the
first build's.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.faults import corpora
from pipeline.faults.process_group import ModuleGroup
from tasks.cache.manifest import CacheManifest
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

CORPUS_FILES = 4  # files of the copied corpus
_DEADLINE_SECONDS = 300
# Python's words for an exception that nothing handled.
_TRACEBACKS = ("Traceback (most recent call last)", "Exception ignored in")


@dataclasses.dataclass
class Outcome:
    """A line of the table: one kind of fault, how often it was injected, and the results."""

    fault: str
    injected: int = 0
    while_writing: int = 0
    caches: int = 0
    equal: int = 0
    lost: int = 0
    duplicated: int = 0
    redone: int = 0
    note: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Adds the outcome of another trial of the same fault."""
        counts = (
            *("injected", "while_writing", "caches", "equal"),
            *("lost", "duplicated", "redone"),
        )
        for field in counts:
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.note = other.note or self.note
        self.failures += other.failures


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
      name: shown in the table.
      injections: how often it is to be injected over all trials.
      inject: runs a trial, injecting the fault `trial.injections` times at most.
      per_trial: the most injections into one trial.
    """

    name: str
    injections: int
    inject: Callable[["Trial"], None]
    per_trial: int = 1


class Harness:
    """A small corpus, a build of it without faults, and what other builds are compared with.

    Attributes:
      flags: the command's flags.
      folder: holds everything that is written.
      corpus: folder of the copied corpus.
      sides: options of the copy's SPEC, if it holds pairs.
      task: flags that name the task, then the name of its cache.
      rows: its documents.
      corpus_bytes: bytes of its documents.
      reference: folder of the cache built without faults.
      plan: plan of that cache.
      seconds: (from the start of that build to its first row, from there to its end).
      lock, further: further references by name, which several trials need, and the lock that is
        held while one is made.
      runner: flags that choose where the other builds run; worker processes of their own if empty.
    """

    runner: tuple[str, ...] = ()

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags = flags
        self.folder = folder
        self.corpus = folder / "corpus"
        is_pairs = sources.parse(flags.corpus).unit is Unit.PAIR
        self.sides = "inputs=inputs&targets=targets&" if is_pairs else ""
        self.task: tuple[str, ...] = (f"--task={flags.task}", flags.task)
        if is_pairs:
            self.task = ("--task=supervised", "--name=chaos", "chaos_supervised")
        if is_pairs and flags.format == "wet":
            raise UserError("a WET file has one text a document: give pairs another --format")
        self.rows, self.corpus_bytes = _documents_of(flags.corpus, flags.corpus_bytes)
        self.write_corpus(self.corpus, CORPUS_FILES)
        begin = time.monotonic()
        trial = Trial(self, Outcome("none"), "reference")
        build = trial.launch(1)
        trial.wait_for_rows(build)
        first_row = time.monotonic()
        if trial.wait(build):
            raise UserError(f"the build without faults failed: {build.log_tail()}")
        self.seconds = (first_row - begin, time.monotonic() - first_row)
        self.reference = trial.cache
        self.plan = CacheManifest.load(str(self.reference)).plan
        self.expected = checksums(self.reference)
        self.documents = documents_of(self.reference)
        self.lock = threading.Lock()
        self.further: dict[str, Any] = {}

    def write_corpus(self, folder: pathlib.Path, count: int) -> None:
        """Writes the documents into `count` files of a new folder."""
        folder.mkdir(parents=True)
        for number in range(count):
            name = corpora.file_name(self.flags.format, number)
            data = corpora.encoded(self.flags.format, self.rows[number::count])
            (folder / name).write_bytes(data)

    def run_trials(self, faults: list[Fault], parallel: int) -> list[Outcome]:
        """Runs trials, `parallel` at a time, until every fault was injected often enough.

        A fault with a failed trial gets no further ones, which also ends a fault that can never be
        injected.
        """
        outcomes = [Outcome(fault.name) for fault in faults]
        numbers = itertools.count()
        running: dict[Future[Outcome], tuple[Outcome, int]] = {}

        def run_trial(fault: Fault, injections: int) -> Outcome:
            trial = Trial(self, Outcome(fault.name), f"trial-{next(numbers)}", injections)
            fault.inject(trial)
            return trial.outcome

        def start_more() -> None:
            for outcome, fault in zip(outcomes, faults, strict=True):
                planned = outcome.injected + sum(
                    injections for other, injections in running.values() if other is outcome
                )
                while (
                    len(running) < parallel and not outcome.failures and planned < fault.injections
                ):
                    injections = min(fault.injections - planned, fault.per_trial)
                    running[pool.submit(run_trial, fault, injections)] = (outcome, injections)
                    planned += injections

        total = sum(fault.injections for fault in faults)
        with ThreadPoolExecutor(parallel) as pool, progress.shown("chaos", total) as bar:
            start_more()
            while running:
                done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in done:
                    running.pop(future)[0].add(future.result())
                failures = sum(len(outcome.failures) for outcome in outcomes)
                bar.update(sum(outcome.injected for outcome in outcomes), f"{failures} failures")
                start_more()
        return outcomes


class Trial:
    """One cache, the builds that write it, and the outcome.

    Args:
      harness: what the trial belongs to.
      outcome: counts what happens.
      name: name of the trial's folder, and part of the seed of `random`.
      injections: how many faults to inject, at most.
    """

    def __init__(self, harness: Harness, outcome: Outcome, name: str, injections: int = 1):
        self.harness = harness
        self.outcome = outcome
        self.injections = injections
        self.random = random.Random(f"{harness.flags.seed} {name}")
        self.folder = harness.folder / name
        self.cache = self.folder / harness.task[-1]
        self.corpus = harness.corpus
        # Checksums of the files that this trial's cache must have, and its documents; {} for those
        # of the reference.
        self.expected: dict[str, str] = {}
        self.documents: Counter[tuple] = Counter()
        self.exclude = ""  # lists to give to builds
        self.filters: tuple[str, ...] = ()  # flags that give builds their filters
        self._finished: dict[pathlib.Path, tuple[int, int]] = {}
        self._log = harness.folder / f"{name}.log"

    def copy_reference(self) -> None:
        """Starts the trial from a copy of the cache built without faults."""
        shutil.copytree(self.harness.reference, self.cache)

    def draw_workers(self, least: int = 1) -> int:
        """Returns a random number of workers; half the draws are the lowest, which starts fast."""
        low, high = self.harness.flags.workers
        if least == 1 and self.random.random() < 0.5:
            return low
        return self.random.randint(max(low, least), max(high, least))

    def launch(self, workers: int, **options) -> ModuleGroup:
        """Starts a build; `options` are passed to subprocess.Popen."""
        flags = self.harness.flags
        module = [
            *("pipeline.build", f"--cache_dir={self.folder}"),
            *(*self.harness.task[:-1], f"--vocabulary={flags.vocabulary}"),
            *(f"--extra_ids={flags.extra_ids}", f"--shard_bytes={flags.shard_bytes}"),
            f"--corpus={corpora.spec(flags.format, str(self.corpus))}{self.harness.sides}"
            "validation=0.1",
            *((f"--exclude={self.exclude}",) if self.exclude else ()),
            *self.filters,
            *(self.harness.runner or (f"--workers={workers}",)),
        ]
        return ModuleGroup(module, self._log, **options)

    def launch_search(self, workers: int) -> ModuleGroup:
        """Starts a search for duplicates, whose list is written to `search`."""
        module = [
            *("pipeline.dedup", f"--output={self.search}", "--rows=4"),
            f"--shard_bytes={self.harness.flags.shard_bytes}",
            f"--corpus=json:{self.corpus}/*.jsonl?{self.harness.sides.removesuffix('&')}",
            *(self.harness.runner or (f"--workers={workers}",)),
        ]
        return ModuleGroup(module, self._log)

    @property
    def search(self) -> pathlib.Path:
        """Folder of a search for duplicates."""
        return self.folder / "search"

    def start(self, workers: int, **options) -> ModuleGroup:
        """Notes which shards are finished and valid, then launches a build."""
        from pipeline.building import lifecycle

        found = lifecycle.survey(str(self.cache), self.harness.plan)
        names = (name for shard in found.values() if shard for name in shard.files)
        paths = [self.cache / name for name in names if "tfrecord" in name]
        self._finished = {path: _identity(path) for path in paths}
        return self.launch(workers, **options)

    def rows_are_written(self) -> bool:
        """Returns whether a shard is partly written."""
        return any(self.cache.glob(files.PARTIAL + "*.tfrecord-*"))

    def wait_for_rows(self, build: ModuleGroup) -> bool:
        """Waits until rows are being written; returns False if the build ended before that."""
        return self.wait_for(build, self.rows_are_written)

    def wait_for(self, build: ModuleGroup, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds; returns False if the build ended before that."""
        return build.wait_until(condition, _DEADLINE_SECONDS)

    def kill(self, build: ModuleGroup) -> bool:
        """Kills the build and its workers; returns False if it had ended by itself."""
        running = build.running
        build.kill()
        if running:
            self.count_injection()
        self._count_redone()
        return running

    def count_injection(self) -> None:
        """Counts an injected fault."""
        self.outcome.injected += 1
        self.outcome.while_writing += self.rows_are_written()

    def finish(self, build: ModuleGroup) -> int:
        """Waits for the build to end by itself; returns its exit code."""
        code = self.wait(build)
        self._count_redone()
        return code

    def expect_failure(self, build: ModuleGroup) -> None:
        """Waits for the build to end; a reported success is a failure of the trial."""
        if not self.finish(build):
            self.fail("the build reports success")

    def rebuild_and_audit(self) -> None:
        """Runs the same command once more, which must succeed, and audits the cache."""
        build = self.start(self.draw_workers())
        if self.finish(build):
            self.fail(f"the last build failed: {build.log_tail()}")
        self.audit()

    def audit(self) -> None:
        """Compares the cache with the reference; deletes it if they are equal."""
        from pipeline.verification.cache import verify

        outcome, expected = self.outcome, self.expected or self.harness.expected
        outcome.caches += 1
        actual = checksums(self.cache)
        names = sorted(actual.keys() | expected.keys())
        differing = [name for name in names if actual.get(name) != expected.get(name)]
        documents = documents_of(self.cache)
        wanted = self.documents or self.harness.documents
        outcome.lost += (wanted - documents).total()
        outcome.duplicated += (documents - wanted).total()
        faults = verify(str(self.cache))[1]
        if differing or faults:
            what = ", ".join(differing[:3]) or str(faults[0])
            self.fail(f"{self.cache} differs in {what}")
            return
        outcome.equal += 1
        shutil.rmtree(self.cache)

    def wait(self, build: ModuleGroup) -> int:
        """Returns the build's exit code; one that hangs is killed and fails the trial."""
        try:
            code = build.wait(_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.fail(f"a build hung for {_DEADLINE_SECONDS} s and was killed")
            return -signal.SIGKILL
        if any(sign in build.output() for sign in _TRACEBACKS):
            self.fail(f"a build ended with a traceback: {build.log_tail()}")
        return code

    def fail(self, what: str) -> None:
        """Records that a build, or a cache, is not as it should be."""
        self.outcome.failures.append(f"{self.outcome.fault}: {what}")

    def _count_redone(self) -> None:
        self.outcome.redone += sum(
            not path.exists() or _identity(path) != before
            for path, before in self._finished.items()
        )


def _identity(path: pathlib.Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def _documents_of(spec: str, limit: int) -> tuple[list[corpora.Row], int]:
    """Returns documents of a corpus, up to `limit` bytes of them as JSON lines, and their bytes."""
    corpus = sources.resolve(sources.parse(spec))
    columns = ["id", *corpus.spec.unit.columns]
    rows: list[corpora.Row] = []
    size = 0
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            usable = batch.filter(batch.column("problem").is_null())
            for row in usable.select(columns).to_pylist():
                rows.append(row)
                size += len(json.dumps(row)) + 1
                if size >= limit:
                    return rows, size
    return rows, size


def checksums(folder: pathlib.Path) -> dict[str, str]:
    """Returns the sha256 of every file in a folder, by name."""
    return {path.name: files.sha256(str(path)) for path in folder.iterdir() if path.is_file()}


def documents_of(folder: pathlib.Path) -> Counter[tuple]:
    """Returns how often each part of a document is in the cache, by split, id and offset."""
    from pyarrow import parquet

    counts: Counter[tuple] = Counter()
    for path in folder.glob("*.documents-*"):
        table = parquet.read_table(path, columns=["id", "document_offset", "tokens"])
        columns = (column.to_pylist() for column in table.columns)
        counts.update((path.name.split(".")[0], *entry) for entry in zip(*columns, strict=True))
    return counts
