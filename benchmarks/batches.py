"""Measures ready T5 batches of palimpsest.batches and of other loaders, from the same tokens.

    python -m benchmarks.batches --collator=FILE [--python=VENV/bin/python]

The tokens are a cache's of benchmarks.input_pipeline. Other loaders get its windows of 568 tokens
in their own format and in its order, and T5's collator: FILE defines the `DataCollatorForT5MLM` of
nanoT5, which is transformers' (run_t5_mlm_flax.py). Each gives 128 rows, 512 -> 114.

batches      palimpsest.batches: global order, checksums, noise, features
torch        the same, by palimpsest.torch.DataLoader
service      the same, from `palimpsest serve` by loopback; time and memory are of both processes
streaming    MosaicML's StreamingDataset of MDS shards, shuffled, and the collator
litdata      StreamingDataset of optimized chunks, shuffled, and the collator
datasets     load_dataset of Parquet files, streaming, shuffled in a buffer, and the collator
tf.data      T5's pipeline of benchmarks.input_pipeline, without a shuffle

Each measurement is a process on one core. "M tokens/s" is per processor second of all its
threads and children, the median of --repeats intervals. "import" is the time to import the
loader, "first" from there to the first batch, "resume" from there to the batch after --resume
batches, where a loader has a state; "peak" is VmHWM. All times are of processors: other work on
the machine does not count.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.input_pipeline import INPUTS, TARGETS, WINDOW, make_cache, t5
from benchmarks.machine import machine
from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.table import table

_SIZE, _EOS = 32_100, 1
_SEED = 0
Batches = Iterator[Any]


def _collate(path: str) -> Callable[[list[dict[str, np.ndarray]]], Any]:
    """Returns the collator of a file."""
    spec = importlib.util.spec_from_file_location("collator", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["collator"] = module
    spec.loader.exec_module(module)
    tokenizer = collections.UserList([None] * _SIZE)
    tokenizer.eos_token_id = _EOS  # type: ignore[attr-defined]
    return module.DataCollatorForT5MLM(tokenizer, 0.15, 3.0, INPUTS, TARGETS, 0)  # type: ignore[no-any-return]


def _windows(cache: str) -> Iterator[np.ndarray]:
    """Yields the windows of a cache, int32 [568]."""
    from tasks.cache.manifest import CacheManifest
    from tasks.cache.windows import Windows

    windows = Windows(cache, CacheManifest.load(cache), "train", WINDOW)
    for first in range(0, len(windows), 1024):
        yield from windows.read(np.arange(first, min(first + 1024, len(windows))))[0]


def _named_windows(cache: str) -> Iterator[dict[str, np.ndarray]]:
    yield from ({"input_ids": window} for window in _windows(cache))


class Ours:
    """palimpsest.batches of a cache or of a service, and its loader for PyTorch."""

    def __init__(self, loader: bool = False):
        self._loader = loader

    def write(self, cache: str, folder: str) -> None:
        """Writes nothing: the cache is its format."""

    def read(self, cache: str, folder: str, collator: str, rows: int, taken: int) -> Batches:
        import palimpsest

        # Any task of span corruption reads the windows of any cache that is named itself.
        how = {"task": "c4_span_corruption", "batch_size": rows}
        how["lengths"] = {"inputs": INPUTS, "targets": TARGETS}
        served = "://" in cache
        found = palimpsest.batches(
            cache if served else None, cache_dir=None if served else cache, **how
        )
        found.state = taken
        if self._loader:
            return iter(palimpsest.torch.DataLoader(found))
        return map(found.__getitem__, itertools.count(taken))


class Streaming:
    """MosaicML streaming."""

    def write(self, cache: str, folder: str) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"input_ids": f"ndarray:int32:{WINDOW}"}) as writer:
            for window in _windows(cache):
                writer.write({"input_ids": window})

    def read(self, cache: str, folder: str, collator: str, rows: int, taken: int) -> Batches:
        from streaming import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(
            local=folder, shuffle=True, shuffle_seed=_SEED, batch_size=rows, num_canonical_nodes=1
        )
        loader = StreamingDataLoader(data, batch_size=rows, collate_fn=_collate(collator))
        if taken:
            epochs, left = divmod(taken * rows, len(data))
            loader.load_state_dict(
                {"epoch": epochs, "sample_in_epoch": left, "num_canonical_nodes": 1,
                 "shuffle_seed": _SEED, "initial_physical_nodes": 1}
            )  # fmt: skip
        return itertools.chain.from_iterable(loader for _ in itertools.count())


class Litdata:
    """litdata."""

    def write(self, cache: str, folder: str) -> None:
        from litdata import optimize

        optimize(_named_windows, [cache], folder, chunk_bytes="64MB", num_workers=1)

    def read(self, cache: str, folder: str, collator: str, rows: int, taken: int) -> Batches:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(folder, shuffle=True, seed=_SEED)
        loader = StreamingDataLoader(data, batch_size=rows, collate_fn=_collate(collator))
        return itertools.chain.from_iterable(loader for _ in itertools.count())


class Datasets:
    """Hugging Face's datasets, streaming."""

    def write(self, cache: str, folder: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        kind, found = pa.list_(pa.int32()), _windows(cache)
        for number in itertools.count():
            some = [*itertools.islice(found, 8192)]
            if not some:
                return
            rows = pa.array(list(some), kind)
            path = f"{folder}/{number:05d}.parquet"
            parquet.write_table(pa.table({"input_ids": rows}), path)

    def read(self, cache: str, folder: str, collator: str, rows: int, taken: int) -> Batches:
        import datasets

        data = datasets.load_dataset("parquet", data_dir=folder, split="train", streaming=True)
        data = data.with_format("numpy").shuffle(seed=_SEED, buffer_size=10_000)
        collate = _collate(collator)
        for _ in itertools.count():
            yield from (
                collate([{"input_ids": each} for each in batch["input_ids"]])
                for batch in data.iter(rows, drop_last_batch=True)
            )


class TfData:
    """T5's pipeline in tf.data."""

    def write(self, cache: str, folder: str) -> None:
        """Writes nothing: it reads the cache's records."""

    def read(self, cache: str, folder: str, collator: str, rows: int, taken: int) -> Batches:
        return t5(cache, rows)


SIDES: dict[str, Any] = {
    "batches": Ours(),
    "torch": Ours(loader=True),
    "service": Ours(),
    "streaming": Streaming(),
    "litdata": Litdata(),
    "datasets": Datasets(),
    "tf.data": TfData(),
}
# What is imported before the clock of the first batch starts.
_MODULES = {
    "batches": "trainer.reading",
    "torch": "palimpsest.annexes.pytorch.loader",
    "service": "palimpsest.annexes.batch_service.client",
    "streaming": "streaming",
    "litdata": "litdata",
    "datasets": "datasets",
    "tf.data": "tensorflow",
}
# Sides whose state says where to go on.
_STATEFUL = ("batches", "torch", "service", "streaming")


@contextlib.contextmanager
def _place(side: str, cache: str) -> Iterator[tuple[Any, ...]]:
    """Yields where a side reads: the cache, or a server's address and the number of its process."""
    if side != "service":
        yield (cache,)
        return
    command = [sys.executable, "-m", "palimpsest", "serve", f"--cache_dir={cache}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().split()[-1], server.pid
        finally:
            server.terminate()


def _seconds(process: int) -> float:
    """Returns the processor seconds of a process and of its children that ended."""
    with open(f"/proc/{process}/stat") as file:
        ticks = file.read().rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _peak(process: int) -> int:
    """Returns the most bytes of memory that a process has had."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def measure(flags: "Flags", side: str, cache: str, folder: str, taken: int, *servers: int) -> None:
    """Prints [tokens/s, seconds to import and to the first batch, peak bytes], and exits.

    A service is named in place of the cache; `servers` are its processes.
    """
    os.sched_setaffinity(0, flags.cores[:1])
    processes = (os.getpid(), *servers)

    def clock() -> float:
        return sum(map(_seconds, processes))

    begin = clock()
    importlib.import_module(_MODULES[side])
    imported = clock() - begin
    begin = clock()
    batches = SIDES[side].read(cache, folder, flags.collator, flags.batch_size, taken)
    batch = next(batches)
    first = clock() - begin
    shapes = {array.shape for array in batch.values()}
    assert shapes <= {(flags.batch_size, INPUTS), (flags.batch_size, TARGETS)}, shapes
    speeds = []
    for _ in range(flags.repeats if not taken else 0):
        until, begin, count = time.monotonic() + flags.seconds, clock(), 0
        while time.monotonic() < until:
            next(batches)
            count += 1
        speeds.append(count * flags.batch_size * WINDOW / (clock() - begin))
    peak = sum(map(_peak, processes))
    print(json.dumps([statistics.median(speeds or [0]), imported, first, peak]))
    sys.stdout.flush()
    os._exit(0)


def compare(flags: "Flags", folder: pathlib.Path) -> None:
    """Runs all measurements and prints the table."""
    cache = folder / "cache"
    cache.mkdir()
    make_cache(cache, WINDOW, int(flags.tokens), int(flags.tokens))

    def child(program: str) -> str:
        begin = "from benchmarks.batches import SIDES, Flags, measure\n"
        command = [flags.python or sys.executable, "-c", begin + program]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{program} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def timed(side: str, taken: int) -> list[float]:
        with _place(side, str(cache)) as (place, *servers):
            where = f"{side!r}, {place!r}, {str(folder / side)!r}, {taken}, *{servers}"
            found: list[float] = json.loads(child(f"measure({flags!r}, {where})").splitlines()[-1])
        return found

    rows, speeds = [], {}
    for side in flags.sides:
        (folder / side).mkdir()
        child(f"SIDES[{side!r}].write({str(cache)!r}, {str(folder / side)!r})")
        speed, imported, first, peak = map(
            statistics.median, zip(*(timed(side, 0) for _ in range(flags.rounds)), strict=True)
        )
        resume = f"{timed(side, flags.resume)[2]:.2f}" if side in _STATEFUL else "-"
        speeds[side] = speed
        shown = f"{speed / 1e6:.2f}", f"{speed / speeds[flags.sides[0]]:.2f}"
        seconds = f"{imported:.2f}", f"{first:.2f}", resume
        rows.append((side, *shown, *seconds, f"{peak / 1e6:.0f}"))
    print(machine())
    print(f"{flags.tokens:,.0f} tokens, batches of {flags.batch_size}")
    header = ("loader", "M tokens/s", "ratio", "import (s)", "first (s)", "resume (s)", "peak (MB)")
    print(table(header, rows, markdown=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    collator: str = field(REQUIRED, "Python file with DataCollatorForT5MLM", metavar="FILE")
    python: str | None = field(None, "interpreter with the other loaders; by default this one")
    sides: tuple[str, ...] = field(tuple(SIDES), "the loaders; ratios are to the first")
    tokens: float = field(4e7, "tokens in the cache")
    batch_size: int = field(128, "rows per batch", rule=at_least(1))
    resume: int = field(1_000_000, "batches before the resumed one", rule=at_least(1))
    cores: tuple[int, ...] = field((0,), "number of the CPU core to use")
    seconds: float = field(2.0, "length of an interval in seconds")
    repeats: int = field(5, "intervals per process", rule=at_least(1))
    rounds: int = field(3, "number of processes of each kind", rule=at_least(1))


def run(flags: Flags) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        compare(flags, pathlib.Path(folder))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
