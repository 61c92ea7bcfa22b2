"""Fits scaling laws to losses, with intervals, and predicts from them.

    python -m experiments.scaling steps RUN [--window=1000:15000] [--predict=100000,1000000]
    python -m experiments.scaling sizes RUN RUN … [--form=chinchilla] [--predict=1e9:2e10]

`steps` fits L(t) = a t^-b + c to the losses of one run over its updates; `sizes` fits L(N, D) to
the last losses of several runs over parameters and tokens: E + A / N^alpha + B / D^beta, or
Kaplan's form. A RUN is the folder of a run, or a CSV file with the columns step and loss, or
parameters, tokens and loss. A window or a set of runs that does not identify the exponents is
refused, with exit code 2. Intervals hold 95% of a bootstrap over blocks of losses, or over runs.
"""

import contextlib
import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, Rule, field
from tasks.terminal.table import table

if TYPE_CHECKING:
    from experiments.laws.curve import CurveFit
    from experiments.laws.size import SizeFit

_FORMS = ("chinchilla", "kaplan")
_FEWEST_DRAWS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    law: str = field(
        REQUIRED,
        "steps: fit the loss over steps; sizes: fit the loss over parameters and tokens",
        choices=("steps", "sizes"),
        positional=True,
    )
    runs: tuple[str, ...] = field(
        REQUIRED, "folder of a run, or CSV file", positional=True, metavar="RUN"
    )
    split: str | None = field(
        None, "losses to fit; None means train for steps, validation for sizes",
        choices=("train", "validation"),
    )  # fmt: skip
    window: str | None = field(
        None, "with steps: updates to fit, such as 1000: or 1000:15000", metavar="FIRST:LAST"
    )
    form: str | None = field(None, "with sizes: the law; None means chinchilla", choices=_FORMS)
    predict: str | None = field(
        None,
        "steps (100000,1000000), or parameters and tokens (1e9:2e10), at which to predict the loss",
        metavar="A,B",
    )
    draws: int = field(
        200,
        "number of bootstrap draws",
        rule=Rule(
            f"{_FEWEST_DRAWS} or more, for an interval of 95%",
            lambda draws: draws >= _FEWEST_DRAWS,
        ),
    )
    picture: str | None = field(None, "PNG to write, with losses and law", metavar="FILE")
    json: bool = field(False, "print JSON")


def run(flags: Flags) -> None:
    """Fits a law and prints it."""
    if flags.split and all(run.endswith(".csv") for run in flags.runs):
        raise UserError("--split is for folders of runs: a CSV file has losses of one kind")
    if flags.law == "steps":
        _steps(flags)
    else:
        _sizes(flags)


def _steps(flags: Flags) -> None:
    if len(flags.runs) > 1 or flags.form:
        raise UserError("steps fits one run and has no --form; use sizes for several runs")
    window = re.fullmatch(r"(\d*):(\d*)", flags.window or ":")
    if not window:
        raise UserError(f"--window={flags.window}: write it as 1000:15000 or 1000:")
    first, last = int(window[1] or 1), int(window[2] or 2**62)
    predicted = [_number(text, "--predict") for text in _parts(flags.predict)]
    (folder,) = flags.runs
    points = _losses(folder, flags.split or "train")
    inside = [(step, loss) for step, loss in points if max(1, first) <= step <= last]

    from experiments.laws import curve

    steps, losses = [step for step, _ in inside], [loss for _, loss in inside]
    found = curve.fit(steps, losses, flags.draws)
    if found.refusal:
        raise UserError(f"{folder}: {found.refusal}")
    rows: list[tuple[Any, ...]] = [
        (name, getattr(found, name), *found.interval(found.draws[:, place]))
        for place, name in enumerate("abc")
    ]
    rows += [(f"L({step:g})", found.at(step), *found.interval_at(step)) for step in predicted]
    formula = "L(t) = a t^-b + c"
    _print(rows, f"{formula}, steps {found.first:,} to {found.last:,}", flags.json)
    if flags.picture:
        with _drawn(flags.picture, width=7) as axes:
            _draw_steps(points, found, predicted, axes)


def _sizes(flags: Flags) -> None:
    if flags.window:
        raise UserError("--window is for steps: sizes takes the last loss of each run")
    predicted = []
    for text in _parts(flags.predict):
        n, colon, d = text.partition(":")
        if not colon:
            raise UserError(f"--predict={text}: write parameters and tokens as 1e9:2e10")
        predicted.append((_number(n, "--predict"), _number(d, "--predict")))
    rows = [row for run in flags.runs for row in _sized(run, flags.split or "validation")]

    from experiments.laws import size

    form = flags.form or "chinchilla"
    parameters, tokens, losses = ([row[place] for row in rows] for place in range(3))
    found = size.fit(form, parameters, tokens, losses, flags.draws)
    if found.refusal:
        raise UserError(found.refusal)
    shown: list[tuple[Any, ...]] = [(name, *row) for name, row in found.constants().items()]
    shown += [(f"L({n:g}, {d:g})", *found.at(n, d)) for n, d in predicted]
    _print(shown, f"{form}, {len(rows)} runs", flags.json)
    if flags.picture:
        with _drawn(flags.picture, width=5) as axes:
            _draw_sizes(rows, found, axes)


def _parts(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UserError(f"{flag}={text}: it must be a number") from error
    if not 0 < value < float("inf"):
        raise UserError(f"{flag}={text}: it must be above 0")
    return value


def _csv(path: str, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a CSV file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    for name in columns:
        if name not in (reader.fieldnames or ()):
            raise UserError(f"{path} has no column {name}: it needs {', '.join(columns)}")
    rows = []
    for number, row in enumerate(reader, 2):
        try:
            rows.append(tuple(float(row[name]) for name in columns))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return rows


def _losses(run: str, split: str) -> list[tuple[int, float]]:
    if run.endswith(".csv"):
        rows = _csv(run, ("step", "loss"))
        for step, _ in rows:
            if not step.is_integer():
                raise UserError(f"{run}: step {step} is not a whole number")
        return sorted((int(step), loss) for step, loss in rows)
    from trainer.reporting.metrics import METRICS_FILE, read_metrics

    lines = [line for line in read_metrics(run) if line["split"] == split]
    if not lines:
        raise UserError(f"{run} has no losses of {split}: no {METRICS_FILE} contains them")
    return [(line["step"], line["metrics"]["loss"]) for line in lines]


def _sized(run: str, split: str) -> list[tuple[float, float, float]]:
    """Returns (parameters, target positions with padding, loss) of a run, or of CSV lines."""
    if run.endswith(".csv"):
        return [(n, d, loss) for n, d, loss in _csv(run, ("parameters", "tokens", "loss"))]
    from trainer.config import load_config
    from trainer.engine.cost import parameter_count

    step, loss = _losses(run, split)[-1]
    config = load_config(run)[0]
    phases = config.phases.weighted(lambda each: each.rows * each.lengths.targets)
    tokens = phases.read(step)
    return [(parameter_count(config.model), tokens, loss)]


def _print(rows: list[tuple[Any, ...]], title: str, as_json: bool) -> None:
    if as_json:
        values = {name: {"value": v, "low": low, "high": high} for name, v, low, high in rows}
        print(json.dumps({"law": title, **values}))
        return
    print(title)
    shown = [(name, *(f"{value:.5g}" for value in values)) for name, *values in rows]
    print(table(("", "value", "2.5 %", "97.5 %"), shown, markdown=True))


def _draw_steps(
    points: list[tuple[int, float]], found: "CurveFit", predicted: list[float], axes: Any
) -> None:
    import numpy as np

    axes.plot(*zip(*points, strict=True), ".", markersize=2, color="0.6", label="losses")
    steps = np.geomspace(found.first, max(found.last, *predicted, 0), 200)
    low, high = np.array([found.interval_at(step) for step in steps]).T
    axes.plot(steps, [found.at(step) for step in steps], color="C0", label="law")
    axes.fill_between(steps, low, high, color="C0", alpha=0.2, linewidth=0, label="95 %")
    axes.axvspan(found.first, found.last, color="0.9", zorder=0, label="window")
    axes.set(xscale="log", xlabel="step", ylabel="loss")


def _draw_sizes(rows: list[tuple[float, float, float]], found: "SizeFit", axes: Any) -> None:
    pairs = [(found.at(n, d)[0], loss) for n, d, loss in rows]
    axes.plot(*zip(*pairs, strict=True), "o", markersize=4, label="runs")
    ends = [f(value for pair in pairs for value in pair) for f in (min, max)]
    axes.plot(ends, ends, color="0.6", label="equal")
    axes.set(xlabel="loss of the law", ylabel="loss of the run")


@contextlib.contextmanager
def _drawn(picture: str, width: float) -> Iterator[Any]:
    """Yields the axes of a figure, which is saved when the block ends."""
    from trainer.reporting.drawing import load_pyplot

    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(width, 4.5), dpi=110, layout="constrained")
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with files.atomic_write(picture) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
