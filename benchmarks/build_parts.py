"""Measures the parts of a build, in processor seconds.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.build_parts --text=text.parquet --vocabulary=DIR [--copies=4] [--repeats=3]

Each build is a process of its own with one worker. A moment counts as the innermost part that runs
on the main thread; "other threads" follow the build and read its corpus's checksums. Costs are
medians. The last row is the whole process, with the interpreter's start.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.build import TASK
from benchmarks.machine import machine
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.table import table

_START, _OTHERS, _WHOLE = "start and plan", "other threads", "whole"
# Part -> functions and generators, each "module:name" of what is measured.
_PARTS = {
    "Parquet": ("tasks.reading.formats.parquet:_decoded",),
    "UTF-8, ids, places, bounds of batches": ("tasks.reading.formats.tables:documents",),
    "splits": ("tasks.reading.splits:divide",),
    "encoding": ("pipeline.tokenizer.tokenize:Tokenizer.encode",),
    "audit": ("pipeline.tokenizer.tokenize:Tokenizer._audit",),
    "lost text": (
        "pipeline.building.lost_text:of_texts",
        "pipeline.building.lost_text:of_rows",
    ),
    "checks of documents": ("pipeline.building.documents:write",),
    "packing": (
        "tasks.cache.pack:_Concat.add",
        "tasks.cache.pack:_Concat.finish",
        "tasks.cache.pack:_BestFit.add",
        "tasks.cache.pack:_BestFit.finish",
    ),
    "protobuf and CRC-32C": ("pipeline.building.write:framed",),
    "counts and index": ("pipeline.building.write:ShardWriter._write",),
    "lineage": ("pipeline.building.write:ShardWriter._write_lineage",),
    "SHA-256 and writing": ("pipeline.building.write:_HashedFile.write",),
    "finishing shards": (
        "pipeline.building.write:ShardWriter.__enter__",
        "pipeline.building.write:ShardWriter._finish",
    ),
    "receipts": ("tasks.cache.receipts:write_receipt", "pipeline.building.lifecycle:survey"),
    "manifest": ("pipeline.building.lifecycle:complete",),
    "report": ("pipeline.building.summary:show", "pipeline.building.repeated_ids:found"),
    "rest of pieces": ("pipeline.building.graph:run",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    text: str = field(REQUIRED, "Parquet file with a column text, from benchmarks.text")
    vocabulary: str = field(REQUIRED, "vocabulary or its folder")
    extra_ids: int = field(0, "sentinels to add to the vocabulary; see pipeline.build")
    copies: int = field(1, "copies of the text to build, for a longer run", rule=at_least(1))
    shard_bytes: int = field(16_000_000, "approximate bytes of text per shard")
    repeats: int = field(1, "number of builds", rule=at_least(1))


class Clock:
    """Counts the processor time of the main thread, by the innermost part that runs."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter({_START: time.process_time()})
        self._running, self._since = [_START], time.thread_time()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        self._charge()
        self._running.append(part)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        now = time.thread_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def measure(self, part: str, name: str) -> Callable[[], None]:
        """Counts a function or generator, "module:name", as a part; returns what ends that."""
        module, _, path = name.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, last = path.split(".")
        owner = functools.reduce(getattr, outer, owner)
        function = getattr(owner, last)
        setattr(owner, last, self.measured(part, function))
        return lambda: setattr(owner, last, function)

    def measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.of(part):
                return function(*arguments, **named)

        @functools.wraps(function)
        def generate(*arguments: Any, **named: Any) -> Iterator[Any]:
            with contextlib.closing(function(*arguments, **named)) as found:
                while True:
                    with self.of(part):
                        item = next(found, call)
                    if item is call:
                        return
                    yield item

        return generate if inspect.isgeneratorfunction(function) else call

    def summary(self) -> dict[str, float]:
        """Returns the seconds of all parts, of other threads and of the whole process."""
        self._charge()
        whole = time.process_time()
        return {**self.seconds, _OTHERS: whole - sum(self.seconds.values()), _WHOLE: whole}


def child(path: str, words: list[str]) -> int:
    """Runs pipeline.build in this process; writes the seconds of its parts to `path`."""
    clock = Clock()
    for part, names in _PARTS.items():
        for name in names:
            clock.measure(part, name)
    from pipeline.build import main as build

    code = build(words)
    pathlib.Path(path).write_text(json.dumps(clock.summary()))
    return code


def _parts_of(command: list[str], results: pathlib.Path) -> dict[str, float]:
    program = "import sys; from benchmarks import build_parts as parts; "
    program += "sys.exit(parts.child(sys.argv[1], sys.argv[2:]))"
    words = [sys.executable, "-c", program, str(results), *command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the build failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(results.read_text())


def run(flags: Flags) -> None:
    """Prints the table."""
    text = pq.read_table(flags.text, columns=["text"])["text"]
    megabytes = pc.sum(pc.binary_length(text)).as_py() * flags.copies / 1e6
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for copy in range(flags.copies):
            shutil.copy(flags.text, f"{folder}/{copy}.parquet")
        command = [
            *(f"--task={TASK}", f"--corpus=parquet:{folder}/*.parquet"),
            *(f"--vocabulary={os.path.abspath(flags.vocabulary)}", f"--cache_dir={folder}/cache"),
            *(f"--extra_ids={flags.extra_ids}", f"--shard_bytes={flags.shard_bytes}"),
        ]
        for _ in range(flags.repeats):
            shutil.rmtree(f"{folder}/cache", ignore_errors=True)
            found.append(_parts_of(command, pathlib.Path(folder, "parts.json")))
    print(machine())
    print(f"{megabytes:.1f} MB of text, {len(text) * flags.copies:,} documents")
    print(table(("part", "core (s)", "share", "GB/s"), _rows(found, megabytes), markdown=True))


def _rows(found: list[dict[str, float]], megabytes: float) -> list[tuple[str, ...]]:
    medians = {
        name: statistics.median(parts.get(name, 0) for parts in found)
        for name in (_START, *_PARTS, _OTHERS, _WHOLE)
    }
    whole, gigabytes = medians[_WHOLE], megabytes / 1e3
    return [
        (name, f"{own:.2f}", f"{own / whole:.1%}", f"{gigabytes / max(own, 1e-3):.2f}")
        for name, own in medians.items()
    ]


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
