"""Checkpoints with Orbax: `model_dir/checkpoint_STEP`, written asynchronously and atomically.

`state` holds the step (also the position in the data), parameters, optimizer state and unwritten
metrics. `run` holds the array checksums, compared on every read, and what resumed runs are checked
against: configuration, cache fingerprints, SHA-256 of the vocabulary and best checkpoint so far.
"""

import contextlib
import itertools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext

from tasks import annexes
from tasks.storage import files, seal
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata, remote
from trainer.checkpoints.early_stopping import Watch
from trainer.checkpoints.metadata import CHECKSUMS, STEP
from trainer.config import (
    CheckpointConfig,
    Config,
    as_stored,
    config_changes,
    resuming,
    stored_config,
)
from trainer.config.stored import refuse_average
from trainer.data import task_record
from trainer.data.run import Run
from trainer.engine import checksums, guard, processes
from trainer.engine.damage import Damaged
from trainer.engine.step import TrainState
from trainer.model.paths import named
from trainer.monitoring import activity
from trainer.optim.plateau import set_rate_scale

_PREFIX = "checkpoint"
# First words of errors from reads that were abandoned because another read had failed.
_LATE_READS = ("Event loop is closed", "Encountered error while reading array")
# Parts of errors that do not mean damage: unreachable store, no memory or file descriptors left.
_NOT_DAMAGE = (
    *("UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "DEADLINE_EXCEEDED", "ABORTED"),
    *("RESOURCE_EXHAUSTED", "CANCELLED", "Permission denied", "Too many open files"),
)


class Checkpoints:
    """The checkpoints of one model directory, local or remote.

    If `policy` is None, all are kept. `watch` follows the run's evaluations; checkpoints store its
    state. `evaluated` is False if `check_resumable` found a run that stopped before evaluating.
    `history` lists rewinds, branches and changes of settings (`trainer.config.resuming.resumed`).
    """

    def __init__(
        self,
        model_dir: str,
        policy: CheckpointConfig | None = None,
        writable: bool = True,
        watch: Watch | None = None,
    ):
        self._model_dir = model_dir
        self._policy = policy or CheckpointConfig(keep=None)
        self.watch = watch or Watch(self._policy)
        self.evaluated = True
        self.metrics_digest: str | None = None
        self.history: list[Mapping[str, Any]] = []
        _silence()
        if files.is_remote(model_dir):
            remote.prepare(model_dir)
        self._manager = ocp.CheckpointManager(
            _orbax_path(model_dir),
            options=ocp.CheckpointManagerOptions(
                step_prefix=_PREFIX,
                preservation_policy=self,
                create=writable,
                read_only=not writable,
                cleanup_tmp_directories=writable,
            ),
        )

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        """Returns whether to keep each of the ascending steps, as Orbax's PreservationPolicy."""
        keep, every, best = self._policy.keep, self._policy.keep_every_steps, self.watch.best
        return [
            keep is None
            or number >= len(checkpoints) - keep
            or bool(every and each.step % every == 0)
            or bool(best and each.step == best.step)
            for number, each in enumerate(checkpoints)
        ]

    def save(
        self,
        step: int,
        state: TrainState,
        run: Run,
        evaluated: bool = True,
        metrics_digest: str | None = None,
    ) -> None:
        """Starts writing a checkpoint; returns as soon as the state may be changed.

        `evaluated` is False if this step is still to be evaluated; `metrics_digest` is the SHA-256
        from `MetricsWriter.digest`. Raises a UserError, and saves nothing, if the state is not
        finite.
        """
        if lost := guard.nonfinite(state):
            steps = self.steps()
            newest = f"; the newest checkpoint is checkpoint_{steps[-1]}" if steps else ""
            raise UserError(
                f"{lost} is not finite after update {step}, which is not saved in "
                f"{self._model_dir}{newest}: lower --optimizer.learning_rate, raise an "
                "--optimizer.epsilon of 0, or train in float32"
            )
        with self._saving(f"{_PREFIX}_{step}"):
            self._write(step, state, run, evaluated, metrics_digest)
        activity.tell(activity.SAVED, step=step)

    def _write(
        self, step: int, state: TrainState, run: Run, evaluated: bool, metrics_digest: str | None
    ) -> None:
        self._check_room(state)
        # `watch` tells how far the rate has dropped, also by an evaluation that is still owed.
        state = set_rate_scale(state, 1.0)
        of_run = {
            "config": as_stored(run.config),
            "cache_fingerprints": run.data.fingerprints,
            "vocabulary_sha256": run.data.vocabulary_sha256,
            **self.watch.record(),
            "evaluated": evaluated,
            "metrics_sha256": metrics_digest,
            STEP: step,
            CHECKSUMS: checksums.of_state(state),
            **run.data.record,
            **self.record,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave(seal.sealed(of_run)),
            ),
        )

    @property
    def record(self) -> dict[str, Any]:
        """The history as an entry of a run's record; {} if nothing has changed."""
        return {"history": self.history} if self.history else {}

    def record_evaluation(self, step: int) -> None:
        """Records in the checkpoint at `step` that it has been evaluated."""
        if processes.is_first():
            metadata.update(self.path(step), evaluated=True, **self.watch.record())

    def path(self, step: int) -> str:
        """Returns the folder of the checkpoint at `step`."""
        return files.join(self._model_dir, f"{_PREFIX}_{step}")

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state at `step` with the shapes, dtypes and shardings of `abstract`.

        All processes must call this together; if one fails, all raise its error.

        Raises:
          Damaged: the checkpoint cannot be read, or an array's checksum does not match.
          UserError: the checkpoint holds different arrays, or its store cannot be reached.
        """
        with activity.doing(activity.STARTING, f"restoring {_PREFIX}_{step}"):
            return self._restored(self.path(step), abstract)

    def _restored(self, path: str, abstract: TrainState) -> TrainState:
        with processes.failing_together():
            stored = metadata.read(path)[CHECKSUMS]
            _check_arrays(path, stored, abstract)
            state = _read(path, abstract)
        metadata.compare(path, stored, checksums.of_state(state))
        if lost := guard.nonfinite(state):
            raise Damaged(path, f"{lost} is not finite")
        return state

    def check_resumable(self, step: int, run: Run) -> Config:
        """Restores the watch; returns the configuration of the run that wrote the checkpoint.

        Raises Damaged, or a UserError that names changes since that run.
        """
        path = self.path(step)
        with processes.failing_together():
            if _is_foreign(path):
                raise UserError(
                    f"the checkpoints in {self._model_dir} were not written by this trainer: start "
                    f"with --init_from={self._model_dir} in another --model_dir"
                    f"{annexes.advice('foreign_checkpoints')}"
                )
            stored = metadata.read(path)
        refuse_average(stored["config"], self._model_dir)
        before = stored_config(stored["config"], self._model_dir)
        differences = config_changes(before, run.config, step)
        read = before.data.skips.batch(step)
        differences += task_record.changes(stored, run.data.record, read)
        now = run.data.fingerprints
        differences += [
            f"the cache of {task} has changed"
            for task, fingerprint in stored["cache_fingerprints"].items()
            if now.get(task, fingerprint) != fingerprint
        ]
        vocabulary = stored.get("vocabulary_sha256")
        if vocabulary and vocabulary != run.data.vocabulary_sha256:
            differences.append("the vocabulary has changed")
        if differences:
            raise UserError(
                f"{self._model_dir} holds a run with different settings ({'; '.join(differences)})"
                ": use the same settings or another --model_dir"
            )
        self.evaluated = stored["evaluated"]
        self.metrics_digest = stored.get("metrics_sha256")
        self.recall(step, stored, before, run.config)
        return before

    def recall(self, step: int, stored: Mapping[str, Any], before: Config, now: Config) -> None:
        """Restores watch and history from the description of the checkpoint that goes on."""
        self.history = resuming.resumed(stored.get("history", ()), step, before, now)
        self.watch.recall(stored)

    def newest_sound(self, before: int, run: Run, abstract: TrainState) -> int | None:
        """Returns the step of the newest undamaged checkpoint older than `before`, or None."""
        for step in reversed([step for step in self.steps() if step < before]):
            try:
                self.check_resumable(step, run)
                self.restore(step, abstract)
            except Damaged:
                continue
            return step
        return None

    def set_aside(self, after: int, why: str = "damaged") -> list[str]:
        """Renames checkpoints newer than step `after` to WHY_checkpoint_STEP; a collective call.

        Returns the new names, newest first.
        """
        moved = []
        with processes.failing_together():
            for step in reversed([step for step in self.steps() if step > after]):
                name = _free_name(self._model_dir, f"{why}_{_PREFIX}_{step}")
                moved.append(name)
                if processes.is_first():
                    files.rename_folder(self.path(step), files.join(self._model_dir, name))
        self._manager.reload()
        return moved

    def close(self) -> None:
        """Waits until all started checkpoints are written, and frees resources."""
        with self._saving("the checkpoints begun"):
            self._manager.close()

    @contextlib.contextmanager
    def _saving(self, what: str) -> Iterator[None]:
        try:
            doing = activity.doing(activity.SAVING, f"saving {what}")
            with doing, files.naming_full_disk(self._model_dir):
                yield
        except Exception as error:
            activity.tell(activity.CHECKPOINT_FAILED, f"{what}: {error}")
            raise

    def _check_room(self, state: TrainState) -> None:
        """Rejects a checkpoint larger than the free disk space; TensorStore would print pages."""
        if files.is_remote(self._model_dir) or not processes.is_first():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(files.local_path(self._model_dir)).free
        if free < needed:
            raise UserError(
                f"{self._model_dir}: the disk is full; a checkpoint needs {needed / 1e6:,.1f} MB, "
                f"but only {free / 1e6:,.1f} MB are free: free some space and run the same command "
                "again to resume from the newest checkpoint"
            )


def _read(path: str, abstract: TrainState) -> TrainState:
    """Reads the arrays of a checkpoint; raises Damaged, or UserError for an unreachable store.

    Calls Orbax's handler without its checkpointer, in which the other processes would wait for a
    process that has failed.
    """
    listed = metadata.array_names(path)
    for name in named(abstract):
        if name not in listed:
            raise Damaged(path, f"state/_METADATA does not list {name}")
    folder = epath.Path(_orbax_path(path)) / "state"
    try:
        return ocp.StandardCheckpointHandler().restore(
            folder, args=ocp.args.StandardRestore(abstract)
        )
    except Exception as error:  # Orbax and TensorStore raise many kinds, even plain Exception.
        causes = [error, *filter(None, (error.__cause__, error.__context__))]
        text = " ".join(" ".join(map(str, causes)).split())
        passing = isinstance(error, PermissionError | MemoryError | ConnectionError | TimeoutError)
        if passing or any(part in text for part in _NOT_DAMAGE):
            raise UserError(f"checkpoint {path} cannot be read now: {text[:300]}") from error
        raise Damaged(path, _reason(path, text)) from error


def _reason(path: str, text: str) -> str:
    """Names the array and the file in a TensorStore error."""
    array = re.search(r"""["']([\w.]+)/(?:\.zarray|zarr\.json|[\d.]+)?["']""", text)
    below = re.escape(f"{files.local_path(path).rstrip('/')}/")
    file = re.search(rf"""{below}([\w./-]*\w)["']""", text)
    said = [array[1].replace(".", "/")] if array else []
    said += [f"file {file[1]}"] if file else []
    # All other files have been checked before.
    return f"{' in '.join(said) or 'state/array_metadatas or state/_sharding'} cannot be read"


def _silence() -> None:
    """Silences the tracebacks of Orbax's threads and asyncio, whose errors are also raised."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    sys.unraisablehook = _without_late_reads


def _without_late_reads(unraisable: Any) -> None:
    """Prints an unraisable error, unless it comes from a read that Orbax abandoned."""
    if not str(unraisable.exc_value).startswith(_LATE_READS):
        sys.__unraisablehook__(unraisable)


def _orbax_path(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(files.local_path(path))


def _check_arrays(path: str, stored: dict[str, str], abstract: TrainState) -> None:
    wanted = {name: checksums.kind_of(leaf) for name, leaf in named(abstract).items()}
    kept = {name: checksums.kind(checksum) for name, checksum in stored.items()}
    for name in [*wanted, *kept]:
        if wanted.get(name) != kept.get(name):
            raise UserError(
                f"checkpoint {path} holds a different model or optimizer: it has "
                f"{kept.get(name, 'no')} {name}, this run has {wanted.get(name, 'none')}"
            )


def _is_foreign(path: str) -> bool:
    """Returns whether another program wrote the checkpoint."""
    if files.exists(files.join(path, "run")):
        return False
    # T5X's own format has this file; its Orbax format names arrays differently.
    return files.exists(files.join(path, "checkpoint")) or not any(
        name.startswith("params/") for name in metadata.array_names(path)
    )


def _free_name(folder: str, name: str) -> str:
    taken = files.list_names(folder)
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def chosen_steps(text: str, steps: list[int], model_dir: str) -> list[int]:
    """Returns the steps selected by "all", "latest" or "1000,2000"; raises UserError if missing."""
    if not steps:
        raise UserError(f"{model_dir} has no checkpoint yet: train with trainer.pretrain")
    if text in ("all", "latest"):
        return steps if text == "all" else steps[-1:]
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
