"""The training loop, read from top to bottom."""

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.checkpoint import Checkpoints
from trainer.config import CheckpointConfig, Config, save_config
from trainer.engine import guard, processes
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.guard import Guard
from trainer.engine.hardware import peak_flops
from trainer.engine.program import Program
from trainer.engine.step import Metrics, TrainState, put_batch
from trainer.evaluate import Evaluator
from trainer.init_from import start
from trainer.optim.optimizer import learning_rate_schedule
from trainer.reporting.metrics import MetricsWriter, means
from trainer.setup import Run

# What SIGTERM ends with, once the state is saved: EX_TEMPFAIL, "run the same command again".
EXIT_PREEMPTED = 75


class StopRequest:
    """Becomes true at SIGTERM, which is how clouds and job queues announce a preemption.

    Of several processes JAX hears it, for all of them.
    """

    def __init__(self) -> None:
        self.received = False
        self._alone = jax.process_count() == 1

    def after(self, step: int) -> bool:
        """Whether the run stops after `step`; every process has to ask."""
        return processes.stop_agreed(step, self.received)

    def __enter__(self) -> "StopRequest":
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._alone:
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
      UserError: the run in model_dir has other settings, or an update must not be made.
    """
    config, last = run.config, run.config.train_steps
    checkpoints = Checkpoints(config.model_dir, config.checkpoint)
    first = checkpoints.steps()[-1] if checkpoints.steps() else 0
    if first:
        checkpoints.check_resumable(first, run)
    if first >= last:
        print(f"training is finished: checkpoint of step {first} in {config.model_dir}")
        checkpoints.close()
        return 0
    begin_with = start(run) if config.init_from and not first else None
    resumed, first = bool(first), begin_with.step if begin_with else first
    writer = MetricsWriter(config, first, processes.is_first())
    if processes.is_first():
        save_config(config, origins)
        _save_versions(config.model_dir)

    program = Program(run)
    if processes.is_first():
        origin = f"goes on from checkpoint {first}" if resumed else "starts from initial parameters"
        origin = begin_with.describe() if begin_with else origin
        print(consequences(run, program, first, origin), flush=True)
    if resumed:
        state = checkpoints.restore(first, program.abstract_state())
    else:
        state = begin_with.train_state(program) if begin_with else program.initial_state()
    batches = run.data.training(first, *program.host_part)
    evaluator = (
        Evaluator(run, "validation", program.evaluation_step, program.mesh)
        if config.evaluation.every_steps
        else None
    )
    learning_rate = learning_rate_schedule(config.optimizer)
    speed = Speed.of(run)

    def report(taken: Taken) -> str:
        _stop_if_refused(taken, state, run, checkpoints, writer)
        values = means(taken.metrics)
        skipped = int(taken.guard.skipped)
        if skipped and not float(taken.metrics["loss"][1]):
            raise UserError(
                f"--on_nan=skip left out every update since the last metrics, up to {taken.step}; "
                f"the newest checkpoint in {config.model_dir} is from before, and --on_nan=stop "
                "says why"
            )
        if config.on_nan == "skip":
            values["skipped_updates"] = skipped
        # Updates left out do not move the schedule.
        values["learning_rate"] = float(learning_rate(max(0, taken.step - 1 - skipped)))
        rates = speed.since_last(taken.step)
        writer.write(taken.step, "train", values, rates)
        return "  ".join([f"loss {values['loss']:.3f}", *_shown(rates)])

    note, stopping = "", False
    pending = None
    with (
        StopRequest() as stop,
        Profile(config) as profile,
        progress.shown("training", last, first) as bar,
    ):
        for step in range(first + 1, last + 1):
            profile.before(step)
            batch = put_batch(next(batches), program.mesh, config.batch_size)
            state = program.train_step(state, batch)
            profile.after(step, state)
            # Metrics are read one step late, when the device already works on the next step.
            if pending:
                note, pending = report(pending), None
            if due(step, config.metrics.every_steps, last):
                pending = Taken(step, state.metrics, jax.tree.map(jnp.copy, state.guard))
                state = dataclasses.replace(state, metrics=program.zero_metrics())
            evaluating = evaluator and due(step, config.evaluation.every_steps, last)
            stopping = stop.after(step)
            saving = due(step, config.checkpoint.every_steps, last) or stopping or step == last
            if evaluating or saving:
                if pending:
                    note, pending = report(pending), None
                _stop_if_refused(
                    Taken(step, state.metrics, state.guard), state, run, checkpoints, writer
                )
            if evaluating and evaluator:
                for split, result in evaluator(state.params).items():
                    writer.write(step, split, result)
                    print(
                        f"step {step}: {note.split('  ')[0]}, {split} loss {result['loss']:.3f} "
                        f"(unigram {result['unigram_entropy']:.3f})",
                        flush=True,
                    )
                    if split == "validation":
                        saving |= checkpoints.improved(step, result)
                speed.restart(step)
            if saving:
                begin = time.monotonic()
                writer.flush()
                checkpoints.save(step, state, run)
                speed.blocked += time.monotonic() - begin
            bar.update(step, note)
            if stopping:
                break
    checkpoints.close()
    writer.close()
    if stopping and step < last:
        print(f"SIGTERM: saved step {step}; run the same command to go on", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


class Taken(NamedTuple):
    """What is taken out of the state after `step`, to be read later."""

    step: int
    metrics: Metrics
    guard: Guard


def _stop_if_refused(
    taken: Taken, state: TrainState, run: Run, checkpoints: Checkpoints, writer: MetricsWriter
) -> None:
    """Ends the run where an update must not be made; `taken` are metrics that `state` lacks.

    Raises:
      UserError: the next update must not be made; the state before it is saved.
    """
    config = run.config
    if int(taken.guard.cause) != guard.NONE:
        held = dataclasses.replace(state, metrics=taken.metrics, guard=guard.released(taken.guard))
        step = int(held.step)
        if step and step not in checkpoints.steps():
            writer.flush()
            checkpoints.save(step, held, run)
        checkpoints.close()
        why = guard.explained(taken.guard, held.params, config.spike_factor)
        there = f"checkpoint_{step} in {config.model_dir} is" if step else "nothing is saved of"
        raise UserError(
            f"update {step + 1} was not made: {why}; {there} the state before it. Lower "
            "--optimizer.learning_rate, train in float32, or leave such updates out with "
            "--on_nan=skip"
        )


@dataclasses.dataclass
class Speed:
    """How fast it goes since the last report; compilation and evaluation not counted.

    `peak_flops` is that of all devices, None if nobody knows. `blocked` adds up the seconds that
    training stood still for checkpoints.
    """

    tokens_per_step: int
    flops_per_step: int
    peak_flops: float | None
    blocked: float = 0.0
    _time: float | None = None
    _step: int = 0

    @classmethod
    def of(cls, run: Run) -> "Speed":
        """Of a run on all devices there are."""
        lengths = run.converter.encoder_length, run.converter.decoder_length
        peak = peak_flops(jax.devices()[0].device_kind)
        return cls(
            run.config.batch_size * sum(lengths),
            flops_per_step(run.config.model, run.config.batch_size, *lengths),
            peak and peak * jax.device_count(),
        )

    def restart(self, step: int) -> None:
        """Begins to count at `step`."""
        self._time, self._step = time.monotonic(), step

    def since_last(self, step: int) -> dict[str, float]:
        """Returns the rates since the last call, nothing at the first: `steps_per_second`,
        `tokens_per_second` (positions, of both sides), `mfu`, the share of the peak that
        `cost.flops_per_step` takes, and `checkpoint_blocking_seconds` if a checkpoint was begun.
        """
        blocked, self.blocked = self.blocked, 0.0
        rates = {"checkpoint_blocking_seconds": blocked} if blocked else {}
        before, self._time = self._time, time.monotonic()
        steps, self._step = step - self._step, step
        if before is None or not steps:
            return rates
        rate = steps / (self._time - before)
        rates |= {"steps_per_second": rate, "tokens_per_second": rate * self.tokens_per_step}
        if self.peak_flops:
            rates["mfu"] = rate * self.flops_per_step / self.peak_flops
        return rates


def _shown(rates: dict[str, float]) -> list[str]:
    """The rates that a progress bar shows."""
    shown = []
    if "tokens_per_second" in rates:
        shown.append(f"{rates['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in rates:
        shown.append(f"MFU {rates['mfu']:.1%}")
    return shown


class Profile:
    """Traces the updates `config.profile_steps` into `model_dir/profile`, for XProf and Perfetto.

    Raises:
      UserError: at construction, if model_dir is remote, where the profiler cannot write.
    """

    def __init__(self, config: Config):
        self._updates = config.profiled
        self._folder = files.join(config.model_dir, "profile")
        self._tracing = False
        if self._updates and files.is_remote(config.model_dir):
            raise UserError("--profile_steps writes to a local --model_dir only")

    def before(self, step: int) -> None:
        """Begins at the first of the updates."""
        if not self._tracing and step in self._updates:
            jax.profiler.start_trace(files.local_path(self._folder), create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """Ends when the last one is done."""
        if self._tracing and step == self._updates[-1]:
            jax.block_until_ready(state)
            self._end()

    def _end(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._tracing:
            self._end()


def consequences(run: Run, program: Program, first_step: int, beginning: str) -> str:
    """What the configuration means, in a few lines, before the first step; `beginning` says with
    what the run begins."""
    config = run.config
    lengths = run.converter.encoder_length, run.converter.decoder_length
    flops = flops_per_step(config.model, config.batch_size, *lengths)
    lines = [
        *run.data.consequences(first_step, *program.host_part),
        (
            "model",
            f"{config.preset}: {parameter_count(config.model):,} parameters, "
            f"{flops / 1e9:,.1f} GFLOP a step, {config.model.dtype}",
        ),
        program.describe(),
        (
            "this run",
            f"{beginning}, to step {config.train_steps}; {_saving(config.checkpoint)}; killed at "
            "any moment, the same command goes on from the newest with the same bits",
        ),
        ("", _refusing(config)),
    ]
    return "\n".join(f"{subject:<13} {text}" for subject, text in lines)


def _saving(policy: CheckpointConfig) -> str:
    every = f"every {policy.every_steps} steps" if policy.every_steps else "at the end"
    kept = []
    if policy.keep:
        kept.append(f"the newest {policy.keep}")
    if policy.keep and policy.keep_every_steps:
        kept.append(f"those of each {policy.keep_every_steps} steps")
    if policy.keep and policy.best_metric:
        kept.append(f"the one of the best {policy.best_metric}")
    return f"a checkpoint {every}, kept are {' and '.join(kept) or 'all'}"


def _refusing(config: Config) -> str:
    what = "an update that is not finite"
    if config.spike_factor:
        what += f" or whose loss is above {config.spike_factor:g} times the mean"
    if config.on_nan == "skip":
        return f"{what} is left out and counted"
    return f"{what} is not made: the run stops and saves the state before it"


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
