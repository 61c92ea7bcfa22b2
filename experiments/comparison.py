"""What learning curves of several models and seeds say about them, against a baseline."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.storage import files
from trainer.reporting.drawing import load_pyplot


@dataclasses.dataclass(frozen=True)
class Curve:
    """A run: validation loss, in nats a token, after each of `steps` updates.

    `step_seconds` is the time of an update; `bits_per_byte` at the end, None if it has none.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    step_seconds: float
    bits_per_byte: float | None = None

    @property
    def final(self) -> float:
        """The loss at the end."""
        return self.losses[-1]

    def steps_to(self, loss: float) -> float:
        """Updates until the loss is first so low, straight lines between evaluations.

        infinity: never; before the first evaluation nothing is known: its step.
        """
        if self.losses[0] <= loss:
            return float(self.steps[0])
        points = list(zip(self.steps, self.losses, strict=True))
        for (before, high), (after, low) in itertools.pairwise(points):
            if low <= loss:
                return before + (after - before) * (high - loss) / (high - low)
        return math.inf


def steps_ratio(baseline: Curve, variant: Curve) -> float:
    """How many times fewer updates the variant needs to be as good as the other is at its end.

    Where it does not get there, it is below 1: the baseline's updates to the variant's end by all.
    """
    if variant.final <= baseline.final:
        return baseline.steps[-1] / variant.steps_to(baseline.final)
    return baseline.steps_to(variant.final) / baseline.steps[-1]


def speed_up(baseline: Curve, variant: Curve) -> float:
    """`steps_ratio` in time: Primer's speed-up factor.

    Source: So et al. 2021 (arXiv:2109.08668), section 4: compute of the baseline by that of the
    variant at equal quality.
    """
    return steps_ratio(baseline, variant) * baseline.step_seconds / variant.step_seconds


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; the latter is 0 of one seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        several = len(values) > 1
        return cls(statistics.fmean(values), statistics.stdev(values) if several else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A model over all seeds that it and the baseline have; differences and ratios by pairs.

    `difference` is final loss less the baseline's, of the same seed.
    """

    seeds: tuple[int, ...]
    loss: Spread
    difference: Spread
    bits_per_byte: Spread | None
    step_seconds: float
    steps_ratio: Spread
    speed_up: Spread


def compare(curves: Mapping[str, Mapping[int, Curve]], baseline: str) -> dict[str, Arm]:
    """Arm by name, from curves by name and seed. An arm without a seed of the baseline's is left
    out."""
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
    """A Markdown table, a line an arm."""
    lines = [
        "| model | parameters | seeds | loss | less baseline | bits/byte | ms/step | steps ratio "
        "| speed-up |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, arm in arms.items():
        lines.append(
            f"| {name} | {parameters[name]:,} | {len(arm.seeds)} | {arm.loss} "
            f"| {arm.difference.mean:+.4f} ± {arm.difference.deviation:.4f} "
            f"| {arm.bits_per_byte or '-'} | {arm.step_seconds * 1e3:.1f} "
            f"| {arm.steps_ratio.mean:.2f} ± {arm.steps_ratio.deviation:.2f} "
            f"| {arm.speed_up.mean:.2f} ± {arm.speed_up.deviation:.2f} |"
        )
    return "\n".join(lines)


def draw(curves: Mapping[str, Mapping[int, Curve]], baseline: str, picture: str) -> None:
    """Writes a PNG of validation loss against steps and against time, and of what lies between it
    and the baseline's of the same seed: means over seeds, with all seeds in a band.

    Raises:
      UserError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 5), dpi=110, layout="constrained")
    by_step, by_time, less_baseline = panels
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
            [mine - its for mine, its in zip(run.losses, other.losses, strict=True)]
            for run, other in pairs
        ]
        if differences:
            _band(less_baseline, steps, differences, color, name)
    loss = "validation loss, nats a token"
    by_step.set(xlabel="step", ylabel=loss, xscale="log")
    by_time.set(xlabel="seconds of training", ylabel=loss, xscale="log")
    for panel in (by_step, by_time):
        panel.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        panel.xaxis.set_major_formatter(ScalarFormatter())
    less_baseline.set(xlabel="step", ylabel=f"the same, less that of {baseline}")
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
    """The mean over seeds, and all of them between two lines."""
    at_each = list(zip(*by_seed, strict=True))
    panel.plot(x, [statistics.fmean(values) for values in at_each], color=color, label=name)
    low, high = ([end(values) for values in at_each] for end in (min, max))
    panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def curve(lines: Sequence[Mapping[str, Any]], step_seconds: float | None = None) -> Curve | None:
    """The curve in the lines of `metrics.read_metrics`; None if none is evaluated yet.

    `step_seconds` None: the median of what the run itself took.
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
