"""The charts of a report on runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from tasks.pages.chart import Chart, Series
from trainer.reporting.history import TRAIN, VALIDATION, History

AXES = {"steps": "updates", "tokens": "positions read", "hours": "hours of training"}
# Metrics that describe the data; further below, metrics with their own charts.
_STATISTICS = ("tokens", "mean_label", "max_targets_length", "unigram_entropy")
_FILLED = {"inputs_full": "inputs", "targets_full": "targets"}
_OWN = ("loss", "accuracy", "gradient_norm", "learning_rate", *_FILLED)
_SHARES = ("accuracy", "sequence_accuracy", "order_accuracy", "dropped_tokens", "mfu")
_MEMORY = {"device_memory_bytes": "device", "host_memory_bytes": "host"}
_SPLITS = (TRAIN, VALIDATION)
_GB = 1e9


def charts(runs: Sequence[History]) -> list[Chart]:
    """Returns the charts of runs, one for each metric that any run has."""
    made = [
        _chart(runs, "loss", "Loss", _SPLITS, unit="nats per target token", logarithmic=True),
        _chart(runs, "accuracy", "Accuracy", _SPLITS, unit="of target tokens", percent=True),
        *_of_tasks(runs),
        *_others(runs, VALIDATION),
        _chart(runs, "learning_rate", "Learning rate", (TRAIN,)),
        _chart(runs, "gradient_norm", "Gradient norm", (TRAIN,), logarithmic=True),
        _chart(runs, "tokens_per_second", "Throughput", (TRAIN,), "speed", "positions a second"),
        _chart(runs, "mfu", "MFU", (TRAIN,), "speed", "of the devices' peak", percent=True),
        _memory(runs),
        _padding(runs),
        *_others(runs, TRAIN),
    ]
    return [chart for chart in made if chart.series]


def _chart(
    runs: Sequence[History],
    metric: str,
    title: str,
    splits: Sequence[str],
    part: str = "metrics",
    unit: str = "",
    percent: bool = False,
    logarithmic: bool = False,
) -> Chart:
    """Returns a chart of one metric, empty if no run has the metric."""
    series = []
    for number, run in enumerate(runs):
        found = [(split, run.points(split, metric, part)) for split in splits]
        for split, points in found:
            if not points.steps:
                continue
            several = len(runs) > 1
            label = _label(run, split if len(splits) > 1 else "", several) or title.lower()
            both = len(splits) > 1 and split == TRAIN
            # One run has a colour per split; several have a colour each.
            colour = number if several else splits.index(split)
            values = points.values
            series.append(
                Series(
                    label, _x(run, points.steps), values, colour, faint=both and several,
                    dots=split != TRAIN, smooth=split == TRAIN and metric in ("loss", "accuracy"),
                )
            )  # fmt: skip
    return Chart(_key(metric), title, series, unit, percent=percent, logarithmic=logarithmic)


def _label(run: History, what: str, several: bool) -> str:
    return " ".join(([run.name] if several else []) + ([what] if what else []))


def _x(run: History, steps: Sequence[int]) -> dict[str, Sequence[float]]:
    tokens = run.tokens_per_step
    x: dict[str, Sequence[float]] = {"steps": steps, "tokens": [tokens * step for step in steps]}
    hours = run.hours(steps)
    # Without recorded speed, all points would be at 0 hours.
    return {**x, "hours": hours} if hours and hours[-1] > 0 else x


def _of_tasks(runs: Sequence[History]) -> Iterable[Chart]:
    """Yields a chart of the loss of each task of a mixture."""
    splits = dict.fromkeys(split for run in runs for split in run.names() if "/" in split)
    for split in splits:
        made = _chart(runs, "loss", f"Loss of {split}", (split,), unit="nats per target token")
        key = f"{made.key}-{_key(split)}"
        yield Chart(key, made.title, made.series, made.unit, logarithmic=True)


def _others(runs: Sequence[History], split: str) -> Iterable[Chart]:
    """Yields charts of a split's remaining metrics."""
    skipped = {*_STATISTICS, *_OWN, "z_loss"} if split == TRAIN else {*_STATISTICS, *_OWN}
    if split != TRAIN:
        skipped.add("training_loss")
    names = dict.fromkeys(name for run in runs for name in run.names().get(split, ()))
    for name in names:
        if name in skipped:
            continue
        title = name.replace("_", " ")
        title = title[:1].upper() + title[1:]
        yield _chart(runs, name, title, (split,), unit=f"of {split}", percent=name in _SHARES)


def _memory(runs: Sequence[History]) -> Chart:
    return _several(
        runs, "memory", "Memory", "GB, the most so far", _MEMORY, "speed", lambda value: value / _GB
    )


def _padding(runs: Sequence[History]) -> Chart:
    made = _several(
        runs, "padding", "Padding", "of positions", _FILLED, "metrics", lambda value: 1 - value
    )
    return Chart(made.key, made.title, made.series, made.unit, percent=True)


def _several(
    runs: Sequence[History],
    key: str,
    title: str,
    unit: str,
    names: dict[str, str],
    part: str,
    of: Any,
) -> Chart:
    """Returns one chart of several training metrics, with `of` applied to their values."""
    series = []
    for number, run in enumerate(runs):
        for place, (metric, label) in enumerate(names.items()):
            points = run.points(TRAIN, metric, part)
            if points.steps:
                several = len(runs) > 1
                series.append(
                    Series(
                        _label(run, label, several),
                        _x(run, points.steps),
                        [of(value) for value in points.values],
                        number if several else place,
                        faint=several and place > 0,
                    )
                )
    return Chart(key, title, series, unit)


def _key(name: str) -> str:
    """Returns a name as an HTML id."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
