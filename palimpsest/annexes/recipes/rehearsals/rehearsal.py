"""Rehearses a recipe: all of its stages on a sample, with a small model, in a temporary folder.

A corpus becomes its first documents, a vocabulary gets at most 1,000 pieces unless these are all,
and a model two layers of width 64. Lengths, objectives, optimizers, metrics and exports stay. A run
stops after half of its 20 updates and is resumed. What a sample cannot show is checked first, on
the real run.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from palimpsest.annexes.recipes import lock, planning, stage_state, writable
from palimpsest.annexes.recipes import recipe as recipes
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from palimpsest.annexes.recipes.rehearsals import real_runs, shrinking
from palimpsest.annexes.recipes.rehearsals.shrinking import UPDATES
from palimpsest.annexes.recipes.running import told
from tasks.storage import files
from tasks.terminal.command_line import UserError

# Programs of processes of their own: JAX holds the devices that it counts, transformers its memory.
_COUNT = "import jax; print(jax.device_count())"
_LOAD = (
    "import sys; from palimpsest.annexes.recipes.rehearsals import exported; "
    "sys.exit(exported.problem(sys.argv[1]))"
)


def rehearse(path: str, folder: str | None, topology: str | None = None) -> int:
    """Rehearses a recipe; raises UserError with the first stage's line that fails."""
    recipe = recipes.read(path, folder)
    begin = time.monotonic()
    # A process that a signal ends may still write while this removes the folder.
    temporary = tempfile.TemporaryDirectory(prefix="rehearsal_", ignore_cleanup_errors=True)
    with _terminable(), temporary as scratch:
        lock.check_place(recipe)
        for place in dict.fromkeys(_places(recipe)):
            writable.check(place, "choose another --folder")
        with _timed("checked the runs"):
            runs = real_runs.checked(recipe)
        with _timed("sampled the corpora"):
            whole = recipes.tables_of(recipe.path, recipe.text)[1]
            devices = int(_printed(_COUNT).split()[-1]) if runs else 1
            tables = shrinking.tables(whole, runs, devices, pathlib.Path(scratch))
        for stage in recipe.stages if topology else ():
            if stage.kind in RUNS:
                with _timed(f"{stage.name}: planned on {topology}"):
                    planning.of_run(recipe, stage, str(topology))
        if any(not name.startswith("corpus.") for name in tables):
            _rehearse_all(recipe, tables, scratch)
    print(f"rehearsed {recipe.path} in {time.monotonic() - begin:.0f} s")
    return 0


def _rehearse_all(recipe: Recipe, tables: recipes.Tables, scratch: str) -> None:
    small = recipes.of_tables(recipe.path, tables, files.join(scratch, "run"))
    shrinking.check_places(small, scratch)
    try:
        for stage in small.stages:
            _rehearse(stage)
    except UserError as error:
        raise UserError(str(error).replace(small.folder, recipe.folder)) from error


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the block as an exception does, so that its folder is removed."""

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # which has no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _printed(program: str, *words: str) -> str:
    """Returns what a program prints, without the Hub.

    Raises UserError with its last line if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError((done.stderr.splitlines() or ["a process ended without a word"])[-1])
    return done.stdout


def _rehearse(stage: Stage) -> None:
    """Runs a small stage: a run with a stop in the middle, an export up to its loading."""
    if stage.kind in RUNS:
        half = {**stage.flags, "train_steps": (str(UPDATES // 2),)}
        with _timed(f"{stage.name}: {UPDATES // 2} updates"):
            told(stage, dataclasses.replace(stage, flags=half).line)
    with _timed(stage.name):
        told(stage, stage.line)
    if stage.command == "export":
        with _timed(f"{stage.name}: loaded by transformers"):
            _load(stage)


def _load(stage: Stage) -> None:
    with real_runs.named(stage):
        _printed(_LOAD, stage.output)


def _places(recipe: Recipe) -> Iterator[str]:
    """Yields the folders in which the recipe's stages make theirs."""
    yield recipe.folder
    for stage in recipe.stages:
        if not stage_state.is_inside(stage.output, recipe.folder):
            yield stage.output.rpartition("/")[0] or "."


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)
