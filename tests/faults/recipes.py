"""Kills of a recipe in each of its stages.

An undisturbed run is the reference. Another one, in another folder, is ended by signals at random
moments of every stage, and started again by the same command. Its lock file, its cache, its
vocabulary, its last checkpoint and its metrics must equal the reference's.
"""

import argparse
import pathlib
import random
import shutil
import signal
import time

from palimpsest.recipes import lock, records
from palimpsest.recipes import recipe as recipes
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from tasks.terminal.table import table
from tests.faults.command import Command, draw_signal, stop_before_kill
from tests.faults.commands import EXIT_PREEMPTED
from tests.faults.comparing import differing, run_differences

_POLL_SECONDS = 0.02
_RUNS = ("pretrain", "finetune")


class _Recipe(Command):
    """`palimpsest run` of a recipe in a folder."""

    exit_codes = {
        signal.SIGINT: (EXIT_INTERRUPTED, -signal.SIGINT),
        signal.SIGTERM: (EXIT_PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM),
    }

    def __init__(self, path: pathlib.Path, folder: pathlib.Path):
        module = ("palimpsest", "run", str(path), f"--folder={folder}")
        super().__init__("the recipe", module, folder.with_suffix(".log"))
        self.recipe = recipes.read(str(path), str(folder))

    def begun(self) -> list[str]:
        """Returns the stages that have begun, in their order."""
        folder = pathlib.Path(self.recipe.folder) / ".recipe"
        return [each.name for each in self.recipe.stages if (folder / f"{each.name}.json").exists()]

    def is_finished(self, stage: str) -> bool:
        path = pathlib.Path(self.recipe.folder) / ".recipe" / f"{stage}.json"
        return files.read_json(str(path))["made"] is not None


def break_recipes(
    flags: argparse.Namespace, settings: list[str], folder: pathlib.Path
) -> list[str]:
    """Kills a recipe `flags.kills` times, and prints the kills; returns what differs."""
    if settings:
        raise UserError(f"unknown flag {settings[0]}")
    begin, generator = time.monotonic(), random.Random(flags.seed)
    path = folder / pathlib.Path(flags.recipe).name
    shutil.copy(flags.recipe, path)
    reference = _Recipe(path, folder / "undisturbed")
    seconds = _timed(reference)
    first = lock.path_of(reference.recipe).read_bytes()
    killed = _Recipe(path, folder / "killed")
    kills: list[tuple[str, ...]] = []
    try:
        with progress.shown("killing", flags.kills) as bar:
            for stage in _targets(list(seconds), flags.kills, generator):
                kills += [_killed(killed, stage, seconds[stage], generator)]
                bar.update(len(kills))
        killed.start()
        killed.finish()
    finally:
        killed.kill()
    failures = _differences(reference, killed)
    if lock.path_of(killed.recipe).read_bytes() != first:
        failures.append(f"{lock.path_of(killed.recipe)} has other bytes")
    header = ("kill", "signal", "aimed at", "seconds after", "while at")
    print(table(header, [(n, *kill) for n, kill in enumerate(kills, 1)], markdown=True))
    print(
        f"\n{len(kills)} kills over {len(seconds)} stages of {path.name}: lock file, caches, "
        f"checkpoints and metrics {'differ from' if failures else 'equal'} those of an undisturbed "
        f"run; seed {flags.seed}, {progress.clock(time.monotonic() - begin)}"
    )
    return failures


def _timed(command: _Recipe) -> dict[str, float]:
    """Runs a recipe; returns the seconds of each stage."""
    command.start()
    began: dict[str, float] = {}
    try:
        while command.running:
            began |= {name: time.monotonic() for name in command.begun() if name not in began}
            time.sleep(_POLL_SECONDS)
        command.finish()
    finally:
        command.kill()
    ends = [*list(began.values())[1:], time.monotonic()]
    return {name: end - start for (name, start), end in zip(began.items(), ends, strict=True)}


def _targets(stages: list[str], kills: int, generator: random.Random) -> list[str]:
    """Returns the stage of each kill, in their order: all alike, the rest at random."""
    chosen = stages * (kills // len(stages)) + generator.sample(stages, kills % len(stages))
    return sorted(chosen, key=stages.index)


def _killed(
    command: _Recipe, stage: str, seconds: float, generator: random.Random
) -> tuple[str, ...]:
    """Starts the recipe, and ends it at a random moment of a stage, or of a later one."""
    command.start()
    if not command.wait_until(lambda: stage in command.begun()):
        raise UserError(f"the recipe ended before {stage}: {command.tail()}")
    after = generator.uniform(0, seconds)
    end = time.monotonic() + after
    command.wait_until(lambda: time.monotonic() > end)
    number = draw_signal(generator)
    if not command.running:  # resumed stages take less time
        command.check_alive()
        return (number.name, stage, f"{after:.1f}", "the end")
    stop_before_kill(number, command)
    last = command.begun()[-1]
    where = f"{last}, finished" if command.is_finished(last) else last
    command.end(number)
    return (number.name, stage, f"{after:.1f}", where)


def _differences(one: _Recipe, other: _Recipe) -> list[str]:
    """Returns what two finished folders differ in: files of stages, states and metrics of runs."""
    found = []
    for mine, theirs in zip(one.recipe.stages, other.recipe.stages, strict=True):
        places = pathlib.Path(mine.output), pathlib.Path(theirs.output)
        if mine.kind in _RUNS:
            made = records.state(one.recipe, mine, records.states(one.recipe)).made
            assert made is not None
            found += [f"{mine.name}: {each}" for each in run_differences(*places, made["step"])]
        elif mine.kind != "report":  # it shows the speed
            found += [f"{mine.name}: file {name}" for name in differing(*map(_checksums, places))]
    return found


def _checksums(place: pathlib.Path) -> dict[str, str]:
    listed = sorted(place.rglob("*")) if place.is_dir() else [place]
    # When an export was made, how long training took, how long a search for duplicates took.
    left_out = ("conversion.json", "README.md", "report.json")
    return {
        str(path.relative_to(place)): files.sha256(str(path))
        for path in listed
        if path.is_file() and path.name not in left_out
    }
