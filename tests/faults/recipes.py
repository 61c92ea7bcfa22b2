"""Kills of a recipe in each of its stages.

An undisturbed run is the reference. Others, in other folders, are ended by signals at random
moments of every stage, and started again by the same command. Their lock file, cache, vocabulary,
last checkpoint and metrics must equal the reference's.
"""

import argparse
import pathlib
import random
import shutil
import signal
import time

from palimpsest.annexes.recipes import lock, records
from palimpsest.annexes.recipes import recipe as recipes
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
    kills: list[tuple[str, ...]] = []
    failures: list[str] = []
    trials = 0
    with progress.shown("killing", flags.kills) as bar:
        while not failures and (len(kills) < flags.kills or not trials):
            trials += 1
            killed = _Recipe(path, folder / f"killed-{trials}")
            try:
                for stage in _targets(list(seconds), flags.kills - len(kills), generator):
                    kills += _killed(killed, stage, seconds, generator)
                    bar.update(len(kills))
                killed.start()
                killed.finish()
            finally:
                killed.kill()
            failures = _differences(reference, killed)
            if lock.path_of(killed.recipe).read_bytes() != first:
                failures.append(f"{lock.path_of(killed.recipe)} has other bytes")
            if not failures:
                shutil.rmtree(killed.recipe.folder)
    header = ("kill", "signal", "aimed at", "seconds after", "while at")
    print(table(header, [(n, *kill) for n, kill in enumerate(kills, 1)], markdown=True))
    print(
        f"\n{len(kills)} kills of {trials} run(s) of {path.name} with {len(seconds)} stages: lock "
        f"file, caches, checkpoints and metrics {'differ from' if failures else 'equal'} those of "
        f"an undisturbed run; seed {flags.seed}, {progress.clock(time.monotonic() - begin)}"
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
    command: _Recipe, stage: str, seconds: dict[str, float], generator: random.Random
) -> list[tuple[str, ...]]:
    """Starts the recipe and ends it at a random moment of a stage, if it has not finished then."""
    # A run goes on from its last checkpoint, so that later kills find less of it; others restart.
    is_run = stage.partition(".")[0] in _RUNS
    after = generator.uniform(0, seconds[stage] * (0.4 if is_run else 0.9))
    command.start()
    if not command.wait_until(lambda: stage in command.begun()):
        command.check_alive()
        return []
    end = time.monotonic() + after
    command.wait_until(lambda: time.monotonic() > end)
    if not command.running:
        command.check_alive()
        return []
    number = draw_signal(generator)
    stop_before_kill(number, command)
    last = command.begun()[-1]
    where = f"{last}, finished" if command.is_finished(last) else last
    command.end(number)
    return [(number.name, stage, f"{after:.1f}", where)]


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
