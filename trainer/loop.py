"""The training loop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tasks.storage import files, lock
from tasks.terminal import progress
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.early_stopping import Watch, flattened
from trainer.config import save_config
from trainer.data.features import Batch
from trainer.engine import processes
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.engine.step import TrainState
from trainer.evaluating.evaluation import Evaluation, Results
from trainer.reporting.metrics import MetricsWriter
from trainer.reporting.profile import Profile
from trainer.reporting.reports import Reports, due
from trainer.reporting.software import save_software
from trainer.reporting.startup import startup_text
from trainer.setup import Run
from trainer.starting.resume import begin

# Exit code after SIGTERM, once the state is saved: EX_TEMPFAIL, "run the same command again".
EXIT_PREEMPTED = 75

# Causes of a stop, for messages.
_SIGTERM, _CTRL_C = "SIGTERM", "Ctrl-C"


def train(run: Run, origins: dict[str, str]) -> int:
    """Trains up to `config.train_steps`, from the newest checkpoint if there is one.

    Args:
      run: what to train.
      origins: origin of each field of the configuration, saved with it.

    Returns:
      The exit code: 0 when finished; with the state saved, EXIT_PREEMPTED after SIGTERM and
      EXIT_INTERRUPTED after Ctrl-C.

    Raises:
      UserError: another run is writing to model_dir, the run in it has other settings, or the
        guard rejected an update.
    """
    with _locked(run.config.model_dir) as check_lock:
        try:
            return _train(run, origins, check_lock)
        finally:
            run.data.close()


@contextlib.contextmanager
def _locked(model_dir: str) -> Iterator[Callable[[], None]]:
    """Locks model_dir for all processes of a run; yields a function that checks the lock."""
    if not processes.is_first():
        yield lambda: None
        return
    files.make_folder(model_dir)
    with lock.held(model_dir, "run", "--model_dir") as held:
        yield held.check


def _train(run: Run, origins: dict[str, str], check_lock: Callable[[], None]) -> int:
    config, last = run.config, run.config.train_steps
    processes.check_shared(config.model_dir)
    watch = Watch(config.checkpoint, config.stopping, config.plateau, config.task_module)
    checkpoints = Checkpoints(config.model_dir, config.checkpoint, watch=watch)
    program = Program(run)
    beginning, state = begin(run, checkpoints, program)
    if state is None:
        early = f", early: {watch.why_exhausted}" if watch.exhausted else ""
        print(
            f"training is finished{early}: checkpoint of step {beginning.step} in "
            f"{config.model_dir}"
        )
        checkpoints.close()
        return 0
    evaluated = checkpoints.evaluated or not config.evaluation.every_steps
    writer = MetricsWriter(config, beginning.step, processes.is_first(), evaluated)
    if processes.is_first():
        save_config(config, origins, run.data.record)
        changes = save_software(config.model_dir)
        print(startup_text(run, program, beginning, changes), flush=True)
    batches = run.data.training(beginning.step, *program.host_part)
    evaluator = None
    if config.evaluation.every_steps:
        evaluator = Evaluation(run, "validation", program)
    reports = Reports(run, program, checkpoints, writer)

    def save(step: int, state: TrainState, evaluated: bool = True) -> None:
        with reports.speed.blocking():
            # First the metrics: a checkpoint says that those of its steps are written.
            writer.flush()
            check_lock()
            checkpoints.save(step, state, run, evaluated)

    with (
        _StopRequest() as stop,
        Profile(config) as profile,
        progress.shown("training", last, beginning.step) as bar,
    ):
        step = begun = beginning.step
        stopping = False
        not_there: UserError | None = None
        if evaluator and not evaluated:
            # SIGTERM ended the run when it had saved this step and not evaluated it.
            results = evaluator(state.params, step, stop.asked)
            if results is None:
                stopping = True
            else:
                reports.evaluations(step, results)
                watch.see(step, flattened(results))
                state = program.with_rate_scale(state, watch.rate_scale)
                checkpoints.record_evaluation(step)
                evaluated = True
        for step in () if stopping or watch.exhausted else range(begun + 1, last + 1):
            rows = None
            with reports.speed.waiting():
                arrived, not_there = _wait(run, step - 1, stop)
            if arrived:
                with profile.update(step):
                    rows, not_there = _next(batches)
                    if rows is not None:
                        batch = put_batch(rows, program.mesh, config.batch_size)
                        reports.before(step, state, batch)
                        state = program.train_step(state, batch)
            if rows is None:
                step, stopping = step - 1, True
                if step not in (0, *checkpoints.steps()):
                    reports.settle(step, state)
                    save(step, state)
                break
            profile.after(step, state)
            state = reports.after(step, state)
            stopping = stop.asked()
            evaluating = due(step, config.evaluation.every_steps, last)
            saving = stopping or step == last or due(step, config.checkpoint.every_steps, last)
            if evaluating or saving:
                reports.settle(step, state)
            evaluated = True
            if evaluator and evaluating:
                # An evaluation may take longer than the time between SIGTERM and SIGKILL.
                results = None
                if not stopping:
                    results, not_there = _evaluate(evaluator, state, step, stop)
                if results is None:
                    evaluated, stopping, saving = False, True, True
                else:
                    reports.evaluations(step, results)
                    try:
                        saving |= watch.see(step, flattened(results)) or watch.exhausted
                    except UserError as error:
                        # No task has the metric: saved before the run ends, to lose no updates.
                        not_there, saving = error, True
                    state = program.with_rate_scale(state, watch.rate_scale)
                reports.speed.restart(step)
            if saving:
                save(step, state, evaluated)
            bar.update(step, reports.note)
            if not_there or stopping or watch.exhausted:
                break
    checkpoints.close()
    writer.close()
    if not_there:
        raise not_there
    if watch.exhausted and evaluated:
        print(f"stopped early at step {step}: {watch.why_exhausted}")
    elif stopping and (step < last or not evaluated):
        if not step:
            print(f"{stop.cause}: no update was made yet", file=sys.stderr)
            return EXIT_INTERRUPTED if stop.cause == _CTRL_C else EXIT_PREEMPTED
        print(f"{stop.cause}: saved step {step}; run the same command to resume", file=sys.stderr)
        return EXIT_INTERRUPTED if stop.cause == _CTRL_C else EXIT_PREEMPTED
    return 0


def _wait(run: Run, step: int, stop: _StopRequest) -> tuple[bool, UserError | None]:
    """Waits until the batch of a step can be made, where the run follows a build.

    Returns:
      (whether the run goes on, why it cannot).

    Raises:
      UserError: it cannot, and the other processes may not know that yet.
    """
    try:
        return run.data.wait(step, stop.received_alone), None
    except UserError as error:
        if jax.process_count() > 1:
            raise
        return False, error


def _next(batches: Iterator[Batch]) -> tuple[Batch | None, UserError | None]:
    """Returns the next batch, or why there is none, as where a shard is damaged.

    Raises:
      UserError: there is none, and the other processes do not know that.
    """
    try:
        return next(batches), None
    except UserError as error:
        if jax.process_count() > 1:
            raise
        return None, error


def _evaluate(
    evaluator: Evaluation, state: TrainState, step: int, stop: _StopRequest
) -> tuple[Results | None, UserError | None]:
    """Evaluates the state after a step; returns (results, None if there are none; why not).

    Raises:
      UserError: there are none, and the other processes do not know that.
    """
    try:
        return evaluator(state.params, step, stop.asked), None
    except UserError as error:
        if jax.process_count() > 1:
            raise
        return None, error


class _StopRequest:
    """Records SIGTERM, with which clouds and job queues announce a preemption, and Ctrl-C.

    A second Ctrl-C does what Ctrl-C did before. With several processes, JAX handles SIGTERM and
    makes all of them stop, and Ctrl-C ends them at once.

    Attributes:
      cause: what asked the run to stop.
    """

    def __init__(self) -> None:
        self.cause = _SIGTERM
        self._received = False
        self._alone = jax.process_count() == 1
        self._times = 0
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Returns whether the run stops now; all processes must ask at the same points."""
        self._times += 1
        return processes.stop_agreed(self._times, self._received)

    def received_alone(self) -> bool:
        """Returns whether this process is asked to stop, if it is the only one.

        Several wait as long as each must: they agree on a stop between updates only.
        """
        return self._alone and self._received

    def __enter__(self) -> _StopRequest:
        if self._alone:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)
            # A shell that starts a command with & lets it ignore Ctrl-C.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, *_: Any) -> None:
        self._received = True

    def _interrupted(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        self._received, self.cause = True, _CTRL_C
        os.write(2, b"\nCtrl-C: saving the state after this update; again: stop at once\n")
