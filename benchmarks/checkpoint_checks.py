"""Measures what checksums cost when a checkpoint is saved and restored, and a lock at the start.

    python -m benchmarks.checkpoint_checks --megabytes=300,1000 --repeats=3

Saves and restores float32 arrays of 64 MB with Orbax, as `trainer.checkpoint` does, with checksums
and without. Times are medians; `blocked` is the time for which training waits at a save.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from benchmarks.machine import machine
from tasks.storage import lock
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table
from trainer.engine import checksums

_ARRAY_SHAPE = (16, 1024, 1024)
_ARRAY_MEGABYTES = 67


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _measure(megabytes: int, repeats: int, folder: pathlib.Path) -> list[tuple[str, ...]]:
    """Returns rows of the table for a checkpoint of about this size."""
    count = max(1, round(megabytes / _ARRAY_MEGABYTES))
    keys = jax.random.split(jax.random.key(0), count)
    state = {f"a{index}": jax.random.normal(key, _ARRAY_SHAPE) for index, key in enumerate(keys)}
    jax.block_until_ready(state)
    checksums.of_state(state)  # compiles
    abstract = jax.tree.map(jnp.zeros_like, state)
    blocked, saved, restored, checked = [], [], [], []
    for repeat in range(repeats):
        checked.append(_seconds(lambda: checksums.of_state(state)))
        path = folder / f"{megabytes}-{repeat}"
        with ocp.StandardCheckpointer() as checkpointer:
            begin = time.perf_counter()
            checkpointer.save(path, state)
            blocked.append(time.perf_counter() - begin)
            checkpointer.wait_until_finished()
            saved.append(time.perf_counter() - begin)
            restored.append(_seconds(lambda path=path: checkpointer.restore(path, abstract)))
    extra = statistics.median(checked)
    size = f"{count * _ARRAY_MEGABYTES} MB"
    parts = (("blocked at a save", blocked), ("whole save", saved), ("restore", restored))
    rows = []
    for name, times in parts:
        bare = statistics.median(times)
        ratio = f"{(bare + extra) / bare:.3f}"
        rows.append((size, name, f"{bare:.2f}", f"{extra:.3f}", ratio))
    return rows


def _measure_lock(folder: pathlib.Path) -> float:
    """Returns the seconds to take and to release a lock."""

    def once() -> None:
        with lock.held(str(folder), "run", "--model_dir"):
            pass

    return statistics.median(_seconds(once) for _ in range(100))


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="python -m benchmarks.checkpoint_checks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", default="300,1000", help="sizes, separated by commas")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each size")
    flags = parser.parse_args(argv)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(int, flags.megabytes.split(",")):
            rows += _measure(megabytes, flags.repeats, pathlib.Path(folder))
        seconds = _measure_lock(pathlib.Path(folder))
    header = ("checkpoint", "what", "bare (s)", "checksums (s)", "ratio")
    print(machine())
    print(table(header, rows, markdown=True))
    print(f"\na lock is taken and released in {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
