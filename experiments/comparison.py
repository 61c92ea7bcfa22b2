"""Compares the learning curves of several models and seeds with a baseline."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.storage import files
from tasks.terminal import table as tables
from trainer.reporting.drawing import load_pyplot


@dataclasses.dataclass(frozen=True)
class Curve:
    """The learning curve of a run.

    Attributes:
      steps: the evaluated steps, in updates.
      losses: validation loss at each of them, in nats per token.
      step_seconds: time of one update.
      bits_per_byte: validation bits per byte at the end; None if the task has none.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    step_seconds: float
    bits_per_byte: float | None = None

    @property
    def final(self) -> float:
        """The loss at the last evaluation."""
        return self.losses[-1]

    def steps_to(self, loss: float) -> float:
        """Returns the updates until the loss first reaches `loss`; infinity if it never does.

        Losses are interpolated linearly between evaluations. A loss that is already reached at the
        first evaluation gives that evaluation's step.
        """
        if self.losses[0] <= loss:
            return float(self.steps[0])
        points = list(zip(self.steps, self.losses, strict=True))
        for (before, high), (after, low) in itertools.pairwise(points):
            if low <= loss:
                return before + (after - before) * (high - loss) / (high - low)
        return math.inf


def steps_ratio(baseline: Curve, variant: Curve) -> float:
    """Returns how many times fewer updates the variant needs to reach the baseline's final loss.

    If the variant does not reach it, the ratio is below 1: the updates the baseline needs to reach
    the variant's final loss, divided by all of the baseline's updates.
    """
    if variant.final <= baseline.final:
        return baseline.steps[-1] / variant.steps_to(baseline.final)
    return baseline.steps_to(variant.final) / baseline.steps[-1]


def speed_up(baseline: Curve, variant: Curve) -> float:
    """Returns `steps_ratio` in terms of time, which is Primer's speed-up factor.

    Source: So et al. 2021 (arXiv:2109.08668), section 4: the baseline's compute divided by the
    variant's at equal quality.
    """
    return steps_ratio(baseline, variant) * baseline.step_seconds / variant.step_seconds


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; the deviation of a single seed is 0."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of one or more values."""
        several = len(values) > 1
        return cls(statistics.fmean(values), statistics.stdev(values) if several else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


@dataclasses.dataclass(frozen=True)
class Arm:
    """The results of one model over the seeds that the baseline has as well.

    Differences and ratios are paired by seed; `difference` is the final loss minus the baseline's.
    """

    seeds: tuple[int, ...]
    loss: Spread
    difference: Spread
    bits_per_byte: Spread | None
    step_seconds: float
    steps_ratio: Spread
    speed_up: Spread


def compare(curves: Mapping[str, Mapping[int, Curve]], baseline: str) -> dict[str, Arm]:
    """Returns the arms by name, from curves by name and seed.

    An arm that has no seed in common with the baseline is left out.
    """
    base = curves[baseline]
    arms = {}
    for name, by_seed in curves.items():
        seeds = tuple(seed for seed in by_seed if seed in base)
        if not seeds:
            continue
        pairs = [(base[seed], by_seed[seed]) for seed in seeds]
        bits = [one.bits_per_byte for _, one in pairs if one.bits_per_byte is not None]
        arms[name] = Arm(
            seeds,
            Spread.of([one.final for _, one in pairs]),
            Spread.of([one.final - other.final for other, one in pairs]),
            Spread.of(bits) if len(bits) == len(pairs) else None,
            statistics.median(one.step_seconds for _, one in pairs),
            Spread.of([steps_ratio(*pair) for pair in pairs]),
            Spread.of([speed_up(*pair) for pair in pairs]),
        )
    return arms


def table(arms: Mapping[str, Arm], parameters: Mapping[str, int]) -> str:
    """Returns a Markdown table with one line per arm."""
    header = (
        "model", "parameters", "seeds", "loss", "minus baseline", "bits/byte", "ms/step",
        "steps ratio", "speed-up",
    )  # fmt: skip
    rows = [
        (
            name,
            f"{parameters[name]:,}",
            len(arm.seeds),
            arm.loss,
            f"{arm.difference.mean:+.4f} ± {arm.difference.deviation:.4f}",
            arm.bits_per_byte or "-",
            f"{arm.step_seconds * 1e3:.1f}",
            f"{arm.steps_ratio.mean:.2f} ± {arm.steps_ratio.deviation:.2f}",
            f"{arm.speed_up.mean:.2f} ± {arm.speed_up.deviation:.2f}",
        )
        for name, arm in arms.items()
    ]
    return tables.table(header, rows, markdown=True)


def draw(curves: Mapping[str, Mapping[int, Curve]], baseline: str, picture: str) -> None:
    """Writes a PNG of the validation losses.

    The panels show the loss against steps, the loss against time, and the difference from the
    baseline with the same seed. Lines are means over seeds; bands cover all seeds.

    Raises:
      UserError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 5), dpi=110, layout="constrained")
    by_step, by_time, by_difference = panels
    base = curves[baseline]
    for number, (name, by_seed) in enumerate(curves.items()):
        color = f"C{number}"
        runs = list(by_seed.values())
        steps, losses = runs[0].steps, [run.losses for run in runs]
        seconds = statistics.median(run.step_seconds for run in runs)
        _band(by_step, steps, losses, color, name)
        _band(by_time, [step * seconds for step in steps], losses, color, name)
        pairs = [(run, base[seed]) for seed, run in by_seed.items() if seed in base]
        differences = [
            [ours - theirs for ours, theirs in zip(run.losses, other.losses, strict=True)]
            for run, other in pairs
        ]
        if differences:
            _band(by_difference, steps, differences, color, name)
    loss = "validation loss, nats per token"
    by_step.set(xlabel="step", ylabel=loss, xscale="log")
    by_time.set(xlabel="seconds of training", ylabel=loss, xscale="log")
    for panel in (by_step, by_time):
        panel.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        panel.xaxis.set_major_formatter(ScalarFormatter())
    by_difference.set(xlabel="step", ylabel=f"loss minus the loss of {baseline}")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    by_step.legend(frameon=False)
    with files.atomic_write(picture) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _band(
    panel: Any, x: Sequence[float], by_seed: Sequence[Sequence[float]], color: str, name: str
) -> None:
    """Draws the mean over seeds as a line and the range of all seeds as a band."""
    at_each = list(zip(*by_seed, strict=True))
    panel.plot(x, [statistics.fmean(values) for values in at_each], color=color, label=name)
    low, high = ([end(values) for values in at_each] for end in (min, max))
    panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def curve(lines: Sequence[Mapping[str, Any]], step_seconds: float | None = None) -> Curve | None:
    """Returns the curve in the lines of `metrics.read_metrics`; None without an evaluation.

    If `step_seconds` is None, it is the median over the run's own measurements.
    """
    evaluated = [line for line in lines if line["split"] == "validation"]
    if not evaluated:
        return None
    rates = [line.get("speed", {}).get("steps_per_second") for line in lines]
    if step_seconds is None:
        known = [1 / rate for rate in rates if rate]
        step_seconds = statistics.median(known) if known else math.nan
    return Curve(
        tuple(line["step"] for line in evaluated),
        tuple(line["metrics"]["loss"] for line in evaluated),
        step_seconds,
        evaluated[-1]["metrics"].get("bits_per_byte"),
    )
