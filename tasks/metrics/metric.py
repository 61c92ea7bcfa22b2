"""Looks up metrics by name, for flags, including metrics of annexes and of a user's module."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks import annexes, registry
from tasks.annexes import Registry
from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest

__all__ = ["Metric"]

# Prefix for a generated-text metric that shares the name of a token metric.
TEXT = "text_"
# (targets, predictions), one of each per example, in order -> values by name.
Compute = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of predictions.

    A target is a text or a sequence of correct texts; a task's `postprocess` may give labels or
    numbers instead.

    Attributes:
      name: name for flags.
      compute: the function of targets and predictions, or "module:function", imported when used.
      lower_is_better: True if lower values are better. A run watches a metric that sets it, or one
        written as min:NAME or max:NAME.
      values: names of the values that `compute` returns; by default the metric's own name.
      package: the optional package that `compute` imports, as scipy; `chosen` looks for it.
    """

    name: str
    compute: Compute | str
    lower_is_better: bool | None = None
    values: tuple[str, ...] = ()
    package: str = ""

    def __call__(self, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """Returns values by name; percentages and correlations are times 100.

        Raises ValueError if there are no targets or not as many predictions, and UserError if
        targets are of the wrong kind or `compute` does not return numbers by name.
        """
        if not targets or len(targets) != len(predictions):
            raise ValueError(f"{len(targets)} targets and {len(predictions)} predictions")
        compute = self.compute
        if isinstance(compute, str):
            module, _, function = compute.partition(":")
            compute = getattr(importlib.import_module(module), function)
        try:
            values = compute(targets, predictions)
        except Exception as error:
            error.add_note(f"This is from the metric {self.name}.")
            raise
        try:
            return {name: float(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"the metric {self.name} returns {values!r}, which is not a dict of numbers by name"
            ) from error


_VALUES = {
    "squad": ("em", "f1"),
    "rouge": ("rouge1", "rouge2", "rougeLsum"),
}
METRICS: Registry[Metric] = Registry(
    "metrics",
    {
        name: Metric(
            name, f"tasks.metrics.{module}:{name}", lower_is_better, _VALUES.get(name, ()), package
        )
        for module, package, lower_is_better, names in (
            ("text", "", False, ("exact_match", "squad", "token_f1")),
            ("errors", "editdistance", True, ("character_error_rate", "word_error_rate")),
            ("overlap", "sacrebleu", False, ("bleu", "bleu_intl", "chrf")),
            ("overlap", "rouge_score", False, ("rouge",)),
        )
        for name in names
    },
)


def known(module: str | None = None) -> dict[str, Metric]:
    """Returns all metrics by name, including those of annexes and METRICS of a user's `module`."""
    own = getattr(registry.load(module), "METRICS", ()) if module else ()
    return {**METRICS.own, **annexes.loaded("metrics"), **{metric.name: metric for metric in own}}


def values_of(name: str) -> tuple[str, ...]:
    """Returns the names of a known metric's values in results; (name,) for an unknown one."""
    return (name in METRICS and METRICS[name].values) or (name,)


def lower_is_better(value: str, module: str | None = None) -> bool | None:
    """Returns True if lower is better for a value in results; None if no metric says."""
    for metric in reversed(known(module).values()):
        if value in (metric.values or (metric.name,)):
            return metric.lower_is_better
    return None


def chosen(names: Sequence[str], module: str | None = None) -> list[Metric]:
    """Returns the metrics that a flag names.

    Raises UserError for an unknown name, and for a package that is not installed.
    """
    table = known(module)
    for name in names:
        if name not in table:
            raise UserError(
                f"unknown metric {name}{nearest(name, table)}; known: {', '.join(table)}; a module "
                "given by --task_module may define more in its tuple METRICS"
            )
    found = [table[name] for name in names]
    for metric in found:
        with extras.needed(f"the metric {metric.name}", "eval"):
            if metric.package:
                importlib.import_module(metric.package)
    return found
