"""The beginning of a run: initial parameters, its own newest checkpoint, or --init_from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainer import init_from
from trainer.checkpoint import Checkpoints
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.setup import Run


class Beginning(Protocol):
    """The state in which a run begins."""

    @property
    def step(self) -> int:
        """Number of updates made before."""

    def describe(self) -> str:
        """Returns what the run begins with, as in "resumes from checkpoint 1000"."""

    def state(self, program: Program) -> TrainState:
        """Returns the state, on the program's devices.

        Raises:
          UserError: a checkpoint cannot be read.
        """


def resume_or_start(run: Run, checkpoints: Checkpoints) -> Beginning:
    """Returns the newest of the run's own `checkpoints`; without any, what `start` returns.

    Raises:
      UserError: the checkpoints are of a run with other settings, or see `start`.
    """
    steps = checkpoints.steps()
    if not steps:
        return start(run)
    checkpoints.check_resumable(steps[-1], run)
    return _Resumed(checkpoints, steps[-1])


def start(run: Run) -> Beginning:
    """Returns the beginning of a run without checkpoints: --init_from or initial parameters.

    Raises:
      UserError: --init_from cannot be read or does not fit the model.
    """
    return init_from.start(run) if run.config.init_from else _Fresh()


@dataclass(frozen=True)
class _Fresh:
    step: int = 0

    def describe(self) -> str:
        return "starts from initial parameters"

    def state(self, program: Program) -> TrainState:
        return program.initial_state()


@dataclass(frozen=True)
class _Resumed:
    checkpoints: Checkpoints
    step: int

    def describe(self) -> str:
        return f"resumes from checkpoint {self.step}"

    def state(self, program: Program) -> TrainState:
        return self.checkpoints.restore(self.step, program.abstract_state())
