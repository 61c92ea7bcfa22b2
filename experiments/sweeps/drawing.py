"""Plots of a sweep: curves, differences from the baseline, and the metric along an axis."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps.definition import Sweep, is_number
from experiments.sweeps.results import Curves, Values, baseline_of, tuned
from tasks.storage import files
from trainer.reporting.drawing import load_pyplot


def draw(sweep: Sweep, curves: Curves, picture: str) -> None:
    """Writes a PNG of a sweep; equal curves give equal files.

    Panels: the metric over steps; the difference from a baseline with the same seed; the last value
    along each numeric axis. Lines are means over seeds; bands cover all seeds. For a tuned axis,
    only the curves of its best values are drawn.
    """
    pyplot = load_pyplot()
    numeric = [axis.name for axis in sweep.axes if _numbers(sweep, axis.name)]
    count = 1 + bool(sweep.baseline) + len(numeric)
    figure, grid = pyplot.subplots(
        1, count, figsize=(5 * count, 4.5), dpi=110, layout="constrained", squeeze=False
    )
    panels = list(grid[0])
    shown = {values: by_seed for values, by_seed in curves.items() if by_seed}
    if sweep.tune:
        shown = {values: curves[values] for values in tuned(curves, sweep).values()}
    _over_steps(panels.pop(0), sweep, shown)
    if sweep.baseline:
        _differences(panels.pop(0), sweep, shown)
    for name, panel in zip(numeric, panels, strict=True):
        _along(panel, sweep, curves, name)
    for panel in grid[0]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize="small")
    with files.atomic_write(picture) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _name(values: Values) -> str:
    return ", ".join(label for _, label in values) or "all"


def _numbers(sweep: Sweep, axis: str) -> dict[str, float] | None:
    """Returns label -> number for an axis, or None unless it has several labels, all numbers."""
    labels = [choice.label for choice in sweep.axis(axis).choices]
    several = len(labels) > 1 and all(map(is_number, labels))
    return {label: float(label) for label in labels} if several else None


def _over_steps(panel: Any, sweep: Sweep, curves: Curves) -> None:
    for number, (values, by_seed) in enumerate(curves.items()):
        _band(panel, [run.by_step for run in by_seed.values()], f"C{number}", _name(values))
    panel.set(xlabel="step", ylabel=sweep.metric, xscale="log")


def _differences(panel: Any, sweep: Sweep, curves: Curves) -> None:
    base_of = {tuple(p for p in values if p[0] != sweep.tune): values for values in curves}
    for number, (values, by_seed) in enumerate(curves.items()):
        theirs = baseline_of(values, sweep.baseline)
        of_base = curves.get(base_of.get(tuple(p for p in theirs if p[0] != sweep.tune), ()), {})
        gaps = []
        for seed, run in by_seed.items():
            base = of_base[seed].by_step if seed in of_base else {}
            ours = run.by_step
            gaps.append({step: ours[step] - base[step] for step in ours if step in base})
        _band(panel, gaps, f"C{number}", "")  # the first panel names the colours
    panel.set(xlabel="step", ylabel=f"{sweep.metric} minus the baseline's")


def _along(panel: Any, sweep: Sweep, curves: Curves, axis: str) -> None:
    numbers: Mapping[str, float] = _numbers(sweep, axis) or {}
    lines: dict[Values, list[tuple[float, float]]] = {}
    for values, by_seed in curves.items():
        others = tuple(pair for pair in values if pair[0] != axis)
        if by_seed:
            mean = statistics.fmean(run.final for run in by_seed.values())
            lines.setdefault(others, []).append((numbers[dict(values)[axis]], mean))
    for others, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=_name(others))
    positive = all(number > 0 for number in numbers.values())
    panel.set(xlabel=axis, ylabel=sweep.metric, xscale="log" if positive else "linear")


def _band(panel: Any, by_seed: Sequence[Mapping[int, float]], color: str, name: str) -> None:
    """Draws the mean over seeds as a line, and their range as a band, at the steps all have."""
    curves = [each for each in by_seed if each]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    if steps:
        at_each = [[curve[step] for curve in curves] for step in steps]
        panel.plot(steps, list(map(statistics.fmean, at_each)), color=color, label=name)
        low, high = (list(map(end, at_each)) for end in (min, max))
        panel.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
