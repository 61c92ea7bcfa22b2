"""The speed of training: rates, MFU and the time for which checkpoints block it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Self

import jax

from trainer.config.phases import Phase
from trainer.data import features
from trainer.data.run import Run, Waiting
from trainer.engine.cost import flops_per_step
from trainer.engine.hardware import peak_flops

# Waits shorter than this, in seconds, are ignored: checking for a batch takes time too.
_SHORTEST_WAIT = 0.05


@dataclasses.dataclass
class Speed:
    """Measures speed between reports, excluding compilation and evaluation.

    `tokens` and `flops` are functions: encoder and decoder positions, and operations, of this many
    updates. `peak_flops` is per second over all devices, None if unknown; `blocking` times the
    waits for checkpoints, `waiting` for caches.
    """

    tokens: Callable[[int], int]
    flops: Callable[[int], int]
    peak_flops: float | None
    blocking: Waiting = dataclasses.field(default_factory=Waiting)
    waiting: Waiting = dataclasses.field(default_factory=Waiting)
    _time: float | None = None
    _step: int = 0

    @classmethod
    def of(cls, run: Run, waiting: Waiting) -> Self:
        """Returns the speed of a run on all devices of all processes."""
        peak = peak_flops(jax.devices()[0].device_kind)
        phases, model = run.config.phases, run.config.model

        def positions(phase: Phase) -> tuple[int, int]:
            own = features.converter(model, phase.lengths, run.converter.special)
            return own.encoder_length, own.decoder_length

        return cls(
            phases.weighted(lambda phase: phase.rows * sum(positions(phase))).read,
            phases.weighted(
                lambda phase: flops_per_step(model, phase.rows, *positions(phase))
            ).read,
            peak and peak * jax.device_count(),
            waiting=waiting,
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
        first, self._step = self._step, step
        if before is None or step == first:
            return rates
        seconds = self._time - before
        rates["steps_per_second"] = (step - first) / seconds
        rates["tokens_per_second"] = (self.tokens(step) - self.tokens(first)) / seconds
        if self.peak_flops:
            rates["mfu"] = (self.flops(step) - self.flops(first)) / seconds / self.peak_flops
        return rates


def shown(rates: dict[str, float]) -> list[str]:
    """Returns the rates to show on a progress bar."""
    forms = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}"}
    return [form.format(rates[name]) for name, form in forms.items() if name in rates]
