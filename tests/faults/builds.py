"""Faults of builds: a small corpus, trials that break builds of it, and what trials must end in.

The corpus is built once without faults. Each trial then injects one kind of fault into builds of
its own cache, repeats the build until it succeeds, and compares every file with the first build's.
`tests.faults.build_faults` has the kinds of faults.
"""

import argparse
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tasks.cache.manifest import CacheManifest
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table
from tasks.unit import Unit
from tests.faults.command import Command
from tests.faults.commands import Build
from tests.faults.comparing import checksums, differing, documents_of
from tests.support import corpora

CORPUS_FILES = 4  # files of the copied corpus
KILLS_PER_TRIAL = 8


class Fault(NamedTuple):
    """A kind of fault; `inject` runs a trial that injects it `trial.injections` times at most."""

    name: str
    injections: int
    inject: Callable[["Trial"], None]
    per_trial: int = 1


class Outcome:
    """A line of the table: counts, a note on how the fault was injected, and what went wrong."""

    def __init__(self):
        self.counts, self.note, self.failures = Counter(), "", []

    def add(self, other: "Outcome") -> None:
        self.counts += other.counts
        self.note = other.note or self.note
        self.failures += other.failures


class Snapshot(NamedTuple):
    """What a finished cache holds: checksums of its files, and its documents."""

    checksums: dict[str, str]
    documents: Counter[tuple]

    @classmethod
    def of(cls, cache: pathlib.Path) -> "Snapshot":
        return cls(checksums(cache), documents_of(cache))


class Lab:
    """A small corpus, a build of it without faults, and what other builds are compared with."""

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags, self.folder, self.corpus = flags, folder, folder / "corpus"
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
        trial, begin = Trial(self, "reference"), time.monotonic()
        trial.launch(1)
        trial.reach_rows()
        first_row = time.monotonic()
        trial.command.finish()
        self.seconds = (first_row - begin, time.monotonic() - first_row)
        self.reference = trial.cache
        self.plan = CacheManifest.load(str(self.reference)).plan
        self.wanted = Snapshot.of(self.reference)

    def write_corpus(self, folder: pathlib.Path, count: int) -> None:
        folder.mkdir(parents=True)
        for number in range(count):
            name = corpora.file_name(self.flags.format, number)
            data = corpora.encoded(self.flags.format, self.rows[number::count])
            (folder / name).write_bytes(data)

    def made(self, name: str, make: Callable[["Trial"], Any]) -> Any:
        """Returns what `make` returns, called once, with a trial of that name."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make(Trial(self, name))
            return self._made[name]

    def check_accounts(self, cache: pathlib.Path) -> None:
        """Checks that every document of the corpus is in the cache or left out, exactly once.

        All other caches have the same bytes.
        """
        spec = corpora.spec(self.flags.format, str(self.corpus)) + self.sides
        read = Counter(row["id"] for row in _rows(spec.rstrip("?&"), ["id"]))
        kept = Counter(name for _, name, offset, *_ in documents_of(cache).elements() if not offset)
        for path in cache.glob("*.quarantine-*"):
            kept.update(json.loads(line)["id"] for line in files.read_lines(str(path)))
        if kept != read:
            lost, twice = (read - kept).total(), (kept - read).total()
            raise UserError(f"{cache}: {lost:,} documents are nowhere, and {twice:,} twice")

    def run_trials(self, faults: list[Fault], parallel: int) -> dict[str, Outcome]:
        """Runs trials, `parallel` at a time, until every fault was injected often enough."""
        outcomes = {fault.name: Outcome() for fault in faults}
        numbers = itertools.count()

        def missing() -> list[tuple[Fault, Trial]]:
            trials = []
            for fault in faults:
                outcome = outcomes[fault.name]
                left = 0 if outcome.failures else fault.injections - outcome.counts["times"]
                for first in range(0, left, fault.per_trial):
                    injections = min(left - first, fault.per_trial)
                    trials.append((fault, Trial(self, f"trial-{next(numbers)}", injections)))
            return trials

        total = sum(fault.injections for fault in faults)
        with ThreadPoolExecutor(parallel) as pool, progress.shown("chaos", total) as bar:
            while trials := missing():
                ran = pool.map(lambda each: each[1].run(each[0]), trials)
                for (fault, _), outcome in zip(trials, ran, strict=True):
                    outcomes[fault.name].add(outcome)
                    failures = sum(len(each.failures) for each in outcomes.values())
                    injected = sum(each.counts["times"] for each in outcomes.values())
                    bar.update(injected, f"{failures} failures")
        return outcomes


class Trial:
    """One cache, the builds that write it, and the outcome."""

    def __init__(self, lab: Lab, name: str, injections: int = 1):
        self.lab, self.injections, self.outcome = lab, injections, Outcome()
        self.random = random.Random(f"{lab.flags.seed} {name}")
        self.folder, self.corpus = lab.folder / name, lab.corpus
        self.cache, self.log = self.folder / lab.name, lab.folder / f"{name}.log"
        self.wanted: Snapshot | None = None
        self.flags: list[str] = []
        self.command: Command = self._build()
        self._finished: dict[pathlib.Path, tuple[int, int]] = {}

    def run(self, fault: Fault) -> Outcome:
        try:
            fault.inject(self)
        except UserError as error:
            self.outcome.failures.append(f"{fault.name}: {error}")
            self.command.kill()
        return self.outcome

    def copy_reference(self, *without: str) -> None:
        """Starts the trial from a copy of the cache built without faults, `without` some files."""
        shutil.copytree(self.lab.reference, self.cache)
        for name in without:
            (self.cache / name).unlink()

    def _build(self) -> Build:
        spec = corpora.spec(self.lab.flags.format, str(self.corpus)) + self.lab.sides
        given = [*self.lab.build_flags, f"--corpus={spec}validation=0.1", *self.flags]
        return Build(self.cache, self.log, *given)

    def launch(self, workers: int, command: Command | None = None, **options) -> Command:
        """Starts a build, or another command; `options` are passed to subprocess.Popen."""
        self.command = command or self._build()
        return self.command.start(f"--workers={workers}", **options)

    def start(self, least: int = 1, **options) -> Command:
        """Notes which shards are finished and valid, then starts a build; see `launch`."""
        from pipeline.building import lifecycle

        found = lifecycle.survey(str(self.cache), self.lab.plan)
        names = (name for shard in found.values() if shard for name in shard.files)
        paths = [self.cache / name for name in names if "tfrecord" in name]
        self._finished = {path: _identity(path) for path in paths}
        return self.launch(self.draw_workers(least), **options)

    def draw_workers(self, least: int = 1) -> int:
        low, high = self.lab.flags.workers
        if least == 1 and self.random.random() < 0.5:
            return low
        return self.random.randint(max(low, least), max(high, least))

    def reach_rows(self) -> bool:
        """Waits until rows are being written; returns False if the build ended before that."""
        return self.command.wait_until(self._rows_are_written)

    def _rows_are_written(self) -> bool:
        return any(self.cache.glob(files.PARTIAL + "*.tfrecord-*"))

    def kill(self) -> bool:
        killed = self.command.kill()
        if killed:
            self.count_injection()
        elif self.command.exit_code:
            raise UserError(f"{self.command.name} failed: {self.command.tail()}")
        self._count_redone()
        return killed

    def count_injection(self) -> None:
        written = self._rows_are_written()
        self.outcome.counts += Counter({"times": 1, "while rows were written": written})

    def finish(self) -> int:
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
        """Breaks builds, each at the moment that it has reached; rebuilds and audits the cache."""
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

        wanted, found = self.wanted or self.lab.wanted, Snapshot.of(self.cache)
        lost, more = wanted.documents - found.documents, found.documents - wanted.documents
        counts = {"documents lost": lost.total(), "documents duplicated": more.total()}
        self.outcome.counts += Counter(counts | {"caches": 1})
        faults = verify(str(self.cache))[1]
        different = differing(found.checksums, wanted.checksums)
        if different or faults:
            what = ", ".join(different[:3]) or str(faults[0])
            raise UserError(f"{self.cache} differs in {what}")
        self.outcome.counts["equal"] += 1
        shutil.rmtree(self.cache)

    def _count_redone(self) -> None:
        self.outcome.counts["finished shards redone"] += sum(
            not path.exists() or _identity(path) != before
            for path, before in self._finished.items()
        )


def break_builds(flags: argparse.Namespace, _: list[str], folder: pathlib.Path) -> list[str]:
    from tests.faults import build_faults

    begin = time.monotonic()
    lab = Lab(flags, folder)
    faults = build_faults.faults(flags.kills, flags.others, of_texts=not lab.sides)
    outcomes = lab.run_trials(faults, flags.jobs)
    workers = "{} to {} workers".format(*flags.workers)
    last = ("documents lost", "documents duplicated", "finished shards redone")
    header = ("fault", "times", "while rows were written", "caches equal", *last)
    rows = []
    for name, each in outcomes.items():
        shown = {**each.counts, "fault": name + (f" ({each.note})" if each.note else "")}
        shown["caches equal"] = f"{each.counts['equal']} of {each.counts['caches']}"
        rows.append([shown.get(column, 0) for column in header])
    print(table(header, rows, markdown=True))
    print(
        f"\n{sum(each.counts['times'] for each in outcomes.values())} faults in builds of "
        f"{lab.corpus_bytes / 1e6:.1f} MB into {sum(lab.plan.shards.values())} shards by {workers} "
        f"on {os.cpu_count()} cores, seed {flags.seed}, in "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    return [failure for outcome in outcomes.values() for failure in outcome.failures]


def _identity(path: pathlib.Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def _rows(spec: str, columns: list[str]):
    """Yields the documents of a corpus that can be used."""
    corpus = sources.resolve(sources.parse(spec))
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            usable = batch.filter(batch.column("problem").is_null())
            yield from usable.select(columns).to_pylist()


def _documents(spec: str, limit: int) -> tuple[list[corpora.Row], int]:
    """Returns documents of a corpus, up to `limit` bytes of them as JSON lines, and their bytes."""
    rows: list[corpora.Row] = []
    size = 0
    for row in _rows(spec, ["id", *sources.parse(spec).unit.columns]):
        rows.append(row)
        size += len(json.dumps(row)) + 1
        if size >= limit:
            break
    return rows, size
