"""Runs as commands, and what every trial of runs does to them: damaged, started twice, compared."""

import argparse
import collections
import functools
import pathlib
import random
import shutil
import signal
from collections.abc import Sequence
from typing import Any

from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR
from tests.laboratory.commands import DEADLINE_SECONDS, EXIT_PREEMPTED, Command, Difference, in_fork
from tests.laboratory.comparing import checkpoints, metrics_of, run_differences
from tests.support.damage import DAMAGES, any_file, damage
from tests.support.words import changed

_MODULE = "trainer.pretrain"
# Settings of a given run besides its flags: short rows, dropout, every kind of output.
_GIVEN = {
    "batch_size": 4, "lengths.inputs": 64, "lengths.targets": 18, "model.dropout_rate": 0.1,
    "metrics.every_steps": 1, "checkpoint.best_metric": "loss",
}  # fmt: skip
# A flipped bit is twice as likely as each other damage.
_DAMAGES = [*DAMAGES, "bit"]


class Run(Command):
    """A run in a model directory, and what it is doing, judged by its files."""

    exit_codes = Command.exit_codes | {
        signal.SIGINT: (0, EXIT_INTERRUPTED),
        # SIGTERM before the first update ends a run like any program.
        signal.SIGTERM: (0, EXIT_PREEMPTED, -signal.SIGTERM),
    }
    end_seconds = DEADLINE_SECONDS  # it saves first
    tracebacks = ("Traceback (most recent call last)",)

    def __init__(self, words: Sequence[str], folder: pathlib.Path, **how: Any):
        self.folder = folder
        words = [_MODULE, *words, f"--model_dir={folder}"]
        super().__init__(words, folder.with_suffix(".log"), name="a run", **how)
        self._leftovers: set[pathlib.Path] = set()
        every = [text for text in words if text.startswith("--evaluation.every_steps=")]
        self._evaluation_steps = int(every[-1].partition("=")[2])

    @classmethod
    def given(
        cls,
        flags: argparse.Namespace,
        cache_dir: object,
        folder: pathlib.Path,
        settings: Sequence[str],
    ) -> "Run":
        """Returns a run of the task, preset and steps of `flags`, in a fresh process."""
        steps = {"train_steps": flags.steps, "checkpoint.every_steps": max(1, flags.steps // 12)}
        steps |= {"evaluation.every_steps": max(1, flags.steps // 8)}
        of = {"preset": flags.preset, "task": flags.task, "cache_dir": cache_dir}
        return cls(changed(*words_of(of | steps | _GIVEN), *settings), folder)

    def start(self, *more: str, **how: Any) -> Command:
        self._leftovers = set(self._partial_checkpoints())
        return super().start(*more, **how)

    def lines(self) -> list[dict]:
        return metrics_of(self.folder)

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def checkpoint(self) -> int:
        return checkpoints(self.folder)[-1]

    def is_training(self) -> bool:
        return "this run" in self.output()

    def is_saving(self) -> bool:
        return not self._leftovers.issuperset(self._partial_checkpoints())

    def _partial_checkpoints(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def is_evaluating(self) -> bool:
        """Returns whether the last step has training metrics but not yet its due evaluation."""
        every, last = self._evaluation_steps, next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def waits_for(self) -> str:
        """Returns what the run waits for, where it follows a build; "" if it does not wait."""
        begins, ends = "waiting for ", "went on after "
        lines = self.output().splitlines()
        last = next((line for line in reversed(lines) if line.startswith((begins, ends))), ends)
        return "" if last.startswith(ends) else last.removeprefix(begins).partition(" of ")[0]

    def _doing(self) -> str:
        if what := self.waits_for():
            return f"waiting for {what}"
        if not self.is_training():
            return "starting"
        if self.is_saving():
            return "writing a checkpoint"
        if self.is_evaluating():
            return "evaluating"
        return "making updates" if self.step() > self.checkpoint() else "before its first update"


def words_of(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


class Trial:
    """A trial of runs in a folder of its own; `run` raises a Difference."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.random = random.Random(f"{flags.seed} runs {number}")
        self._folder = folder / str(number)
        self._folder.mkdir()
        self.said, self.counts = list[str](), collections.Counter[str]()

    def _run(self, name: str) -> Run:
        """Returns the run of this trial in a folder of this name."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns the run's settings, in words."""
        raise NotImplementedError

    @property
    def _log(self) -> pathlib.Path:
        return self._folder / "command.log"

    def note(self, what: str) -> None:
        self.said.append(what)
        self.counts[what] += 1

    def _check_same(self, one: str, other: str) -> None:
        folders = [self._folder / name for name in (one, other)]
        in_fork(functools.partial(self._same, *folders), self._log)

    def _same(self, *folders: pathlib.Path) -> str:
        if found := run_differences(*folders):
            raise Difference(f"{self.describe()}: {len(found)} differences, first {found[:3]}")
        return "equal"

    def _damage_checkpoint(self, name: str) -> None:
        """Damages the newest checkpoint of a copy of the run without its last, and resumes."""
        run = self._run(name)
        shutil.copytree(self._folder / "a", run.folder)
        shutil.rmtree(run.folder / f"checkpoint_{run.checkpoint()}")
        newest, kind = run.folder / f"checkpoint_{run.checkpoint()}", self.random.choice(_DAMAGES)
        path = any_file(newest, self.random)
        damage(path, kind, self.random)
        done, outcome = run.run(), "harmless"
        if done.code:
            outcome = "named; fell back"
            said = done.output.splitlines()[-1]
            wanted = ("is damaged", "newest sound one is checkpoint_")
            if done.code != EXIT_USER_ERROR or not all(text in said for text in wanted):
                raise Difference(f"{kind} in {path}: code {done.code}, {said}")
            run.succeed("--checkpoint.on_damage=fall_back")
        self._check_same("a", name)
        self.note(f"checkpoint damaged ({kind}): {outcome}")

    def _start_twice(self) -> None:
        """Starts a run and then another in its folder, which must be refused."""
        run, second = self._run("twice"), self._run("twice")
        second.log = self._folder / "second.log"
        run.start().wait_until(lambda: bool(run.lines()))
        run.signal_group(signal.SIGSTOP)
        if not run.running:
            return
        second.refuse("another run is writing")
        run.signal_group(signal.SIGCONT)
        run.finish()
        self._check_same("a", "twice")
        self.note("second run refused")

    def clean(self) -> None:
        shutil.rmtree(self._folder)
