"""The speed of training: rates, MFU and the time for which checkpoints block it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Self

import jax

from trainer.data.interface import Run, Waiting
from trainer.engine.cost import flops_per_step
from trainer.engine.hardware import peak_flops

# Waits shorter than this, in seconds, are ignored: checking for a batch takes time too.
_SHORTEST_WAIT = 0.05


@dataclasses.dataclass
class Speed:
    """Measures speed between reports, excluding compilation and evaluation.

    `tokens_per_step` counts encoder and decoder positions, and with `flops_per_step` belongs to a
    batch of the first size; `batches` says how many of these have the rows of the first updates.
    `peak_flops` is per second over all devices, None if unknown; `blocking` times the waits for
    checkpoints, `waiting` for caches.
    """

    tokens_per_step: int
    flops_per_step: int
    peak_flops: float | None
    blocking: Waiting = dataclasses.field(default_factory=Waiting)
    waiting: Waiting = dataclasses.field(default_factory=Waiting)
    batches: Callable[[int], float] = float
    _time: float | None = None
    _step: int = 0

    @classmethod
    def of(cls, run: Run, waiting: Waiting) -> Self:
        """Returns the speed of a run on all devices of all processes."""
        lengths = run.converter.encoder_length, run.converter.decoder_length
        peak = peak_flops(jax.devices()[0].device_kind)
        phases, size = run.config.phases, run.config.batch_size
        return cls(
            run.config.batch_size * sum(lengths),
            flops_per_step(run.config.model, run.config.batch_size, *lengths),
            peak and peak * jax.device_count(),
            waiting=waiting,
            batches=lambda updates: phases.read(updates) / size,
        )

    def restart(self, step: int) -> None:
        """Restarts the measurement at `step`; earlier time is not counted."""
        self._time, self._step = time.monotonic(), step

    def since_last(self, step: int) -> dict[str, float]:
        """Returns the rates since the last call or `restart`; the first call has none.

        `tokens_per_second` counts encoder and decoder positions, and `mfu` is the share of peak
        FLOPs (`cost.flops_per_step`). The rates include the time of `checkpoint_blocking_seconds`
        and `build_waiting_seconds`, which are present only after such waits.
        """
        blocked, self.blocking.seconds = self.blocking.seconds, 0.0
        rates = {"checkpoint_blocking_seconds": blocked} if blocked else {}
        waited, self.waiting.seconds = self.waiting.seconds, 0.0
        if waited > _SHORTEST_WAIT:
            rates["build_waiting_seconds"] = waited
        before, self._time = self._time, time.monotonic()
        steps, batches = step - self._step, self.batches(step) - self.batches(self._step)
        self._step = step
        if before is None or not steps:
            return rates
        rates["steps_per_second"] = steps / (self._time - before)
        rate = batches / (self._time - before)
        rates["tokens_per_second"] = rate * self.tokens_per_step
        if self.peak_flops:
            rates["mfu"] = rate * self.flops_per_step / self.peak_flops
        return rates


def shown(rates: dict[str, float]) -> list[str]:
    """Returns the rates to show on a progress bar."""
    forms = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}"}
    return [form.format(rates[name]) for name, form in forms.items() if name in rates]
