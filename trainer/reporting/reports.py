"""Reports during training, which read metrics one step late and end a run at a bad update."""

import dataclasses
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tasks.terminal.command_line import UserError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.data.run import Run, Waiting
from trainer.engine import guard
from trainer.engine.evaluator import TOKEN_METRICS
from trainer.engine.guard import Guard
from trainer.engine.hardware import peak_memory
from trainer.engine.metrics import Metrics, means
from trainer.engine.program import Program
from trainer.engine.step import Batch, TrainState
from trainer.monitoring import activity
from trainer.optim.optimizer import learning_rate_schedule
from trainer.reporting import numbers
from trainer.reporting.evaluations import evaluation_table, unigram_entropy
from trainer.reporting.metrics import NORMS, MetricsWriter
from trainer.reporting.speed import Speed, shown


def due(step: int, every: int, last: int) -> bool:
    """Returns whether an action repeated every `every` steps (0: never) is due after `step`."""
    return bool(every) and (step % every == 0 or step == last)


class _Pending(NamedTuple):
    """Metrics, norms and guard of the state after `step`; None for what is not due."""

    step: int
    metrics: Metrics | None
    guard: Guard
    norms: jax.Array | None = None
    early_loss: tuple[jax.Array, jax.Array] | None = None


class Reports:
    """Writes the metrics of a run, and stops the run when the guard rejects an update.

    Metrics are read one step late: the device is then busy with the next step and does not wait for
    the host. `note` is the last report in a few words, for a progress bar; before the first one,
    the mean loss of updates so far.
    """

    def __init__(
        self,
        run: Run,
        program: Program,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        waiting: Waiting,
    ):
        self._skipped: int | None = None
        self._run, self._program = run, program
        self._checkpoints, self._writer = checkpoints, writer
        self._learning_rate = learning_rate_schedule(run.config.optimizer)
        self._pending: _Pending | None = None
        self._norms: jax.Array | None = None
        self.speed = Speed.of(run, waiting)
        self.note = self._loss = ""
        self._updates = 0

    def before(self, step: int, state: TrainState, batch: Batch) -> None:
        """Computes the norms of the next update, if they are due after `step`."""
        config = self._run.config
        if self._skipped is None:
            self._skipped = int(state.guard.skipped)
        if due(step, config.metrics.norms_every_steps, config.train_steps):
            # On CPUs, two programs that exchange data between processes must not run side by side:
            # each may hold threads that the other waits for.
            self._norms = jax.block_until_ready(self._program.norms(state, batch))

    def after(self, step: int, state: TrainState) -> TrainState:
        """Reports earlier metrics and takes this step's, if due; returns the state to go on with.

        The metrics taken are zero in that state. Raises UserError if the guard rejected an update,
        after saving the state before it.
        """
        self._report_pending(state)
        config = self._run.config
        metrics = None
        if due(step, config.metrics.every_steps, config.train_steps):
            metrics = state.metrics
            state = dataclasses.replace(state, metrics=self._program.zero_metrics())
        norms, self._norms = self._norms, None
        self._updates += 1
        # All hosts count alike, whatever their clocks say.
        early = not (self._loss or metrics) and self._updates.bit_count() == 1
        if metrics is not None or norms is not None or early:
            copied, loss = jax.tree.map(jnp.copy, (state.guard, state.metrics["loss"]))
            self._pending = _Pending(step, metrics, copied, norms, loss if early else None)
        return state

    def settle(self, step: int, state: TrainState) -> None:
        """Reports all metrics taken so far and checks the state after `step`, before it is used."""
        self._report_pending(state)
        self._stop_if_rejected(_Pending(step, state.metrics, state.guard), state)

    def evaluations(self, step: int, results: dict[str, dict[str, float]]) -> None:
        """Writes and prints the evaluation after `step`; a mixture's tasks share one table."""
        training = f"{self._loss}, " if self._loss else ""
        of_tasks: dict[str, dict[str, float]] = {}
        for split, result in results.items():
            self._writer.write(step, split, result)
            if "/" in split:
                of_tasks[split] = result
            else:
                print(f"step {step}: {training}{split} {_shown(result)}", flush=True)
        if of_tasks:
            print(textwrap.indent(evaluation_table({step: of_tasks}), "  "), flush=True)

    def _report_pending(self, state: TrainState) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._stop_if_rejected(pending, state)
        if pending.norms is not None:
            norms = self._program.norms.by_name(pending.norms)
            self._writer.write(pending.step, NORMS, norms)
        if pending.early_loss is not None:
            self.note = f"loss {means({'loss': pending.early_loss})['loss']:.3f}"
        if pending.metrics is not None:
            self._report_metrics(pending.step, pending.metrics, int(pending.guard.skipped))

    def _report_metrics(self, step: int, metrics: Metrics, skipped: int) -> None:
        config, values = self._run.config, means(metrics)
        if skipped > (before := self._skipped or 0):
            why = " or above --spike_factor" * (config.spike_factor is not None)
            message = f"{skipped - before} updates were not finite{why}, up to {step}"
            activity.tell(activity.SKIPPED, message, step)
            self._skipped = skipped
        if skipped and not float(metrics["loss"][1]):
            raise UserError(
                f"--on_nan=skip skipped every update since the last report, up to {step}; "
                f"the newest checkpoint in {config.model_dir} is from before them; use "
                "--on_nan=stop to see the cause"
            )
        if config.on_nan == "skip":
            values["skipped_updates"] = skipped
        # Skipped updates do not advance the schedule.
        rate = float(self._learning_rate(max(0, step - 1 - skipped)))
        # Read before the evaluation of this step, which may drop the rate.
        values["learning_rate"] = rate * self._checkpoints.watch.rate_scale
        rates = self.speed.since_last(step)
        self._writer.write(step, "train", values, {**rates, **peak_memory()})
        self._loss = numbers.shown(values["loss"], "loss {:.3f}")
        self.note = "  ".join([self._loss, *shown(rates)])

    def _stop_if_rejected(self, pending: _Pending, state: TrainState) -> None:
        """Ends the run if the guard rejected an update; `state` is then still the one before it."""
        if int(pending.guard.cause) == guard.NONE:
            return
        config, checkpoints = self._run.config, self._checkpoints
        metrics = state.metrics if pending.metrics is None else pending.metrics
        good = dataclasses.replace(state, metrics=metrics, guard=guard.cleared(pending.guard))
        step = int(good.step)
        if step and step not in checkpoints.steps():
            self._writer.flush()
            checkpoints.save(step, good, self._run, metrics_digest=self._writer.digest(step))
        checkpoints.close()
        learned = self._program.tuning.learned(good.params)
        cause = guard.explain(pending.guard, good.params, config.spike_factor, learned)
        saved = f"checkpoint_{step} in {config.model_dir} is" if step else "nothing is saved of"
        spike = int(pending.guard.cause) == guard.SPIKE
        kind = activity.SPIKE if spike else activity.NONFINITE
        activity.advanced(step)
        activity.tell(kind, f"update {step + 1} was rejected: {cause}")
        raise UserError(
            f"update {step + 1} was rejected: {cause}; {saved} the state before it. "
            f"{guard.advice(pending.guard, config)}"
        )


def _shown(result: dict[str, float]) -> str:
    shown = []
    if "loss" in result:
        loss = numbers.shown(result["loss"], "loss {:.3f}")
        entropy = unigram_entropy(result)
        shown = [loss if entropy is None else f"{loss} (unigram {entropy:.3f})"]
    others = ((name, value) for name, value in result.items() if name not in TOKEN_METRICS)
    shown += [f"{name} {numbers.shown(value, '{:.2f}')}" for name, value in others]
    return ", ".join(shown)
