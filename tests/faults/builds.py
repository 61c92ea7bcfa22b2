"""Faults of builds: a small corpus, trials that break builds of it, and what trials must end in.

The corpus is built once without faults. Each trial then injects one kind of fault into builds of
its own cache, repeats the build until it succeeds, and compares every file with the first build's.
`tests.faults.build_faults` and `tests.faults.pools` have the kinds of faults.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from tasks.cache.manifest import CacheManifest
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table
from tasks.unit import Unit
from tests.faults import corpora
from tests.faults.command import DEADLINE_SECONDS, Command
from tests.faults.commands import Build
from tests.faults.comparing import checksums, differing, documents_of

CORPUS_FILES = 4  # files of the copied corpus
KILLS_PER_TRIAL = 8


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
        for field in dataclasses.fields(self)[1:8]:
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)
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


class Snapshot(NamedTuple):
    """What a finished cache holds: checksums of its files, and its documents."""

    checksums: dict[str, str]
    documents: Counter[tuple]

    @classmethod
    def of(cls, cache: pathlib.Path) -> "Snapshot":
        """Returns the snapshot of a cache."""
        return cls(checksums(cache), documents_of(cache))


class Lab:
    """A small corpus, a build of it without faults, and what other builds are compared with.

    Attributes:
      flags: the command's flags.
      folder: holds everything that is written.
      corpus: folder of the copied corpus.
      sides: options of the copy's SPEC, if it holds pairs.
      name: name of the caches.
      rows: the documents.
      corpus_bytes: bytes of the documents.
      reference: folder of the cache built without faults.
      plan: plan of that cache.
      seconds: (from the start of that build to its first row, from there to its end).
      wanted: what that cache holds.
      runner: flags that choose where the other builds run; this machine's processes if empty.
    """

    runner: tuple[str, ...] = ()

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags = flags
        self.folder = folder
        self.corpus = folder / "corpus"
        is_pairs = sources.parse(flags.corpus).unit is Unit.PAIR
        self.sides = "inputs=inputs&targets=targets&" if is_pairs else ""
        self.name = "chaos_supervised" if is_pairs else flags.task
        task = ("--task=supervised", "--name=chaos") if is_pairs else (f"--task={flags.task}",)
        if is_pairs and flags.format == "wet":
            raise UserError("a WET file has one text a document: give pairs another --format")
        self.build_flags = [
            *(*task, f"--vocabulary={flags.vocabulary}", f"--extra_ids={flags.extra_ids}"),
            f"--shard_bytes={flags.shard_bytes}",
        ]
        self.rows, self.corpus_bytes = _documents(flags.corpus, flags.corpus_bytes)
        self.write_corpus(self.corpus, CORPUS_FILES)
        self._lock, self._made = threading.Lock(), {}
        trial, begin = Trial(self, Outcome("none"), "reference"), time.monotonic()
        trial.launch(1)
        trial.reach_rows()
        first_row = time.monotonic()
        trial.command.finish()
        self.seconds = (first_row - begin, time.monotonic() - first_row)
        self.reference = trial.cache
        self.plan = CacheManifest.load(str(self.reference)).plan
        self.wanted = Snapshot.of(self.reference)

    def write_corpus(self, folder: pathlib.Path, count: int) -> None:
        """Writes the documents into `count` files of a new folder."""
        folder.mkdir(parents=True)
        for number in range(count):
            name = corpora.file_name(self.flags.format, number)
            data = corpora.encoded(self.flags.format, self.rows[number::count])
            (folder / name).write_bytes(data)

    def made(self, name: str, make: Callable[["Trial"], Any]) -> Any:
        """Returns what `make` returns, called once, with a trial of that name."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make(Trial(self, Outcome("none"), name))
            return self._made[name]

    def check_accounts(self, cache: pathlib.Path) -> None:
        """Checks that every document of the corpus is in the cache or left out, exactly once.

        All other caches have the same bytes.
        """
        spec = corpora.spec(self.flags.format, str(self.corpus)) + self.sides
        corpus = sources.resolve(sources.parse(spec.rstrip("?&")))
        read = Counter(
            name
            for piece in corpus.pieces
            for _, batch in sources.read(corpus, piece)
            for name in batch.column("id").to_pylist()
        )
        kept = Counter(name for _, name, offset, *_ in documents_of(cache).elements() if not offset)
        for path in cache.glob("*.quarantine-*"):
            kept.update(json.loads(line)["id"] for line in files.read_lines(str(path)))
        if kept != read:
            lost, twice = (read - kept).total(), (kept - read).total()
            raise UserError(f"{cache}: {lost:,} documents are nowhere, and {twice:,} twice")

    def run_trials(self, faults: list[Fault], parallel: int) -> list[Outcome]:
        """Runs trials, `parallel` at a time, until every fault was injected often enough.

        A fault with a failed trial gets no further ones, which also ends a fault that can never be
        injected.
        """
        outcomes = [Outcome(fault.name) for fault in faults]
        numbers = itertools.count()
        running: dict[Future[Outcome], tuple[Outcome, int]] = {}

        def start_more() -> None:
            for outcome, fault in zip(outcomes, faults, strict=True):
                planned = outcome.injected + sum(
                    injections for other, injections in running.values() if other is outcome
                )
                while (
                    len(running) < parallel and not outcome.failures and planned < fault.injections
                ):
                    injections = min(fault.injections - planned, fault.per_trial)
                    trial = Trial(self, Outcome(fault.name), f"trial-{next(numbers)}", injections)
                    running[pool.submit(trial.run, fault)] = (outcome, injections)
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
      lab: what the trial belongs to.
      outcome: counts what happens.
      name: name of the trial's folder, and part of the seed of `random`.
      injections: how many faults to inject, at most.

    Attributes:
      command: what was started last.
      wanted: what the cache must hold at the end.
      flags: further flags of builds.
      before_start: is called before each start.
    """

    def __init__(self, lab: Lab, outcome: Outcome, name: str, injections: int = 1):
        self.lab, self.outcome, self.injections = lab, outcome, injections
        self.random = random.Random(f"{lab.flags.seed} {name}")
        self.folder = lab.folder / name
        self.cache = self.folder / lab.name
        self.corpus = lab.corpus
        self.log = lab.folder / f"{name}.log"
        self.wanted: Snapshot | None = None
        self.flags: list[str] = []
        self.before_start: Callable[[], object] = lambda: None
        self.command: Command = self.build()
        self._finished: dict[pathlib.Path, tuple[int, int]] = {}

    def run(self, fault: Fault) -> Outcome:
        """Injects a fault and returns the outcome, with what went wrong."""
        try:
            fault.inject(self)
        except UserError as error:
            self.outcome.failures.append(f"{fault.name}: {error}")
            if self.command.running:
                self.command.kill()
        return self.outcome

    def copy_reference(self) -> None:
        """Starts the trial from a copy of the cache built without faults."""
        shutil.copytree(self.lab.reference, self.cache)

    def build(self) -> Build:
        """Returns the build of the trial's corpus, not started."""
        spec = corpora.spec(self.lab.flags.format, str(self.corpus)) + self.lab.sides
        given = [*self.lab.build_flags, f"--corpus={spec}validation=0.1", *self.flags]
        return Build(self.cache, self.log, *given)

    def launch(self, workers: int, command: Command | None = None, **options) -> Command:
        """Starts a build, or another command; `options` are passed to subprocess.Popen."""
        self.command = command or self.build()
        return self.command.start(*(self.lab.runner or (f"--workers={workers}",)), **options)

    def start(self, least: int = 1, **options) -> Command:
        """Notes which shards are finished and valid, then starts a build.

        Args:
          least: the fewest workers. The number is random; if `least` is 1, half of the draws are
            the lowest, which starts fast.
          **options: passed to subprocess.Popen.
        """
        from pipeline.building import lifecycle

        self.before_start()
        found = lifecycle.survey(str(self.cache), self.lab.plan)
        names = (name for shard in found.values() if shard for name in shard.files)
        paths = [self.cache / name for name in names if "tfrecord" in name]
        self._finished = {path: _identity(path) for path in paths}
        return self.launch(self.draw_workers(least), **options)

    def draw_workers(self, least: int = 1) -> int:
        """Returns a random number of workers; see `start`."""
        low, high = self.lab.flags.workers
        if least == 1 and self.random.random() < 0.5:
            return low
        return self.random.randint(max(low, least), max(high, least))

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds; returns False if the command ended before that."""
        return self.command.process.wait_until(condition, DEADLINE_SECONDS)

    def reach_rows(self) -> bool:
        """Waits until rows are being written; returns False if the build ended before that."""
        return self.wait_for(self._rows_are_written)

    def _rows_are_written(self) -> bool:
        """Returns whether a shard is partly written."""
        return any(self.cache.glob(f"{files.PARTIAL}*.tfrecord-*"))

    def kill(self) -> bool:
        """Kills the command and its workers; returns False if it had ended by itself."""
        killed = self.command.kill()
        if killed:
            self.count_injection()
        elif self.command.process.exit_code:
            raise UserError(f"{self.command.name} failed: {self.command.tail()}")
        self._count_redone()
        return killed

    def count_injection(self) -> None:
        """Counts an injected fault."""
        self.outcome.injected += 1
        self.outcome.while_writing += self._rows_are_written()

    def finish(self) -> int:
        """Waits for the command to end by itself; returns its exit code."""
        code = self.command.wait()
        self._count_redone()
        return code

    def expect_failure(self) -> None:
        """Waits for the build to end; a reported success is a failure of the trial."""
        if not self.finish():
            raise UserError("the build reports success")

    def break_and_audit(
        self,
        reach: Callable[["Trial"], object],
        strike: Callable[["Trial"], bool],
        least: int = 1,
    ) -> None:
        """Starts builds, breaks each at the moment it has reached, rebuilds and audits the cache.

        Args:
          reach: waits for the moment.
          strike: breaks the build; returns False if the build has finished first, which ends the
            breaking.
          least: the fewest workers.
        """
        for _ in range(self.injections):
            self.start(least)
            reach(self)
            if not strike(self):
                break
        self.rebuild_and_audit()

    def rebuild_and_audit(self) -> None:
        """Runs the same command once more, which must succeed, and audits the cache."""
        self.start()
        if self.finish():
            raise UserError(f"the last build failed: {self.command.tail()}")
        self.audit()

    def audit(self) -> None:
        """Compares the cache with the reference; deletes it if they are equal."""
        from pipeline.verification.cache import verify

        outcome, wanted, found = (
            self.outcome,
            self.wanted or self.lab.wanted,
            Snapshot.of(self.cache),
        )
        outcome.caches += 1
        outcome.lost += (wanted.documents - found.documents).total()
        outcome.duplicated += (found.documents - wanted.documents).total()
        faults = verify(str(self.cache))[1]
        different = differing(found.checksums, wanted.checksums)
        if different or faults:
            what = ", ".join(different[:3]) or str(faults[0])
            raise UserError(f"{self.cache} differs in {what}")
        outcome.equal += 1
        shutil.rmtree(self.cache)

    def _count_redone(self) -> None:
        self.outcome.redone += sum(
            not path.exists() or _identity(path) != before
            for path, before in self._finished.items()
        )


def break_builds(flags: argparse.Namespace, _: list[str], folder: pathlib.Path) -> list[str]:
    """Breaks builds, and prints the outcomes as a Markdown table; returns what went wrong."""
    from tests.faults import build_faults, pools

    begin = time.monotonic()
    lab = Lab(flags, folder)
    if flags.pools:
        with pools.Cluster(flags.pools, folder) as cluster:
            lab.runner = cluster.flags
            outcomes = lab.run_trials(cluster.faults(flags.kills), parallel=1)
        workers = f"a worker in each of {flags.pools} pools"
    else:
        faults = build_faults.faults(flags.kills, flags.others, of_texts=not lab.sides)
        outcomes = lab.run_trials(faults, flags.jobs)
        workers = "{} to {} workers".format(*flags.workers)
    header = (
        *("fault", "times", "while rows were written", "caches equal", "documents lost"),
        *("documents duplicated", "finished shards redone"),
    )
    rows = [
        (
            *(each.fault + (f" ({each.note})" if each.note else ""), each.injected),
            *(each.while_writing, f"{each.equal} of {each.caches}", each.lost),
            *(each.duplicated, each.redone),
        )
        for each in outcomes
    ]
    print(table(header, rows, markdown=True))
    print(
        f"\n{sum(each.injected for each in outcomes)} faults in builds of "
        f"{lab.corpus_bytes / 1e6:.1f} MB into {sum(lab.plan.shards.values())} shards by {workers} "
        f"on {os.cpu_count()} cores, seed {flags.seed}, in "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    return [failure for outcome in outcomes for failure in outcome.failures]


def _identity(path: pathlib.Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def _documents(spec: str, limit: int) -> tuple[list[corpora.Row], int]:
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
