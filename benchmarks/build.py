"""Compares the cost of pipeline.build with SentencePiece alone and with stock seqio.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.build --text=text.parquet --vocabulary=DIR [--copies=4]

Every row of the table is a separate command. 1 MB is 10^6 bytes of text. "MB/s per core" is text
per processor second of all the command's processes, "MB/s, wall" text per second of wall time; the
time of the same command on 20 documents, "start-up", is subtracted from both. "peak" is the memory
of the largest process. Ratios are to SentencePiece alone: one thread that makes lists of ids.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.machine import machine
from tasks import vocabulary
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.fields import REQUIRED, at_least, field
from tasks.terminal.table import table

TASK = "rlm_span_corruption"


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


def cost_of(command: list[str], **environment: str) -> Cost:
    """Runs a command; returns its cost, including processes that it has started and awaited."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as usage:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, usage.name, *command],
            env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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


def run(flags: Flags) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        measure(flags, pathlib.Path(folder))


def measure(flags: Flags, folder: pathlib.Path) -> None:
    """Runs all commands and prints the table."""
    python = sys.executable
    text = pq.read_table(flags.text)
    for part in ("whole", "little", "some"):
        (folder / part).mkdir()
    for copy in range(flags.copies):
        shutil.copy(flags.text, folder / "whole" / f"{copy}.parquet")
    pq.write_table(text.slice(0, 20), folder / "little" / "0.parquet")
    pq.write_table(text.slice(0, flags.seqio_documents), folder / "some" / "0.parquet")

    def megabytes(part: str) -> float:
        columns = [pq.read_table(path)["text"] for path in (folder / part).iterdir()]
        return sum(pc.sum(pc.binary_length(column)).as_py() for column in columns) / 1e6

    def build(part: str, *more: str) -> Cost:
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        return cost_of(
            [python, "-m", "pipeline.build", f"--task={TASK}", f"--cache_dir={cache}",
             f"--corpus=parquet:{folder}/{part}/*.parquet", f"--vocabulary={flags.vocabulary}",
             f"--extra_ids={flags.extra_ids}", f"--shard_bytes={flags.shard_bytes}", *more]
        )  # fmt: skip

    def seqio(part: str) -> Cost:
        cache = folder / "seqio"
        shutil.rmtree(cache, ignore_errors=True)
        return cost_of(
            [python, "-m", "seqio.scripts.cache_tasks_main", f"--tasks={TASK}",
             f"--output_cache_dir={cache}", "--module_import=benchmarks.seqio_module",
             "--pipeline_options=--runner=FnApiRunner"],
            VOCABULARY=flags.vocabulary, EXTRA_IDS=flags.extra_ids,
            CORPUS=f"parquet:{folder}/{part}/*.parquet",
        )  # fmt: skip

    build("little")  # compiles the tokenizer, which later builds load from disk
    commands = {
        "build --tokenizer=sentencepiece": lambda part: build(part, "--tokenizer=sentencepiece"),
        "build": build,
        "build --workers=2": lambda part: build(part, "--workers=2"),
    }
    program = f"from benchmarks import build; build.bare({flags.text!r}, {flags.vocabulary!r})"
    alone = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    reference = float(alone.stdout)
    total = megabytes("whole")
    print(machine())
    print(f"{total:.1f} MB of text, {text.num_rows * flags.copies:,} documents")
    rows = [["SentencePiece alone", f"{reference:.1f}", "1.00", "", "", ""]]

    def row(name: str, size: float, start: Cost, cost: Cost) -> list[str]:
        net = cost - start
        speed = size / net.core
        return [
            *(name, f"{speed:.1f}", f"{speed / reference:.2f}", f"{size / net.wall:.1f}"),
            *(f"{start.wall:.1f}", f"{cost.peak / 1e6:.0f}"),
        ]

    with progress.shown("measuring", len(commands) + bool(flags.seqio_documents)) as bar:
        for name, command in commands.items():
            rows.append(row(name, total, command("little"), command("whole")))
            bar.update(len(rows) - 1, name)
        if flags.seqio_documents:
            costs = seqio("little"), seqio("some")
            rows.append(row("seqio_cache_tasks", megabytes("some"), *costs))
    header = ("command", "MB/s per core", "ratio", "MB/s, wall", "start-up (s)", "peak (MB)")
    print(table(header, rows, markdown=True))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
