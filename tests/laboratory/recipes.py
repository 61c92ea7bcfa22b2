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
from collections import Counter

from tasks.storage import files
from tests.laboratory.commands import (
    EXIT_PREEMPTED,
    Command,
    Difference,
    draw_signal,
    stop_before_kill,
)
from tests.laboratory.comparing import cache_differences, run_differences

_POLL_SECONDS = 0.02
_RUNS = ("pretrain", "finetune")
# These say when and on which machine something was made, and how long it took.
_OF_THE_DAY = ("conversion.json", "README.md", "RECIPE.md", "report.json", "report.html")


class _Recipe(Command):
    """`palimpsest run` of a recipe in a folder."""

    exit_codes = Command.exit_codes | {
        signal.SIGTERM: (0, EXIT_PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM)
    }

    def __init__(self, path: pathlib.Path, folder: pathlib.Path):
        super().__init__(
            ("palimpsest", "run", path, f"--folder={folder}"),
            folder.with_suffix(".log"),
            name="the recipe",
        )
        self.folder, self._lock = folder, path.with_suffix(".lock")

    def is_at(self, stage: str) -> bool:
        return (self.folder / ".recipe" / f"{stage}.json").exists()

    def begun(self) -> list[str]:
        return [path.stem for path in (self.folder / ".recipe").glob("[!.]*.json")]

    def is_finished(self, stage: str) -> bool:
        return files.read_json(f"{self.folder}/.recipe/{stage}.json")["made"] is not None

    def lock(self) -> bytes:
        return self._lock.read_bytes()

    def timed(self) -> dict[str, float]:
        """Runs the recipe; returns the seconds of each stage, in their order."""
        self.start()
        began: dict[str, float] = {}
        while self.running:
            began |= {name: time.monotonic() for name in self.begun() if name not in began}
            time.sleep(_POLL_SECONDS)
        self.finish()
        ends = [*list(began.values())[1:], time.monotonic()]
        return {name: end - start for (name, start), end in zip(began.items(), ends, strict=True)}


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Runs the recipe undisturbed."""
    folder.mkdir()
    flags.path = folder.parent / pathlib.Path(flags.recipe).name
    shutil.copy(flags.recipe, flags.path)
    flags.reference = _Recipe(flags.path, folder / "undisturbed")
    flags.stages, flags.lock = flags.reference.timed(), flags.reference.lock()


class Trial:
    """A recipe that is ended in all stages, or in some, and run again."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.random = random.Random(f"{flags.seed} recipes {number}")
        self._flags, self.counts = flags, Counter[str]()
        self._recipe = _Recipe(flags.path, folder / str(number))

    def run(self) -> str:
        stages, said = [*self._flags.stages], list[str]()
        chosen = self.random.sample(stages, min(len(stages), self._flags.kills))
        for stage in sorted(chosen, key=stages.index):
            said += self._kill(stage)
        self._recipe.succeed()
        if found := self._differences():
            raise Difference("; ".join([*found, *said]))
        return f"{'; '.join(said)}: equal, of {len(stages)} stages"

    def clean(self) -> None:
        shutil.rmtree(self._recipe.folder)

    def _kill(self, stage: str) -> list[str]:
        """Starts the recipe and ends it at a random moment of a stage, if it lasts so long."""
        # A run goes on from its last checkpoint, so that later kills find less of it; others
        # restart.
        share = 0.4 if stage.partition(".")[0] in _RUNS else 0.9
        command = self._recipe
        command.start()
        command.wait_until(lambda: command.is_at(stage))
        end = time.monotonic() + self.random.uniform(0, share * self._flags.stages[stage])
        command.wait_until(lambda: time.monotonic() > end)
        number = draw_signal(self.random)
        stop_before_kill(number, command)
        if not command.running:
            command.finish()
            return []
        last = max(command.begun(), key=[*self._flags.stages].index)
        where = f"{last}, finished" if command.is_finished(last) else last
        command.end(number)
        self.counts.update({"kills": 1, f"{number.name} in {where}": 1})
        return [f"{number.name} aimed at {stage}, in {where}"]

    def _differences(self) -> list[str]:
        """Returns what the folder differs in: files, states and metrics of runs, the lock file."""
        one, other = self._flags.reference.folder, self._recipe.folder
        runs = [path.parent.relative_to(one) for path in one.rglob("metrics.jsonl")]
        found = [
            f"{run}: {each}" for run in runs for each in run_differences(one / run, other / run)
        ]
        of_runs = tuple(f"file {run}/" for run in runs)
        found += [
            each
            for each in cache_differences(one, other, hidden=False, without=_OF_THE_DAY)
            if each.endswith("evaluation.json") or not each.startswith(of_runs)
        ]
        same = self._recipe.lock() == self._flags.lock
        return found if same else [*found, "the lock file has other bytes"]
