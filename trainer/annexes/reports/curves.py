"""The charts in a report on runs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tasks.annexes.pages.chart import Chart, Series
from tasks.annexes.questions.scores import ACCURACY, BITS, SUITE
from trainer.reporting.history import TRAIN, VALIDATION, History

AXES = {"steps": "updates", "tokens": "positions read", "hours": "hours of training"}
# Metrics that describe the data; below them, metrics with charts of their own.
_STATISTICS = ("tokens", "mean_label", "max_targets_length", "unigram_entropy")
_FILLED = {"inputs_full": "inputs", "targets_full": "targets"}
_OWN = ("loss", "accuracy", "gradient_norm", "learning_rate", *_FILLED)
_SHARES = ("accuracy", "sequence_accuracy", "order_accuracy", "dropped_tokens", "mfu")
_MEMORY = {"device_memory_bytes": "device", "host_memory_bytes": "host"}
_SPLITS = (TRAIN, VALIDATION)
_GB = 1e9
# (split, metric, label) of each line in a chart.
Lines = Sequence[tuple[str, str, str]]


def charts(runs: Sequence[History]) -> list[Chart]:
    """Returns the charts of runs, one for each metric that any run has."""
    loss, accuracy = ([(split, name, split) for split in _SPLITS] for name in ("loss", "accuracy"))
    memory, padding = (
        [(TRAIN, metric, label) for metric, label in names.items()] for names in (_MEMORY, _FILLED)
    )
    made = [
        _chart(runs, "loss", "Loss", loss, unit="nats per target token", logarithmic=True, main=1),
        _chart(
            runs, "accuracy", "Accuracy", accuracy, unit="of target tokens", percent=True, main=1
        ),
        *_of_tasks(runs),
        *_of_suites(runs),
        *_others(runs, VALIDATION),
        _one(runs, "learning_rate", "Learning rate"),
        _one(runs, "gradient_norm", "Gradient norm", logarithmic=True),
        _one(runs, "tokens_per_second", "Throughput", part="speed", unit="positions a second"),
        _one(runs, "mfu", "MFU", part="speed", unit="of the devices' peak", percent=True),
        _chart(
            runs, "memory", "Memory", memory, "speed", "GB, the most so far", of=lambda x: x / _GB
        ),
        _chart(
            runs, "padding", "Padding", padding, unit="of positions", percent=True,
            of=lambda x: 1 - x,
        ),
        *_others(runs, TRAIN),
    ]  # fmt: skip
    return [chart for chart in made if chart.series]


def _one(
    runs: Sequence[History], metric: str, title: str, split: str = TRAIN, **form: Any
) -> Chart:
    return _chart(runs, _key(metric), title, [(split, metric, "")], **form)


def _chart(
    runs: Sequence[History],
    key: str,
    title: str,
    lines: Lines,
    part: str = "metrics",
    unit: str = "",
    percent: bool = False,
    logarithmic: bool = False,
    main: int = 0,
    of: Callable[[float], float] = float,
) -> Chart:
    """Returns a chart with each run's `lines`, empty if no run has their metrics.

    `of` is applied to the values. A single run has a colour per line; several runs have one colour
    each, and all their lines but the `main` one are faint.
    """
    series, several = [], len(runs) > 1
    for number, run in enumerate(runs):
        name = run.name if several else ""
        for place, (split, metric, label) in enumerate(lines):
            points = run.points(split, metric, part)
            if points.steps:
                series.append(
                    Series(
                        " ".join(filter(None, (name, label))) or title.lower(),
                        _x(run, points.steps), [of(value) for value in points.values],
                        number if several else place, faint=several and place != main,
                        dots=split != TRAIN,
                        smooth=split == TRAIN and metric in ("loss", "accuracy"),
                    )
                )  # fmt: skip
    return Chart(key, title, series, unit, percent=percent, logarithmic=logarithmic)


def _x(run: History, steps: Sequence[int]) -> dict[str, Sequence[float]]:
    tokens = [run.tokens(step) for step in steps]
    x: dict[str, Sequence[float]] = {"steps": steps, "tokens": tokens}
    hours = run.hours(steps)
    # Without recorded speed, all points would be at 0 hours.
    return {**x, "hours": hours} if hours and hours[-1] > 0 else x


def _of_tasks(runs: Sequence[History]) -> Iterable[Chart]:
    splits = dict.fromkeys(split for run in runs for split in run.names() if "/" in split)
    for split in splits:
        lines, unit = [(split, "loss", "")], "nats per target token"
        title = f"Loss of {split}"
        yield _chart(runs, f"loss-{_key(split)}", title, lines, unit=unit, logarithmic=True)


def _of_suites(runs: Sequence[History]) -> Iterable[Chart]:
    splits = dict.fromkeys(split for run in runs for split in run.names())
    sets = [split.removeprefix(f"{SUITE}/") for split in splits if split.startswith(f"{SUITE}/")]
    for metric, title, unit in ((ACCURACY, "Right answers", "%"), (BITS, "Bits per byte", "bits")):
        lines = [(f"{SUITE}/{name}", metric, name) for name in sets]
        yield _chart(runs, _key(metric), title, lines, unit=f"{unit}, of the suite's sets")


def _others(runs: Sequence[History], split: str) -> Iterable[Chart]:
    skipped = {*_STATISTICS, *_OWN, "z_loss" if split == TRAIN else "training_loss"}
    names = dict.fromkeys(name for run in runs for name in run.names().get(split, ()))
    for name in names:
        if name in skipped:
            continue
        title = name.replace("_", " ")
        title = title[:1].upper() + title[1:]
        yield _one(runs, name, title, split, unit=f"of {split}", percent=name in _SHARES)


def _key(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
