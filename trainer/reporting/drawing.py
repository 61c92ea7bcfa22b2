"""Matplotlib, imported only where a picture is drawn."""

from collections.abc import Mapping
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, set up to write files without a display.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_metrics(
    results: Mapping[int, Mapping[str, Mapping[str, float]]], picture: str, title: str
) -> None:
    """Writes a PNG of metrics over steps: one panel per metric, one line per split or task.

    Args:
      results: step -> split -> metric -> value.
      picture: file to write, local or remote.
      title: title of the picture.

    Raises:
      UserError: matplotlib is not installed.
    """
    from trainer.engine.evaluator import TOKEN_METRICS

    pyplot = load_pyplot()
    values = [values for by_split in results.values() for values in by_split.values()]
    names = dict.fromkeys(name for each in values for name in each if name not in TOKEN_METRICS)
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    grid[0].set_title(title)
    grid[-1].set_xlabel("step")
    with files.atomic_write(picture) as file:
        # Without metadata, so that equal curves give equal files.
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)
