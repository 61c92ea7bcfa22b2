"""The training loop."""

from __future__ import annotations

import signal
import sys
from typing import Any

import jax

from tasks.terminal import progress
from trainer.beginning import resume_or_start
from trainer.checkpoint import Checkpoints
from trainer.config import save_config
from trainer.engine import processes
from trainer.engine.evaluator import Evaluator
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.reporting.metrics import MetricsWriter
from trainer.reporting.profile import Profile
from trainer.reporting.reports import Reports, due
from trainer.reporting.software import save_software
from trainer.reporting.startup import startup_text
from trainer.setup import Run

# Exit code after SIGTERM, once the state is saved: EX_TEMPFAIL, "run the same command again".
EXIT_PREEMPTED = 75


def train(run: Run, origins: dict[str, str]) -> int:
    """Trains up to `config.train_steps`, from the newest checkpoint if there is one.

    Args:
      run: what to train.
      origins: origin of each field of the configuration, saved with it.

    Returns:
      The exit code: 0 when finished, EXIT_PREEMPTED after SIGTERM with the state saved.

    Raises:
      UserError: the run in model_dir has other settings, or the guard rejected an update.
    """
    config, last = run.config, run.config.train_steps
    checkpoints = Checkpoints(config.model_dir, config.checkpoint)
    beginning = resume_or_start(run, checkpoints)
    if beginning.step >= last:
        print(f"training is finished: checkpoint of step {beginning.step} in {config.model_dir}")
        checkpoints.close()
        return 0
    writer = MetricsWriter(config, beginning.step, processes.is_first())
    if processes.is_first():
        save_config(config, origins, run.data.record)
        save_software(config.model_dir)

    program = Program(run)
    if processes.is_first():
        print(startup_text(run, program, beginning), flush=True)
    state = beginning.state(program)
    batches = run.data.training(beginning.step, *program.host_part)
    evaluator = None
    if config.evaluation.every_steps:
        evaluator = Evaluator(run, "validation", program.evaluation_step, program.mesh)
    reports = Reports(run, program, checkpoints, writer)

    with (
        _StopRequest() as stop,
        Profile(config) as profile,
        progress.shown("training", last, beginning.step) as bar,
    ):
        for step in range(beginning.step + 1, last + 1):
            profile.before(step)
            batch = put_batch(next(batches), program.mesh, config.batch_size)
            state = program.train_step(state, batch)
            profile.after(step, state)
            state = reports.after(step, state)
            stopping = stop.after(step)
            evaluating = due(step, config.evaluation.every_steps, last)
            saving = stopping or step == last or due(step, config.checkpoint.every_steps, last)
            if evaluating or saving:
                reports.settle(step, state)
            if evaluator and evaluating:
                results = evaluator(state.params)
                for split, result in results.items():
                    reports.evaluation(step, split, result)
                saving |= checkpoints.improved(step, results["validation"])
                reports.speed.restart(step)
            if saving:
                with reports.speed.blocking():
                    # First the metrics: a checkpoint says that those of its steps are written.
                    writer.flush()
                    checkpoints.save(step, state, run)
            bar.update(step, reports.note)
            if stopping:
                break
    checkpoints.close()
    writer.close()
    if stopping and step < last:
        print(f"SIGTERM: saved step {step}; run the same command to resume", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


class _StopRequest:
    """Records SIGTERM, with which clouds and job queues announce a preemption.

    With several processes, JAX handles the signal and makes all of them stop.
    """

    def __init__(self) -> None:
        self._received = False
        self._alone = jax.process_count() == 1

    def after(self, step: int) -> bool:
        """Returns whether the run stops after `step`; every process must ask at every step."""
        return processes.stop_agreed(step, self._received)

    def __enter__(self) -> _StopRequest:
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, *_: Any) -> None:
        self._received = True
