"""Breaks builds in every way we know, and audits what they become: `python -m pipeline.chaos`.

    python -m pipeline.chaos --vocabulary=DIR --kills=100 --workers=1-4 --seed=7
    python -m pipeline.chaos --vocabulary=DIR --kills=20 --pools=3     # see pipeline.faults.pools

One build runs undisturbed. Then builds are killed, starved, robbed of their corpus and damaged, and
run again by the same command until they are done; every file must have the same sha256 as in the
undisturbed cache. Everything happens on a copy of (the beginning of) the corpus in a folder of its
own. Prints a table in Markdown; exits with 1 when anything differs.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tasks.cache.manifest import MANIFEST, PLAN, CacheManifest
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, UserError, positive, run

_DEADLINE_SECONDS = 300
KILLS_A_HISTORY = 8
# Of the kills: hit one worker process alone, fall into the last steps, or into the imports.
_OF_WORKERS, _OF_LAST_STEPS, _OF_STARTS = 0.1, 0.1, 0.1
_PARTS = 4  # files that the copy of the corpus has


@dataclasses.dataclass
class Row:
    """A line of the table: a kind of fault, how often it struck, and what came of it."""

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

    def add(self, other: "Row") -> None:
        """Adds what happened in another history of the same kind."""
        for field in ("injected", "while_writing", "caches", "equal", "lost", "duplicated"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.redone += other.redone
        self.note = other.note or self.note
        self.failures += other.failures


class Laboratory:
    """A small corpus, an undisturbed build of it, and what to compare other builds with.

    Attributes:
      flags: the command's.
      folder: where everything happens.
      corpus: the folder with the corpus's files.
      size: their documents' bytes.
      reference: the undisturbed cache's folder.
      plan: its plan.
      seconds: from the start of the undisturbed build to its first row, and from there to its end.
      runner: flags that say where other builds work; empty: in processes of their own.
    """

    runner: tuple[str, ...] = ()

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags = flags
        self.folder = folder
        self.corpus = folder / "corpus"
        self.size = _copy_corpus(flags.corpus, flags.corpus_bytes, self.corpus)
        begin = time.monotonic()
        history = History(self, Row("none"), "reference")
        process = history.start(1)
        history.wait_for_rows(process)
        first_row = time.monotonic()
        if history.wait(process):
            raise UserError(f"the undisturbed build failed: {history.said()}")
        self.seconds = (first_row - begin, time.monotonic() - first_row)
        self.reference = history.cache
        self.plan = CacheManifest.load(str(self.reference)).plan
        self.expected = _checksums(self.reference)
        self.documents = _documents(self.reference)


class History:
    """One cache, the builds that it sees, and what is counted of them in `row`.

    `name` is that of its folder, and seeds what is random; `strikes`: how many faults are wanted.
    """

    def __init__(self, lab: Laboratory, row: Row, name: str, strikes: int = 1):
        self.lab = lab
        self.strikes = strikes
        self.row = row
        self.random = random.Random(f"{lab.flags.seed} {name}")
        self.folder = lab.folder / name
        self.cache = self.folder / lab.flags.task
        self.corpus = lab.corpus
        self._kept: dict[pathlib.Path, tuple[int, int]] = {}
        self._log = lab.folder / f"{name}.log"

    def copy(self) -> None:
        """Begins with a copy of the undisturbed cache."""
        shutil.copytree(self.lab.reference, self.cache)

    def workers(self, least: int = 1) -> int:
        """Draws a number of workers: half the builds have the fewest, since others start slowly."""
        low, high = self.lab.flags.workers
        if least == 1 and self.random.random() < 0.5:
            return low
        return self.random.randint(max(low, least), max(high, least))

    def start(self, workers: int, **options) -> subprocess.Popen:
        """Starts a build in a process group of its own; `options` go to subprocess.Popen."""
        flags = self.lab.flags
        command = [
            *(sys.executable, "-m", "pipeline.build", f"--cache_dir={self.folder}"),
            *(f"--task={flags.task}", f"--vocabulary={flags.vocabulary}"),
            *(f"--extra_ids={flags.extra_ids}", f"--shard_bytes={flags.shard_bytes}"),
            f"--corpus=json:{self.corpus}/*.jsonl?validation=0.1",
            *(self.lab.runner or (f"--workers={workers}",)),
        ]
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **options
            )

    def begin(self, workers: int, **options) -> subprocess.Popen:
        """Starts a build, noting which shards are finished and good."""
        from pipeline.building import folder

        found = folder.survey(str(self.cache), self.lab.plan)
        names = (name for shard in found.values() if shard for name in shard.files)
        rows = [self.cache / name for name in names if "tfrecord" in name]
        self._kept = {path: _identity(path) for path in rows}
        return self.start(workers, **options)

    def rows_are_written(self) -> bool:
        """Whether a shard is half written."""
        return any(self.cache.glob(files.PARTIAL + "*.tfrecord-*"))

    def wait_for_rows(self, process: subprocess.Popen) -> bool:
        """Waits until rows are being written; False when the build ended before."""
        return self.wait_for(process, self.rows_are_written)

    def wait_for(self, process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds; False when the build ended before."""
        end = time.monotonic() + _DEADLINE_SECONDS
        while not condition():
            if process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.0005)
        return True

    def kill(self, process: subprocess.Popen) -> bool:
        """Kills the build and its workers; False when it had ended by itself."""
        ended = process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.wait(process)
        if not ended:
            self.struck()
        self._count_redone()
        return not ended

    def struck(self) -> None:
        """Counts a fault."""
        self.row.injected += 1
        self.row.while_writing += self.rows_are_written()

    def end(self, process: subprocess.Popen) -> int:
        """Waits for the build to end by itself; returns its exit code."""
        code = self.wait(process)
        self._count_redone()
        return code

    def fail(self, process: subprocess.Popen) -> None:
        """Waits for the build, which must not say that it succeeded."""
        if not self.end(process):
            self.row.failures.append(f"{self.row.fault}: the build says that it succeeded")

    def finish(self) -> None:
        """Runs the same command once more, which must end well, and audits the cache."""
        if self.end(self.begin(self.workers())):
            self.row.failures.append(f"{self.row.fault}: the last build failed: {self.said()}")
        self.audit()

    def audit(self) -> None:
        """Compares the cache with the undisturbed one; deletes it when they are equal."""
        from pipeline.verify import verify

        row, expected = self.row, self.lab.expected
        row.caches += 1
        there = _checksums(self.cache)
        names = sorted(there.keys() | expected.keys())
        differing = [name for name in names if there.get(name) != expected.get(name)]
        documents = _documents(self.cache)
        row.lost += (self.lab.documents - documents).total()
        row.duplicated += (documents - self.lab.documents).total()
        faults = verify(str(self.cache))[1]
        if differing or faults:
            what = ", ".join(differing[:3]) or str(faults[0])
            row.failures.append(f"{row.fault}: {self.cache} differs in {what}")
            return
        row.equal += 1
        shutil.rmtree(self.cache)

    def wait(self, process: subprocess.Popen) -> int:
        """Returns the exit code; a build that hangs is killed, which is a failure."""
        try:
            return process.wait(_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.row.failures.append(f"a build hung for {_DEADLINE_SECONDS} s and was killed")
            return process.wait()

    def said(self) -> str:
        """What the build that was started last printed, the end of it, in one line."""
        return " ".join(self._log.read_text(errors="replace").split())[-500:]

    def _count_redone(self) -> None:
        self.row.redone += sum(
            not path.exists() or _identity(path) != before for path, before in self._kept.items()
        )


def _identity(path: pathlib.Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def _copy_corpus(spec: str, limit: int, folder: pathlib.Path) -> int:
    """Writes documents, up to `limit` bytes of them, as files of JSON lines; returns the bytes."""
    from tasks.reading import sources

    folder.mkdir()
    corpus = sources.resolve(sources.parse(spec))
    with contextlib.ExitStack() as stack:
        parts = [
            stack.enter_context(open(folder / f"part-{number}.jsonl", "wb"))
            for number in range(_PARTS)
        ]
        batches = (batch for piece in corpus.pieces for _, batch in sources.read(corpus, piece))
        for number, (name, text) in enumerate(
            document
            for batch in batches
            for document in zip(*(batch.column(c).to_pylist() for c in ("id", "text")), strict=True)
        ):
            parts[number % _PARTS].write(json.dumps({"id": name, "text": text}).encode() + b"\n")
            size = sum(part.tell() for part in parts)
            if size >= limit:
                break
    return size


def _checksums(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: files.sha256(str(path)) for path in folder.iterdir()}


def _documents(folder: pathlib.Path) -> Counter[tuple]:
    """Returns how often each piece of a document is in the cache, by split, id and offset."""
    from pyarrow import parquet

    counts: Counter[tuple] = Counter()
    for path in folder.glob("*.documents-*"):
        table = parquet.read_table(path, columns=["id", "document_offset", "tokens"])
        columns = (column.to_pylist() for column in table.columns)
        counts.update((path.name.split(".")[0], *entry) for entry in zip(*columns, strict=True))
    return counts


def killed(history: History) -> None:
    """SIGKILLs a build and its workers, most often while it writes rows."""
    to_first_row, writing = history.lab.seconds
    for _ in range(history.strikes):
        process = history.begin(history.workers())
        if history.random.random() < _OF_STARTS:
            time.sleep(history.random.uniform(0, to_first_row))
        else:
            history.wait_for_rows(process)
            time.sleep(history.random.uniform(0, writing / 2))
        if not history.kill(process):
            break  # it was faster
    history.finish()


def worker_killed(history: History) -> None:
    """SIGKILLs one of several worker processes; the build must end by itself."""
    process = history.begin(history.workers(least=2))
    history.wait_for_rows(process)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "-g", str(process.pid)], capture_output=True, text=True
    ).stdout.splitlines()
    workers = [line for line in listed if "sdk_worker_main" in line and "sh -c" not in line]
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(history.random.choice(workers).split()[0]), signal.SIGKILL)
            history.struck()
    history.end(process)
    history.finish()


def killed_in_last_steps(history: History) -> None:
    """SIGKILLs a build between two of the files that make shards a cache."""
    history.copy()
    cache = history.cache
    names = sorted(path.name for path in [*cache.glob("info.*"), *cache.glob("stats.*")])
    names.append(MANIFEST)
    for name in [*names, "COMPLETED"]:
        (cache / name).unlink()
    awaited = cache / history.random.choice(names)
    process = history.begin(1)
    history.wait_for(process, awaited.exists)
    history.kill(process)
    history.finish()


def disk_full(history: History) -> None:
    """Builds where there is room for a part of the cache, then makes room."""
    size = sum(path.stat().st_size for path in history.lab.reference.iterdir())
    room = int(size * history.random.uniform(0.2, 0.8))
    with _mounted(history.folder, f"size={room}") as remount:
        if remount:
            history.row.note = "a tmpfs too small"
            process = history.begin(history.workers())
        else:
            history.row.note = "RLIMIT_FSIZE, no right to mount"
            rows = history.lab.reference.glob("*.tfrecord-*")
            largest = max(path.stat().st_size for path in rows)
            limit = (largest // 2, largest // 2)
            process = history.begin(
                history.workers(),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
            )
        history.wait_for_rows(process)
        history.struck()
        history.fail(process)
        if remount:
            remount(f"size={4 * size}")
        history.finish()


def read_only(history: History) -> None:
    """Makes the folder of a finished build read-only before a shard is redone."""
    size = sum(path.stat().st_size for path in history.lab.reference.iterdir())
    with _mounted(history.folder, f"size={4 * size}") as remount:
        history.copy()
        history.random.choice(sorted(history.cache.glob("*.tfrecord-*"))).unlink()
        if remount:
            history.row.note = "a tmpfs mounted read-only"
            remount("ro")
        else:
            history.row.note = "a folder without the right to write"
            history.cache.chmod(0o500)
        history.struck()
        history.fail(history.begin(history.workers()))
        if remount:
            remount("rw")
        else:
            history.cache.chmod(0o700)
        history.finish()


def truncated(history: History) -> None:
    """Cuts a file of a cache short."""
    path = _any_file(history)
    os.truncate(path, history.random.randrange(path.stat().st_size))
    history.struck()
    history.finish()


def bit_flipped(history: History) -> None:
    """Flips a bit of a file of a cache."""
    path = _any_file(history)
    data = bytearray(path.read_bytes())
    data[history.random.randrange(len(data))] ^= 1 << history.random.randrange(8)
    path.write_bytes(data)
    history.struck()
    history.finish()


def _any_file(history: History) -> pathlib.Path:
    """Returns a file of a finished cache, or of one that has all but its last files.

    An unfinished cache's plan.json is left alone: nothing else could say what is being built.
    """
    history.copy()
    finished = history.random.random() < 0.5
    if not finished:
        (history.cache / "COMPLETED").unlink()
        (history.cache / MANIFEST).unlink()
    paths = sorted(path for path in history.cache.iterdir() if path.stat().st_size)
    return history.random.choice([path for path in paths if finished or path.name != PLAN])


def source_missing(history: History) -> None:
    """Takes a file of the corpus away while it is read, and puts it back."""
    _without_source(history, lambda path: path.rename(path.with_suffix(".away")))


def source_truncated(history: History) -> None:
    """Cuts a file of the corpus short while it is read, and puts it back."""
    _without_source(history, lambda path: os.truncate(path, path.stat().st_size // 50))


def _without_source(history: History, damage: Callable[[pathlib.Path], object]) -> None:
    history.corpus = history.folder / "corpus"
    shutil.copytree(history.lab.corpus, history.corpus)
    path = history.corpus / f"part-{history.random.randrange(_PARTS)}.jsonl"
    process = history.begin(history.workers())
    # Before there is a plan, it would be another corpus, and a cache of that.
    history.wait_for(process, (history.cache / PLAN).exists)
    if history.random.random() < 0.8:
        history.wait_for_rows(process)
    damage(path)
    history.struck()
    history.end(process)
    shutil.copy(history.lab.corpus / path.name, path)
    history.finish()


def raced(history: History) -> None:
    """Starts a second build in the folder of a running one."""
    first = history.begin(history.workers())
    history.wait_for_rows(first)
    second = history.start(1)
    history.struck()
    codes = (history.end(first), history.end(second))
    if codes[0]:
        history.row.failures.append(f"the first of two builds ended with code {codes[0]}")
    history.audit()


@contextlib.contextmanager
def _mounted(folder: pathlib.Path, options: str) -> Iterator[Callable[[str], object] | None]:
    """Yields what remounts the small file system at `folder`; None without the right to mount."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        yield None
        return
    try:
        yield lambda again: subprocess.run(
            ["mount", "-o", f"remount,{again}", str(folder)], check=True
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


_OTHERS: dict[str, Callable[[History], None]] = {
    "disk full": disk_full,
    "folder read-only": read_only,
    "finished file cut short": truncated,
    "finished file with a flipped bit": bit_flipped,
    "file of the corpus missing": source_missing,
    "file of the corpus cut short": source_truncated,
    "second build in the same folder": raced,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault: how often it is to strike in all and, at most, in one history."""

    name: str
    times: int
    live: Callable[[History], None]
    a_history: int = 1


def local_faults(kills: int, others: int) -> list[Fault]:
    """Returns the faults of builds in processes of their own."""
    of_workers = max(1, round(kills * _OF_WORKERS))
    of_last_steps = max(1, round(kills * _OF_LAST_STEPS))
    return [
        Fault("SIGKILL of the build", kills - of_workers - of_last_steps, killed, KILLS_A_HISTORY),
        Fault("SIGKILL of one worker", of_workers, worker_killed),
        Fault("SIGKILL between the last files", of_last_steps, killed_in_last_steps),
        *(Fault(name, others, live) for name, live in _OTHERS.items()),
    ]


def experiment(lab: Laboratory, wanted: list[Fault], jobs: int) -> list[Row]:
    """Runs histories, `jobs` at a time, until each fault struck often enough.

    Returns:
      The table's lines.
    """
    rows = [Row(fault.name) for fault in wanted]
    total = sum(fault.times for fault in wanted)
    numbers = itertools.count()

    def live(fault: Fault, strikes: int) -> Row:
        history = History(lab, Row(fault.name), f"history-{next(numbers)}", strikes)
        fault.live(history)
        return history.row

    def start_more() -> None:
        for row, fault in zip(rows, wanted, strict=True):
            under_way = sum(strikes for other, strikes in running.values() if other is row)
            # One that failed shows enough; and faults that never strike must not go on for ever.
            while (
                len(running) < jobs and not row.failures and row.injected + under_way < fault.times
            ):
                strikes = min(fault.times - row.injected - under_way, fault.a_history)
                running[pool.submit(live, fault, strikes)] = (row, strikes)
                under_way += strikes

    running: dict[Future[Row], tuple[Row, int]] = {}
    with ThreadPoolExecutor(jobs) as pool, progress.shown("chaos", total) as bar:
        start_more()
        while running:
            done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                running.pop(future)[0].add(future.result())
            failures = sum(len(row.failures) for row in rows)
            bar.update(sum(row.injected for row in rows), f"{failures} failures")
            start_more()
    return rows


_COLUMNS = {
    "fault": "fault",
    "times": "injected",
    "while rows were written": "while_writing",
    "caches equal": "",
    "documents lost": "lost",
    "twice": "duplicated",
    "finished shards redone": "redone",
}


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    for row in rows:
        cells = [
            f"{row.equal} of {row.caches}" if not field else str(getattr(row, field))
            for field in _COLUMNS.values()
        ]
        cells[0] += f" ({row.note})" if row.note else ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    value = (positive(low), positive(high or low))
    if value[0] > value[1]:
        raise argparse.ArgumentTypeError(f"{text} is not a range such as 1-4")
    return value


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(prog="python -m pipeline.chaos", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--vocabulary", required=True, help="a folder of vocab.train, or a .model file")
    add("--extra_ids", type=int, default=0, help="sentinels to add to a vocabulary without any")
    add("--task", default="python_docs_span_corruption", help="a registered task")
    add("--corpus", default="python_docs", help="what to copy the documents from")
    add("--corpus_bytes", type=positive, default=4 << 20, help="bytes of the copy, at most")
    add("--shard_bytes", type=positive, default=128 << 10, help="bytes of corpus in a shard, about")
    add("--kills", type=int, default=100, help="SIGKILLs")
    add("--others", type=int, default=5, help="times that each other fault strikes")
    add("--workers", type=_range, default=(1, 4), help="processes of a build, a number or a range")
    add(
        "--pools",
        type=int,
        default=0,
        help="build by Beam's portable runner, with so many pools of workers, and kill those alone",
    )
    add("--jobs", type=positive, default=os.cpu_count(), help="builds at a time")
    add("--seed", type=int, default=0, help="of what is random here; moments of kills still vary")
    add("--output", help="a new folder for the builds, kept (a temporary one if not set)")
    return parser


def main(argv: list[str]) -> int:
    """The command; returns 1 when a cache differs or a build did what it must not."""
    flags = command_line().parse_args(argv)
    begin = time.monotonic()
    # So that pools and folders go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        folder = flags.output or stack.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder).absolute()
        if path.exists() and any(path.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder for --output")
        path.mkdir(parents=True, exist_ok=True)
        lab = Laboratory(flags, path)
        if flags.pools:
            from pipeline.faults import pools

            cluster = stack.enter_context(pools.Cluster(flags.pools, path))
            lab.runner = cluster.flags
            rows = experiment(lab, cluster.faults(flags.kills), jobs=1)
            workers = f"a worker in each of {flags.pools} pools"
        else:
            rows = experiment(lab, local_faults(flags.kills, flags.others), flags.jobs)
            workers = "{} to {} workers".format(*flags.workers)
    print(table(rows))
    faults, shards = sum(row.injected for row in rows), sum(lab.plan.shards.values())
    print(
        f"\n{faults} faults in builds of {lab.size / 1e6:.1f} MB into {shards} shards by {workers} "
        f"on {os.cpu_count()} cores, seed {flags.seed}, in "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    failures = [failure for row in rows for failure in row.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
