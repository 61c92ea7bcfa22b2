"""Compares the cost of pipeline.build with SentencePiece alone, stock seqio and an earlier commit.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.build --text=text.parquet --vocabulary=DIR [--copies=4] [--against=COMMIT]

Every row of the table is a separate command, measured whole; 1 MB is 10^6 bytes of text. "core" is
processor seconds of all the command's processes. "start" is the cost of the same command on 20
documents. "peak" is the memory of the largest process. Ratios are to SentencePiece alone: one
thread that makes lists of ids. Commands run by turns, --repeats times each; costs are medians. An
earlier commit runs from a worktree of its own, with the packages that are installed here.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.machine import machine
from tasks import vocabulary
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.table import table

TASK = "rlm_span_corruption"
ROOT = pathlib.Path(__file__).parents[1]
BUILD, TWO = "build", "build --workers=2"  # rows of the table


@dataclasses.dataclass
class Cost:
    """The cost of a command."""

    wall: float  # seconds of wall time
    core: float  # processor seconds of all its processes
    peak: int  # bytes of memory of its largest process

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.wall - other.wall, self.core - other.core, self.peak)


# A child's largest memory begins at its parent's: a small process between starts the command.
_MEASURE = """import json, resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
json.dump([usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10], open(sys.argv[1], "w"))
sys.exit(code)"""


def cost_of(command: list[str], folder: str | None = None, **environment: str) -> Cost:
    """Runs a command, in a folder; returns its cost, including processes that it has awaited."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as usage:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, usage.name, *command],
            env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
        return Cost(time.monotonic() - started, *json.load(usage))


def bare(path: str, model: str) -> None:
    """Prints the speed of SentencePiece alone, in MB per processor second; run in a new process."""
    processor = vocabulary.load(model).processor
    seconds = size = 0.0
    for batch in pq.ParquetFile(path).iter_batches(256, columns=["text"]):
        texts = batch.column(0).to_pylist()
        size += sum(len(text.encode()) for text in texts)
        begin = time.process_time()
        processor.encode(texts, num_threads=1)
        seconds += time.process_time() - begin
    print(size / 1e6 / seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    text: str = field(REQUIRED, "Parquet file with a column text, from benchmarks.text")
    vocabulary: str = field(REQUIRED, "SentencePiece model or its folder")
    extra_ids: int = field(0, "sentinels to add to the vocabulary; see pipeline.build")
    copies: int = field(1, "copies of the text to build, for a longer run", rule=at_least(1))
    shard_bytes: int = field(16_000_000, "approximate bytes of text per shard")
    seqio_documents: int = field(500, "number of documents for stock seqio; 0: skip it")
    against: str | None = field(None, "earlier commit, whose build is measured too")
    repeats: int = field(1, "number of times to run each command", rule=at_least(1))


def run(flags: Flags) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        if not flags.against:
            return measure(flags, path, None)
        with _worktree(flags.against, path / "commit") as tree:
            return measure(flags, path, tree)


@contextlib.contextmanager
def _worktree(commit: str, place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Checks out a commit aside, with its C code compiled."""
    git = ["git", "-C", str(ROOT), "worktree"]
    if subprocess.run([*git, "add", "--detach", place, commit], capture_output=True).returncode:
        raise UserError(f"--against={commit} is not a commit of this repository: see git log")
    try:
        if (place / "pipeline" / "native" / "build.py").exists():
            compiled = "from pipeline.native import build; build.compile_all()"
            subprocess.run([sys.executable, "-c", compiled], cwd=place, check=True)
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", place], check=True)


class Builds:
    """Runs the commands in `folder`, whose subfolders whole, little and some hold text."""

    def __init__(self, flags: Flags, folder: pathlib.Path):
        self._flags, self._folder = flags, folder
        text = pq.read_table(flags.text)
        for part in ("whole", "little", "some"):
            (folder / part).mkdir()
        for copy in range(flags.copies):
            shutil.copy(flags.text, folder / "whole" / f"{copy}.parquet")
        pq.write_table(text.slice(0, 20), folder / "little" / "0.parquet")
        pq.write_table(text.slice(0, flags.seqio_documents), folder / "some" / "0.parquet")
        self.documents = text.num_rows * flags.copies

    def megabytes(self, part: str) -> float:
        columns = [pq.read_table(path)["text"] for path in (self._folder / part).iterdir()]
        return sum(pc.sum(pc.binary_length(column)).as_py() for column in columns) / 1e6

    def build(self, *more: str, tree: pathlib.Path = ROOT) -> Callable[[str], Cost]:
        """Returns a function that builds a part with the code in `tree`."""
        flags, cache = self._flags, self._folder / "cache"

        def command(part: str) -> Cost:
            shutil.rmtree(cache, ignore_errors=True)
            vocabulary = os.path.abspath(flags.vocabulary)
            return cost_of(
                [sys.executable, "-m", "pipeline.build", f"--task={TASK}", f"--cache_dir={cache}",
                 f"--corpus=parquet:{self._folder}/{part}/*.parquet", f"--vocabulary={vocabulary}",
                 f"--extra_ids={flags.extra_ids}", f"--shard_bytes={flags.shard_bytes}", *more],
                str(tree), PYTHONPATH=str(tree),
            )  # fmt: skip

        return command

    def seqio(self, part: str) -> Cost:
        flags, cache = self._flags, self._folder / "seqio"
        shutil.rmtree(cache, ignore_errors=True)
        return cost_of(
            [sys.executable, "-m", "seqio.scripts.cache_tasks_main", f"--tasks={TASK}",
             f"--output_cache_dir={cache}", "--module_import=benchmarks.seqio_module",
             "--pipeline_options=--runner=FnApiRunner"],
            VOCABULARY=flags.vocabulary, EXTRA_IDS=str(flags.extra_ids),
            CORPUS=f"parquet:{self._folder}/{part}/*.parquet",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measured:
    """A command's costs: of 20 documents, and of `part`, which has some megabytes."""

    megabytes: float
    start: Cost
    whole: Cost

    def row(self, name: str, reference: float) -> list[str]:
        speed = self.megabytes / self.whole.core
        seconds = (self.whole.wall, self.whole.core, self.start.wall, self.start.core)
        return [
            *(name, f"{speed:.1f}", f"{speed / reference:.2f}"),
            *(f"{second:.2f}" for second in seconds),
            f"{self.whole.peak / 1e6:.0f}",
        ]


def _median(costs: list[Cost]) -> Cost:
    wall, core, peak = zip(*map(dataclasses.astuple, costs), strict=True)
    return Cost(statistics.median(wall), statistics.median(core), max(peak))


def measured(
    commands: Mapping[str, tuple[Callable[[str], Cost], str]], builds: Builds, repeats: int
) -> dict[str, Measured]:
    """Returns the costs of commands, each with the part of the text that it reads."""
    costs: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in commands}
    with progress.shown("measuring", len(commands) * repeats) as bar:
        for turn in range(repeats):
            for number, (name, (command, part)) in enumerate(commands.items(), 1):
                costs[name].append((command("little"), command(part)))
                bar.update(turn * len(commands) + number, name)
    return {
        name: Measured(
            builds.megabytes(part), *(_median([*each]) for each in zip(*costs[name], strict=True))
        )
        for name, (_, part) in commands.items()
    }


def measure(flags: Flags, folder: pathlib.Path, tree: pathlib.Path | None) -> None:
    """Runs all commands and prints the table."""
    builds = Builds(flags, folder)
    of_commit = f"build of {flags.against}"
    commands = {
        "build --tokenizer=sentencepiece": builds.build("--tokenizer=sentencepiece"),
        BUILD: builds.build(),
        TWO: builds.build("--workers=2"),
    }
    if tree:
        commands[of_commit] = builds.build(tree=tree)
    for command in commands.values():
        command("little")  # makes tables and compiles what later builds load from disk
    parts = {name: (command, "whole") for name, command in commands.items()}
    if flags.seqio_documents:
        parts["seqio_cache_tasks"] = builds.seqio, "some"
    program = f"from benchmarks import build; build.bare({flags.text!r}, {flags.vocabulary!r})"
    alone = [sys.executable, "-c", program]
    reference = float(subprocess.run(alone, capture_output=True, text=True, check=True).stdout)
    print(machine())
    print(f"{builds.megabytes('whole'):.1f} MB of text, {builds.documents:,} documents")
    found = measured(parts, builds, flags.repeats)
    rows = [["SentencePiece alone", f"{reference:.1f}", "1.00", "", "", "", "", ""]]
    rows += [each.row(name, reference) for name, each in found.items()]
    header = (
        *("command", "MB/s per core", "ratio", "wall (s)", "core (s)"),
        *("start, wall (s)", "start, core (s)", "peak (MB)"),
    )
    print(table(header, rows, markdown=True))
    one, two = found[BUILD], found[TWO]
    faster = (one.whole - one.start).wall / (two.whole - two.start).wall
    print(
        f"two workers: {faster:.2f} times as fast as one after the start, "
        f"{one.whole.wall / two.whole.wall:.2f} times with it, and "
        f"{two.whole.core / one.whole.core - 1:+.1%} processor seconds"
    )
    if tree:
        print(f"{found[of_commit].whole.core / one.whole.core:.2f} times as fast as {of_commit}")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
