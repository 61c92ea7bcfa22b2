"""Checkpoints with Orbax: `model_dir/checkpoint_STEP`, written asynchronously and atomically.

Each holds `state` (step, parameters, optimizer state and metrics not yet written; the step is also
the position in the data) and `run` (configuration, fingerprints of the caches, SHA-256 of the
vocabulary and the best checkpoint so far), which a resumed run is checked against.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer import stores
from trainer.config import BEST_METRICS, CheckpointConfig, Config, config_changes, fields
from trainer.data import recorded
from trainer.engine import processes
from trainer.engine.step import TrainState
from trainer.setup import Run, vocabulary_sha256

_PREFIX = "checkpoint"
# The only one of config.BEST_METRICS of which higher values are better.
_HIGHER_IS_BETTER = "accuracy"


class _Best(NamedTuple):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


class Checkpoints:
    """The checkpoints of one model directory.

    Args:
      model_dir: local or remote folder.
      policy: which checkpoints to keep; None keeps all.
      writable: False to only read.
    """

    def __init__(
        self, model_dir: str, policy: CheckpointConfig | None = None, writable: bool = True
    ):
        self._model_dir = model_dir
        self._policy = policy or CheckpointConfig(keep=None)
        self._best: _Best | None = None
        # For every error that it raises, Orbax also logs a traceback from another thread.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        if files.is_remote(model_dir):
            stores.prepare(model_dir)
        folder = (
            model_dir
            if files.is_remote(model_dir)
            else os.path.abspath(files.local_path(model_dir))
        )
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                step_prefix=_PREFIX,
                preservation_policy=_Kept(self),
                create=writable,
                read_only=not writable,
                cleanup_tmp_directories=writable,
            ),
        )

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def improved(self, step: int, result: dict[str, float]) -> bool:
        """Returns whether an evaluation is better than all before; if so, records it as the best.

        Raises:
          UserError: the evaluation lacks `policy.best_metric`.
        """
        metric, best = self._policy.best_metric, self._best
        if metric is None:
            return False
        if metric not in result:
            raise UserError(
                f"--checkpoint.best_metric={metric}: these tasks do not have this metric; choose "
                f"one of {', '.join(name for name in result if name in BEST_METRICS)}"
            )
        value = result[metric]
        if best and best.metric == metric:
            better = value > best.value if metric == _HIGHER_IS_BETTER else value < best.value
            if not better:
                return False
        self._best = _Best(metric, value, step)
        return True

    def kept(self, steps: Sequence[int]) -> list[bool]:
        """Returns for each of the checkpoints with these ascending steps whether it is kept."""
        keep, every = self._policy.keep, self._policy.keep_every_steps
        return [
            keep is None
            or number >= len(steps) - keep
            or bool(every and step % every == 0)
            or bool(self._best and step == self._best.step)
            for number, step in enumerate(steps)
        ]

    def save(self, step: int, state: TrainState, run: Run) -> None:
        """Starts to write a checkpoint; returns as soon as the state may be changed.

        Earlier checkpoints stay intact whatever happens.

        Raises:
          UserError: the disk does not have enough free space.
          OSError: the disk filled up while a checkpoint was written.
        """
        self._check_room(state)
        description = {
            "config": dataclasses.asdict(run.config),
            "cache_fingerprints": run.data.fingerprints,
            "vocabulary_sha256": vocabulary_sha256(run.data),
            "best": self._best and self._best._asdict(),
            **run.data.record,
        }
        with self._naming_full_disk():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(description)
                ),
            )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state at `step` with the shapes, dtypes and shardings of `abstract`.

        Raises:
          UserError: the checkpoint cannot be read.
        """
        try:
            return self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
        except (ValueError, KeyError, FileNotFoundError) as error:
            path = files.join(self._model_dir, f"{_PREFIX}_{step}")
            raise UserError(
                f"checkpoint {path} cannot be read: {error}; delete it to resume from the one "
                "before"
            ) from error

    def check_resumable(self, step: int, run: Run) -> None:
        """Checks that `run` continues the run that wrote the checkpoint, and recalls its best one.

        Raises:
          UserError: settings, caches or vocabulary differ; names the differences.
        """
        try:
            stored: dict[str, Any] = self._manager.restore(
                step, args=ocp.args.Composite(run=ocp.args.JsonRestore())
            )["run"]
        except KeyError as error:
            raise UserError(
                f"the checkpoints in {self._model_dir} were not written by this trainer, but "
                "perhaps by T5X: resume with --engine=t5x, or start with "
                f"--init_from={self._model_dir} in another --model_dir"
            ) from error
        before = fields.from_dict(Config, stored["config"], self._model_dir)
        differences = config_changes(before, run.config, step)
        differences += recorded.changes(stored, run.data.record, step)
        if "tasks" not in stored and processes.is_first():
            print(
                f"checkpoint {step} does not say what its tasks were: that their objectives and "
                "rates are the same as before cannot be checked"
            )
        now = run.data.fingerprints
        differences += [
            f"the cache of {task} has changed"
            for task, fingerprint in stored["cache_fingerprints"].items()
            if now.get(task, fingerprint) != fingerprint
        ]
        vocabulary = stored.get("vocabulary_sha256")
        if vocabulary and vocabulary != vocabulary_sha256(run.data):
            differences.append("the vocabulary has changed")
        if differences:
            raise UserError(
                f"{self._model_dir} holds a run with other settings ({'; '.join(differences)}): "
                "use the same settings or another --model_dir"
            )
        best = stored.get("best")
        if best and best["metric"] == self._policy.best_metric:
            self._best = _Best(**best)

    def close(self) -> None:
        """Waits until every checkpoint that was started is written, and frees resources."""
        with self._naming_full_disk():
            self._manager.close()

    def _check_room(self, state: TrainState) -> None:
        """Rejects a checkpoint larger than the free disk space.

        It is checked before writing because TensorStore's threads print pages when a disk fills up.
        """
        if files.is_remote(self._model_dir) or not processes.is_first():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(files.local_path(self._model_dir)).free
        if free < needed:
            raise UserError(
                f"{self._model_dir}: the disk is full: a checkpoint needs {needed / 1e6:,.1f} MB "
                f"and {free / 1e6:,.1f} MB are free; free some space and run the same command "
                "again to resume from the newest checkpoint"
            )

    @contextlib.contextmanager
    def _naming_full_disk(self) -> Iterator[None]:
        """Turns TensorStore's error for a full disk into the matching OSError."""
        try:
            yield
        except Exception as error:
            if os.strerror(errno.ENOSPC) in str(error):
                code = errno.ENOSPC
                raise OSError(code, os.strerror(code), self._model_dir) from error
            raise


def chosen_steps(text: str, steps: list[int], model_dir: str) -> list[int]:
    """Returns the steps that "all", "latest" or "1000,2000" selects among a run's checkpoints.

    Raises:
      UserError: there is no checkpoint, or not of every step named.
    """
    if not steps:
        raise UserError(f"{model_dir} has no checkpoint yet: train with trainer.pretrain")
    if text == "all":
        return steps
    if text == "latest":
        return steps[-1:]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--steps={text}: give all, latest, or steps such as 1000,2000") from error
    missing = [step for step in wanted if step not in steps]
    if missing:
        raise UserError(
            f"{model_dir} has no checkpoint of step {missing[0]}; it has "
            f"{', '.join(map(str, steps))}"
        )
    return wanted


class _Kept(PreservationPolicy):
    """The policy by which Orbax deletes checkpoints."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return self._checkpoints.kept([info.step for info in checkpoints])
