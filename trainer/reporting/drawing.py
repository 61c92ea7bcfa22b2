"""Draws figures with Matplotlib, which is imported only then."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from trainer.reporting.history import TRAIN, VALIDATION, History

# A title of this size fits the figures, also in capitals, and leaves room for the curves.
_TITLE_CHARACTERS, _TITLE_LINES = 60, 5


def load_pyplot() -> Any:
    """Returns pyplot, set up to write files; raises UserError without matplotlib."""
    with extras.needed("the figure", "demo"):
        import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_losses(runs: Sequence[History], picture: str) -> None:
    """Writes a PNG of training and validation loss against steps, and the unigram entropy."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for number, run in enumerate(runs):
        name = f"{run.name} " if len(runs) > 1 else ""
        for split in (TRAIN, VALIDATION):
            points = run.points(split, "loss")
            style = {"alpha": 0.45} if split == TRAIN else {"marker": "o"}
            if points.steps:
                label = f"{name}{split} loss"
                axes.plot(points.steps, points.values, color=f"C{number}", label=label, **style)
    if not axes.lines:
        raise UserError("--picture: there is no loss to draw yet; train the run longer")
    entropy = runs[0].last(VALIDATION, "unigram_entropy")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="#777777", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per target token")
    if len(runs) == 1:
        _set_title(axes, f"{runs[0].config.preset} on {runs[0].config.task}")
    _finish(pyplot, figure, [axes], picture)


def draw_metrics(
    results: Mapping[int, Mapping[str, Mapping[str, float]]], picture: str, title: str
) -> None:
    """Writes a PNG with a panel per metric and a line per split or task."""
    from trainer.engine.evaluator import TOKEN_METRICS

    pyplot = load_pyplot()
    every = (values for by_split in results.values() for values in by_split.values())
    names = dict.fromkeys(n for values in every for n in values if n not in TOKEN_METRICS)
    panels = ["loss", "accuracy", *names]
    figure, grid = pyplot.subplots(
        len(panels), figsize=(8, 2.4 * len(panels)), dpi=120, layout="constrained", sharex=True
    )
    for axes, name in zip(grid, panels, strict=True):
        for split in dict.fromkeys(split for by_split in results.values() for split in by_split):
            points = [
                (step, by_split[split][name])
                for step, by_split in sorted(results.items())
                if name in by_split.get(split, {})
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=split)
        axes.set(ylabel=name)
    _set_title(grid[0], title)
    grid[-1].set_xlabel("step")
    _finish(pyplot, figure, grid, picture)


def _set_title(axes: Any, title: str) -> None:
    """Sets a title in lines, broken between the tasks of a mixture; "…" stands for what is left."""
    lines = textwrap.wrap(
        title.replace(",", ", "),
        _TITLE_CHARACTERS,
        max_lines=_TITLE_LINES,
        placeholder=" …",
        break_on_hyphens=False,
    )
    axes.set_title("\n".join(lines), parse_math=False)


def _finish(pyplot: Any, figure: Any, panels: Iterable[Any], picture: str) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    with files.atomic_write(picture) as file:
        # Without metadata, equal curves give equal files.
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)
