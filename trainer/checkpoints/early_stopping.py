"""Consequences of evaluations: the best checkpoint, early stopping, lower learning rates.

Checkpoints hold the state as JSON, in which Python writes floating-point numbers exactly; a resumed
run therefore makes the same decisions as an uninterrupted one.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tasks.metrics import metric as metrics
from tasks.terminal.command_line import UserError
from trainer.config import (
    BEST_METRICS,
    LOWER_IS_BETTER,
    CheckpointConfig,
    PlateauConfig,
    StoppingConfig,
)

_BEST = "--checkpoint.best_metric"
# split -> metric -> value.
Results = Mapping[str, Mapping[str, float]]


class Best(NamedTuple):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@dataclasses.dataclass
class _Patience:
    """Counts the evaluations since a metric last improved.

    `metric` is spelled as in the flag; None watches nothing. `stale` counts the evaluations since
    the best value, ignoring improvements below `min_delta`.
    """

    flag: str
    metric: str | None
    lower_is_better: bool
    min_delta: float
    best: float | None = None
    stale: int = 0

    def see(self, values: Mapping[str, float]) -> None:
        """Counts an evaluation."""
        if self.metric is None:
            return
        value = value_of(self.flag, self.metric, values)
        if _improves(self.lower_is_better, value, self.best, self.min_delta):
            self.best, self.stale = value, 0
        else:
            self.stale += 1

    def record(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self.best, "stale": self.stale}

    def recall(self, stored: Mapping[str, Any] | None) -> None:
        """Restores a checkpoint's state if it watched the same metric; otherwise resets it."""
        known = stored if stored and stored["metric"] == self.metric else {}
        self.best, self.stale = known.get("best"), known.get("stale", 0)


class Watch:
    """Follows the evaluations of a run.

    `task_module` is the user's module, whose metrics may state their direction.

    Attributes:
      best: the evaluation with the best `checkpoint.best_metric`; None before the first.
      rate_scale: product of the factors that have lowered the learning rate so far.
    """

    def __init__(
        self,
        checkpoint: CheckpointConfig,
        stopping: StoppingConfig | None = None,
        plateau: PlateauConfig | None = None,
        task_module: str | None = None,
    ):
        def patience(flag: str, config: StoppingConfig | PlateauConfig) -> _Patience:
            lower = lower_is_better(flag, config.metric, task_module)
            return _Patience(flag, config.metric, lower, config.min_delta)

        self._metric = checkpoint.best_metric
        self._lower_is_better = lower_is_better(_BEST, self._metric, task_module)
        self._stopping_config = stopping or StoppingConfig()
        self._plateau_config = plateau or PlateauConfig()
        self._stopping = patience("--stopping.metric", self._stopping_config)
        self._plateau = patience("--plateau.metric", self._plateau_config)
        self.best: Best | None = None
        self.rate_scale = 1.0

    @property
    def exhausted(self) -> bool:
        """True if `patience` evaluations in a row brought no improvement, so the run ends early."""
        config = self._stopping_config
        return config.metric is not None and self._stopping.stale >= config.patience

    @property
    def why_exhausted(self) -> str:
        """The reason for the early end, for messages."""
        config, found = self._stopping_config, self._stopping
        than = "was not a number" if found.best is None else f"has not improved on {found.best:g}"
        limit = f"(--stopping.patience={config.patience})"
        return f"{config.metric} {than} for {found.stale} evaluations {limit}"

    @property
    def described(self) -> str:
        """The best evaluation so far in words, "" before the first."""
        return f"{self.best.metric} {self.best.value:g} is the best so far" if self.best else ""

    def see(self, step: int, values: Mapping[str, float]) -> bool:
        """Records the evaluation after `step`; returns whether it is the best so far."""
        self._stopping.see(values)
        self._plateau.see(values)
        plateau = self._plateau_config
        if plateau.metric is not None and self._plateau.stale >= plateau.patience:
            self.rate_scale = max(self.rate_scale * plateau.factor, plateau.minimum_share)
            self._plateau.stale = 0
        if self._metric is None:
            return False
        value, before = value_of(_BEST, self._metric, values), self.best
        known = before.value if before and before.metric == self._metric else None
        if not _improves(self._lower_is_better, value, known):
            return False
        self.best = Best(self._metric, value, step)
        return True

    def is_best(self, step: int) -> bool:
        """Returns whether the evaluation after `step` is the best so far."""
        return self.best is not None and self.best.step == step

    def record(self) -> dict[str, Any]:
        """Returns the state as JSON values: "best" and "watch"."""
        watch = {"stopping": self._stopping.record(), "plateau": self._plateau.record()}
        best = self.best and self.best._asdict()
        return {"best": best, "watch": {**watch, "rate_scale": self.rate_scale}}

    def recall(self, stored: Mapping[str, Any]) -> None:
        """Restores a checkpoint's state for metrics that it also watched; resets the rest."""
        best, watch = stored.get("best"), stored.get("watch") or {}
        self.best = Best(**best) if best and best["metric"] == self._metric else None
        self._stopping.recall(watch.get("stopping"))
        self._plateau.recall(watch.get("plateau"))
        self.rate_scale = watch.get("rate_scale", 1.0)


def flattened(results: Results) -> dict[str, float]:
    """Returns metrics over all rows by name, and metrics of a mixture's tasks as TASK/METRIC."""
    flat: dict[str, float] = {}
    for split, values in results.items():
        _, slash, task = split.partition("/")
        flat |= {task + slash + metric: value for metric, value in values.items()}
    return flat


def _improves(lower: bool, value: float, best: float | None, by: float = 0.0) -> bool:
    """Returns whether `value` is the first number, or better than `best` by more than `by`."""
    if best is None:
        return not math.isnan(value)
    return value < best - by if lower else value > best + by


def lower_is_better(flag: str, metric: str | None, task_module: str | None = None) -> bool:
    """Returns whether lower values are better; raises UserError if that is unknown."""
    if metric is None:
        return True
    direction, colon, _ = metric.partition(":")
    if colon and direction in ("min", "max"):
        return direction == "min"
    name = metric.rpartition("/")[2]
    found = LOWER_IS_BETTER.get(name)
    if found is None:
        found = metrics.lower_is_better(name, task_module)
    if found is None:
        raise UserError(
            f"{flag}={metric}: it is unknown whether lower is better; write min:{metric} or "
            f"max:{metric}, or give its Metric lower_is_better=True or False"
        )
    return found


def value_of(flag: str, metric: str, values: Mapping[str, float]) -> float:
    """Returns the value of METRIC, min:METRIC or max:METRIC; raises UserError if missing."""
    name = metric.removeprefix("min:").removeprefix("max:")
    if name not in values:
        known = [n for n in values if n in BEST_METRICS or n.rpartition("/")[2] not in _STATISTICS]
        raise UserError(
            f"{flag}={metric}: these tasks do not have this metric; choose one of "
            f"{', '.join(known)}"
        )
    return values[name]


# Values that describe the data, not the model.
_STATISTICS = ("tokens", "unigram_entropy", "mean_label", "max_targets_length", "training_loss")
