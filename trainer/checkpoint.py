"""Checkpoints by Orbax: `model_dir/checkpoint_STEP`, written asynchronously, whole or not at all.

Each holds `state` (step, parameters, optimizer state, metrics not yet written; the step is also
the place in the data) and `run` (the configuration, the caches' fingerprints, the vocabulary's
sha256, the best checkpoint so far), against which a resuming run is checked.
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
from trainer.engine import processes
from trainer.engine.step import TrainState
from trainer.setup import Run, vocabulary_sha256

_PREFIX = "checkpoint"
# The only metric of config.BEST_METRICS that is best high.
_BEST_HIGH = "accuracy"


class Best(NamedTuple):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


class Checkpoints:
    """The checkpoints of one model directory; `policy` says which stay, all if there is none."""

    def __init__(
        self, model_dir: str, policy: CheckpointConfig | None = None, writable: bool = True
    ):
        self._model_dir = model_dir
        self._policy = policy or CheckpointConfig(keep=None)
        self._best: Best | None = None
        # Orbax logs a traceback, in a thread of its own, of every error that it then raises.
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
        """Steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def improved(self, step: int, result: dict[str, float]) -> bool:
        """Whether this evaluation is better than all before it, which makes it the best.

        Raises:
          UserError: it lacks the metric.
        """
        metric, best = self._policy.best_metric, self._best
        if metric is None:
            return False
        if metric not in result:
            raise UserError(
                f"--checkpoint.best_metric={metric}: these tasks have no such metric, but "
                f"{', '.join(name for name in result if name in BEST_METRICS)}"
            )
        value = result[metric]
        if best and best.metric == metric:
            better = value > best.value if metric == _BEST_HIGH else value < best.value
            if not better:
                return False
        self._best = Best(metric, value, step)
        return True

    def kept(self, steps: Sequence[int]) -> list[bool]:
        """Which of the checkpoints of these ascending steps stay."""
        keep, every = self._policy.keep, self._policy.keep_every_steps
        return [
            keep is None
            or place >= len(steps) - keep
            or bool(every and step % every == 0)
            or bool(self._best and step == self._best.step)
            for place, step in enumerate(steps)
        ]

    def save(self, step: int, state: TrainState, run: Run) -> None:
        """Begins to write a checkpoint; returns once the state may be changed.

        Raises:
          UserError: the disk has no room for it; the checkpoints before it are whole.
          OSError: the disk filled up while it was written, likewise.
        """
        self._check_room(state)
        description = {
            "config": dataclasses.asdict(run.config),
            "cache_fingerprints": run.data.fingerprints,
            "vocabulary_sha256": vocabulary_sha256(run.data),
            "best": self._best and self._best._asdict(),
        }
        with self._full_disk_named():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(description)
                ),
            )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state at `step`, laid out as `abstract` (shapes, dtypes and shardings).

        Raises:
          UserError: it cannot be read.
        """
        try:
            return self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
        except (ValueError, KeyError, FileNotFoundError) as error:
            path = files.join(self._model_dir, f"{_PREFIX}_{step}")
            raise UserError(
                f"checkpoint {path} cannot be read: {error}; delete it to go on from the one before"
            ) from error

    def check_resumable(self, step: int, run: Run) -> None:
        """Refuses to resume with settings under which the run would not be the same; knows the best
        checkpoint from then on.

        Raises:
          UserError: names the settings that differ.
        """
        try:
            stored: dict[str, Any] = self._manager.restore(
                step, args=ocp.args.Composite(run=ocp.args.JsonRestore())
            )["run"]
        except KeyError as error:
            raise UserError(
                f"the checkpoints in {self._model_dir} are not ours, but perhaps T5X's: go on with "
                f"--engine=t5x, or begin with --init_from={self._model_dir} in another --model_dir"
            ) from error
        before = fields.from_dict(Config, stored["config"], self._model_dir)
        differences = config_changes(before, run.config, step)
        now = run.data.fingerprints
        differences += [
            f"the cache of {task} is another one"
            for task, fingerprint in stored["cache_fingerprints"].items()
            if now.get(task, fingerprint) != fingerprint
        ]
        vocabulary = stored.get("vocabulary_sha256")
        if vocabulary and vocabulary != vocabulary_sha256(run.data):
            differences.append("the vocabulary is another one")
        if differences:
            raise UserError(
                f"{self._model_dir} holds a run with other settings ({'; '.join(differences)}): "
                "use the same ones, or another --model_dir"
            )
        best = stored.get("best")
        if best and best["metric"] == self._policy.best_metric:
            self._best = Best(**best)

    def close(self) -> None:
        """Returns when every checkpoint begun is on disk; frees what the manager holds."""
        with self._full_disk_named():
            self._manager.close()

    def _check_room(self, state: TrainState) -> None:
        """Asks before writing: TensorStore's threads litter the terminal when a disk fills up."""
        if files.is_remote(self._model_dir) or not processes.is_first():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(files.local_path(self._model_dir)).free
        if free < needed:
            raise UserError(
                f"{self._model_dir}: the disk is full: a checkpoint takes {needed / 1e6:,.1f} MB "
                f"and {free / 1e6:,.1f} MB are free; free some space and run the same command "
                "again, which goes on from the newest checkpoint"
            )

    @contextlib.contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        """Turns what TensorStore says of a full disk into the OSError that it is."""
        try:
            yield
        except Exception as error:
            if os.strerror(errno.ENOSPC) in str(error):
                code = errno.ENOSPC
                raise OSError(code, os.strerror(code), self._model_dir) from error
            raise


class _Kept(PreservationPolicy):
    """Tells Orbax which checkpoints stay."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return self._checkpoints.kept([info.step for info in checkpoints])
