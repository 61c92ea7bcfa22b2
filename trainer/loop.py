"""The training loop, read from top to bottom."""

import dataclasses
import math
import os
import platform
import signal
import subprocess
import sys
import time
from typing import Any

import jax

from tasks import files, progress
from tasks.command_line import UserError
from trainer import config as configuration
from trainer.checkpoint import Checkpoints
from trainer.cost import flops_per_step, parameter_count
from trainer.evaluate import Evaluator
from trainer.metrics import MetricsWriter, means
from trainer.optimizer import learning_rate_schedule
from trainer.program import Program
from trainer.setup import Run
from trainer.step import put_batch

# What SIGTERM ends with, once the state is saved: EX_TEMPFAIL, "run the same command again".
EXIT_PREEMPTED = 75


class StopRequest:
    """Becomes true at SIGTERM, which is how clouds and job queues announce a preemption."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "StopRequest":
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, *_: Any) -> None:
        self.received = True


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps is done after `step`; 0 is never."""
    return bool(every) and (step % every == 0 or step == last)


def train(run: Run, origins: dict[str, str]) -> int:
    """Trains to `config.train_steps`, from the newest checkpoint if there is one.

    Returns:
      The exit code: 0 when finished, EXIT_PREEMPTED when SIGTERM came and the state is saved.

    Raises:
      UserError: the run in model_dir has other settings, or the loss is not a number.
    """
    config, last = run.config, run.config.train_steps
    checkpoints = Checkpoints(config.model_dir, config.checkpoint.keep)
    first = checkpoints.steps()[-1] if checkpoints.steps() else 0
    if first:
        checkpoints.check_resumable(first, run)
    if first >= last:
        print(f"training is finished: checkpoint of step {first} in {config.model_dir}")
        checkpoints.close()
        return 0
    configuration.save(config, origins)
    _save_versions(config.model_dir)

    program = Program(run)
    print(consequences(run, len(jax.devices()), first), flush=True)
    state = (
        checkpoints.restore(first, program.abstract_state()) if first else program.initial_state()
    )
    batches = run.data.training(first)
    evaluator = (
        Evaluator(run, "validation", program.evaluation_step, program.mesh)
        if config.evaluation.every_steps
        else None
    )
    learning_rate = learning_rate_schedule(config.optimizer)
    writer = MetricsWriter(config.model_dir, first, config.metrics.tensorboard)
    speed = Speed(config.batch_size * _positions(run))

    def finite(step: int, metrics: Any) -> dict[str, float]:
        values = means(metrics)
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"the loss is {values['loss']} in the steps up to {step}; the newest checkpoint "
                f"in {config.model_dir} is from before. Lower --optimizer.learning_rate, or train "
                "in float32"
            )
        return values

    def report(step: int, metrics: Any) -> str:
        values = finite(step, metrics)
        values["learning_rate"] = float(learning_rate(step - 1))
        writer.write(step, "train", values, speed.since_last(step))
        return f"loss {values['loss']:.3f}"

    note = ""
    pending = None
    with StopRequest() as stop, progress.shown("training", last, first) as bar:
        for step in range(first + 1, last + 1):
            state = program.train_step(state, put_batch(next(batches), program.mesh))
            # Metrics are read one step late, when the device already works on the next step.
            if pending:
                note, pending = report(*pending), None
            if due(step, config.metrics.every_steps, last):
                pending, state = (
                    (step, state.metrics),
                    dataclasses.replace(state, metrics=program.zero_metrics()),
                )
            evaluating = evaluator and due(step, config.evaluation.every_steps, last)
            saving = due(step, config.checkpoint.every_steps, last) or stop.received or step == last
            if pending and (evaluating or saving):
                note, pending = report(*pending), None
            if evaluating and evaluator:
                for split, result in evaluator(state.params).items():
                    writer.write(step, split, result)
                    print(
                        f"step {step}: {note}, {split} loss {result['loss']:.3f} "
                        f"(unigram {result['unigram_entropy']:.3f})",
                        flush=True,
                    )
                speed.restart(step)
            if saving:
                finite(step, state.metrics)
                checkpoints.save(step, state, run)
            bar.update(step, note)
            if stop.received:
                break
    checkpoints.close()
    writer.close()
    if stop.received and step < last:
        print(f"SIGTERM: saved step {step}; run the same command to go on", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


@dataclasses.dataclass
class Speed:
    """Steps and tokens a second since the last report; compilation and evaluation not counted."""

    tokens_per_step: int
    _time: float | None = None
    _step: int = 0

    def restart(self, step: int) -> None:
        """Begins to count at `step`."""
        self._time, self._step = time.monotonic(), step

    def since_last(self, step: int) -> dict[str, float]:
        """Returns the rates since the last call, nothing at the first."""
        before, self._time = self._time, time.monotonic()
        steps, self._step = step - self._step, step
        if before is None or not steps:
            return {}
        rate = steps / (self._time - before)
        return {"steps_per_second": rate, "tokens_per_second": rate * self.tokens_per_step}


def _positions(run: Run) -> int:
    return run.converter.encoder_length + run.converter.decoder_length


def consequences(run: Run, devices: int, first_step: int) -> str:
    """What the configuration means, in a few lines, before the first step."""
    config = run.config
    lengths = run.converter.encoder_length, run.converter.decoder_length
    flops = flops_per_step(config.model, config.batch_size, *lengths)
    restart = (
        f"goes on from checkpoint {first_step}" if first_step else "starts from initial parameters"
    )
    lines = [
        *run.data.consequences(),
        (
            "model",
            f"{config.preset}: {parameter_count(config.model):,} parameters, "
            f"{flops / 1e9:,.1f} GFLOP a step, {config.model.dtype} on {devices} "
            f"{jax.devices()[0].platform} device(s)",
        ),
        (
            "this run",
            f"{restart}, to step {config.train_steps}; a checkpoint every "
            f"{config.checkpoint.every_steps} steps; killed at any moment, the same command "
            "goes on from the newest with the same bits",
        ),
    ]
    return "\n".join(f"{subject:<13} {text}" for subject, text in lines)


def _save_versions(model_dir: str) -> None:
    from importlib.metadata import version

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "palimpsest")
    software = {"python": platform.python_version(), **{name: version(name) for name in names}}
    files.write_json(
        files.join(model_dir, "software.json"), {"commit": _commit(), "versions": software}
    )


def _commit() -> str | None:
    """The project's git commit, if it runs from a clone and git is there."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(root, ".git")):
        return None
    command = ["git", "-C", root, "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
