"""A run that is killed and restarted, and how two finished runs differ."""

import argparse
import json
import pathlib
import signal
import sys
from typing import Any

from tasks.terminal.command_line import EXIT_INTERRUPTED
from trainer.faults.command import Command

# Exit code after SIGTERM, as in `trainer.engine.stopping`, which imports JAX.
_EXIT_PREEMPTED = 75
# Settings of the runs besides the command's own flags: short rows, dropout, every kind of output.
_SETTINGS = (
    "--batch_size=4",
    "--lengths.inputs=64",
    "--lengths.targets=18",
    "--model.dropout_rate=0.1",
    "--metrics.every_steps=1",
    "--checkpoint.best_metric=loss",
)


class Subject(Command):
    """A run in `folder` that can be started repeatedly by the same command.

    Args:
      flags: the preset, the task, the cache_dir and the number of steps.
      settings: further flags of trainer.pretrain.
      folder: its model directory.
    """

    exit_codes = {
        signal.SIGINT: (EXIT_INTERRUPTED,),
        # SIGTERM before the first update ends a run as any program.
        signal.SIGTERM: (_EXIT_PREEMPTED, -signal.SIGTERM),
    }

    def __init__(self, flags: argparse.Namespace, settings: list[str], folder: pathlib.Path):
        self.folder = folder
        command = [
            *(sys.executable, "-m", "trainer.pretrain", f"--preset={flags.preset}"),
            *(f"--task={flags.task}", f"--cache_dir={flags.cache_dir}"),
            *(f"--train_steps={flags.steps}", f"--model_dir={folder}", *_SETTINGS),
            f"--checkpoint.every_steps={max(1, flags.steps // 12)}",
            f"--evaluation.every_steps={max(1, flags.steps // 8)}",
            *settings,
        ]
        super().__init__("a run", command, folder.with_suffix(".log"))
        self._leftovers: set[pathlib.Path] = set()

    def start(self, *more: str, env: dict[str, str] | None = None) -> None:
        """Starts the run, with `more` flags; `process` is its process group."""
        self._leftovers = set(self._partial_checkpoints())
        super().start(*more, env=env)

    def lines(self) -> list[dict[str, Any]]:
        """Returns the metrics written so far, without those that depend on the machine."""
        from trainer.reporting.metrics import read_metrics

        return [
            {key: value for key, value in line.items() if key != "speed"}
            for line in read_metrics(str(self.folder))
        ]

    def step(self) -> int:
        """Returns the last step with metrics, 0 if there is none."""
        return max((line["step"] for line in self.lines()), default=0)

    def checkpoint(self) -> int:
        """Returns the step of the newest checkpoint, 0 if there is none."""
        names = [path.name.removeprefix("checkpoint_") for path in self.folder.glob("checkpoint_*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def is_training(self) -> bool:
        """Returns whether the start-up text, which ends the start, has been printed."""
        return "this run" in self.process.output()

    def is_saving(self) -> bool:
        """Returns whether this process has written part of a checkpoint."""
        return not self._leftovers.issuperset(self._partial_checkpoints())

    def _partial_checkpoints(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def is_evaluating(self) -> bool:
        """Returns whether the last step has training metrics but not yet its due evaluation."""
        every = int(_flag(self.command, "evaluation.every_steps"))
        last = next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def waits_for(self) -> str:
        """Returns what the run waits for, where it follows a build; "" if it does not wait."""
        begins, ends = "waiting for ", "went on after "
        lines = self.process.output().splitlines()
        last = next((line for line in reversed(lines) if line.startswith((begins, ends))), ends)
        return "" if last.startswith(ends) else last.removeprefix(begins).partition(" of ")[0]

    def _doing(self) -> str:
        """Returns what the run is doing, judged by its files and its output."""
        if what := self.waits_for():
            return f"waiting for {what}"
        if not self.is_training():
            return "starting"
        if self.is_saving():
            return "writing a checkpoint"
        if self.is_evaluating():
            return "evaluating"
        steps = [line["step"] for line in self.lines()]
        before = self.checkpoint()
        return "making updates" if steps and steps[-1] > before else "before its first update"


def _flag(command: list[str], name: str) -> str:
    """Returns the last value of a flag."""
    return [text for text in command if text.startswith(f"--{name}=")][-1].partition("=")[2]


def differences(one: Subject, other: Subject, step: int) -> list[str]:
    """Returns the differences between two finished runs: tensors of the final state, metrics."""
    import orbax.checkpoint as ocp

    from trainer.model.paths import named

    states = []
    for subject in (one, other):
        path = subject.folder.absolute() / f"checkpoint_{step}" / "state"
        states.append(named(ocp.StandardCheckpointer().restore(path)))
    found = [
        f"tensor {name}"
        for name in sorted({*states[0], *states[1]})
        if not _same(states[0].get(name), states[1].get(name))
    ]
    curves = [[json.dumps(line) for line in subject.lines()] for subject in (one, other)]
    if len(curves[0]) != len(curves[1]):
        found.append(f"the loss curves have {len(curves[0])} and {len(curves[1])} lines")
    found += [f"{a} is {b}" for a, b in zip(*curves, strict=False) if a != b]
    return found


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    if one is None or other is None:
        return False
    left, right = np.asarray(one), np.asarray(other)
    # Compares bytes, since NaN differs from itself and 0.0 equals -0.0.
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
