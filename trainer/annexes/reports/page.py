"""The report on runs as one HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.annexes.pages import chart
from tasks.annexes.pages import document as html_page
from tasks.terminal.progress import clock
from trainer.annexes.reports import curves, suites
from trainer.config import field_paths
from trainer.monitoring import goodput
from trainer.monitoring.activity import STEPPING
from trainer.reporting import numbers
from trainer.reporting.history import TRAIN, VALIDATION, History, differences

_GB = 1e9
# How origins that are not specific to this run begin.
_DEFAULT = ("default", "preset ")


def page(runs: Sequence[History], examined: Mapping[str, str] | None = None) -> str:
    """Returns the report as HTML; `examined` maps names of further sections to HTML."""
    drawn = curves.charts(runs)
    axes = {
        name: unit
        for name, unit in curves.AXES.items()
        if any(name in series.x for each in drawn for series in each.series)
    }
    parts = [
        ("Summary", _summary(runs) + _missing(runs)),
        ("Curves", chart.figures(drawn, axes) if drawn else "<p>No metrics are recorded yet.</p>"),
        ("Mixture and padding", _data(runs)),
        ("Wall time", _wall_time(runs)),
        ("Configuration", _configuration(runs)),
        *((("Suite", answered),) if (answered := suites.section(runs)) else ()),
        *(examined or {}).items(),
        ("Software and hardware", _software(runs)),
    ]
    body, links = html_page.sections(parts)
    only = runs[0].config
    title = f"{only.preset} on {only.task}" if len(runs) == 1 else f"{len(runs)} runs"
    return html_page.document(
        title,
        links,
        head=f"<p>{html_page.text(', '.join(run.folder for run in runs))}</p>{_headline(runs)}",
        body=body,
        tokens=bool(examined),
        charts=chart.data(drawn, axes) if drawn else "",
    )


def _headline(runs: Sequence[History]) -> str:
    if len(runs) > 1:
        return ""
    run = runs[0]
    loss, trained = run.last(VALIDATION, "loss"), run.last(TRAIN, "loss")
    figures = [
        ("updates", f"{run.step:,} of {run.config.train_steps:,}"),
        ("training loss", _shown(trained)) if loss is None else ("validation loss", _shown(loss)),
        ("positions read", _large(run.tokens(run.step))),
        ("training", _duration(run.hours([run.step])[0])),
    ]
    return html_page.facts(figures, "figures")


def _summary(runs: Sequence[History]) -> str:
    columns = [dict(results(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "–") for column in columns)) for name in names]
    return html_page.table("Newest values", ("", *(run.name for run in runs)), rows)


def results(run: History) -> Iterator[tuple[str, str]]:
    """Yields (name, value as text) for each of a run's latest results."""
    yield "preset", run.config.preset
    yield "task", run.config.task
    yield "updates", f"{run.step:,} of {run.config.train_steps:,}"
    for name, split, metric, form in (
        ("training loss", TRAIN, "loss", "{:.3f}"),
        ("validation loss", VALIDATION, "loss", "{:.3f} nats per token"),
        ("perplexity", VALIDATION, "perplexity", "{:,.1f}"),
        ("token accuracy", VALIDATION, "accuracy", "{:.1%}"),
        ("bits per byte", VALIDATION, "bits_per_byte", "{:.4f}"),
    ):
        value = run.last(split, metric)
        if value is not None:
            yield name, numbers.shown(value, form)
    yield from _landmarks(run)
    if skipped := run.last(TRAIN, "skipped_updates"):
        yield "skipped", f"{skipped:,.0f} updates (--on_nan=skip)"
    yield from _costs(run)


def _landmarks(run: History) -> Iterator[tuple[str, str]]:
    points = run.points(VALIDATION, "loss")
    known = [pair for pair in zip(points.values, points.steps, strict=True) if pair[0] == pair[0]]
    entropy = run.last(VALIDATION, "unigram_entropy")
    if entropy is not None and points.values:
        above = entropy - points.values[-1]
        side = "above" if above >= 0 else "below"
        distance = numbers.shown(abs(above), "{:.3f}")
        yield "unigram entropy", f"{entropy:.3f} nats, {distance} {side} the loss"
    if known and (lowest := min(known)) != known[-1]:
        value, step = lowest
        yield "lowest loss", f"{_shown(value)} of validation, at update {step:,}"


def _costs(run: History) -> Iterator[tuple[str, str]]:
    for name, metric, unit, form in (
        ("speed", "tokens_per_second", 1, "{:,.0f} positions/s"),
        ("MFU", "mfu", 1, "{:.1%} of the peak"),
        ("memory of the device", "device_memory_bytes", _GB, "{:,.2f} GB"),
        ("memory of the host", "host_memory_bytes", _GB, "{:,.2f} GB"),
    ):
        if (value := run.last(TRAIN, metric, "speed")) is not None:
            yield name, numbers.shown(value / unit, form)
    if run.processes:
        spent = goodput.shares(run.processes)
        total = sum(spent.values())
        yield "goodput", f"{spent[STEPPING] / (total or 1):.1%} of {clock(total)}"
    blocked, seconds = run.blocked()
    if seconds:
        yield "training time", _duration(seconds / 3600)
    if blocked and seconds:
        share = blocked / seconds
        yield "checkpoints", f"blocked training for {blocked:.2f} s, {share:.2%} of its time"


def _missing(runs: Sequence[History]) -> str:
    return "".join(
        html_page.note(f"{run.name}: {each}." if runs[1:] else f"{each[:1].upper()}{each[1:]}.")
        for run in runs
        for each in run.missing
    )


def _data(runs: Sequence[History]) -> str:
    several = len(runs) > 1
    rates, filling, notes = [], [], []
    for run in runs:
        name = [run.name] * several
        own = [[*name, *row] for row in _rates(run)]
        rates += own
        if not own:
            notes.append(html_page.note(f"{run.name} did not record the rates of its tasks."))
        filling += [[*name, *row] for row in _filling(run)]
    first, tables = ["run"] * several, []
    if rates:
        header = [*first, "task", "from update", "to update", "share of the rows", ""]
        tables.append(html_page.table("Mixture", header, rates, html_last=True))
    if filling:
        header = [*first, "side", "tokens", "padding", ""]
        caption = "Positions of the rows, mean over the updates"
        tables.append(html_page.table(caption, header, filling, html_last=True))
    else:
        notes.append(html_page.note("No run has a record of padding."))
    return "".join([*tables, *notes])


def _rates(run: History) -> Iterator[list[str]]:
    updates = run.config.data.skips.updates
    rates = [(updates(batch), shares) for batch, shares in run.record.get("rates", [])]
    for number, (step, shares) in enumerate(rates):
        end = rates[number + 1][0] if number + 1 < len(rates) else run.config.train_steps
        for task, share in shares:
            yield [task, f"{step + 1:,}", f"{end:,}", f"{share:.2%}", _bar(share)]


def _filling(run: History) -> Iterator[list[str]]:
    for metric, side in (("inputs_full", "inputs"), ("targets_full", "targets")):
        values = run.points(TRAIN, metric).values
        if values:
            mean = sum(values) / len(values)
            yield [side, f"{mean:.2%}", f"{1 - mean:.2%}", _bar(1 - mean)]


def _wall_time(runs: Sequence[History]) -> str:
    several, rows, notes = len(runs) > 1, [], []
    for run in runs:
        name = [run.name] * several
        if not run.processes:
            notes.append(html_page.note(f"{run.name} did not record its wall time."))
            continue
        spent = goodput.shares(run.processes)
        total = sum(spent.values())
        rows += [
            [*name, kind, goodput.KINDS[kind], clock(seconds), f"{share:.2%}", _bar(share)]
            for kind, seconds in spent.items()
            if (share := seconds / total if total else 0.0)
        ]
        rows.append([*name, "total", _processes(run), clock(total), "", ""])
    header = [*["run"] * several, "time", "", "h:mm:ss", "share", ""]
    table = html_page.table("Wall time by use", header, rows, html_last=True) if rows else ""
    return "".join([table, *notes])


def _processes(run: History) -> str:
    count = len(run.processes)
    return f"{count} processes, one after another" if count > 1 else "1 process"


def _bar(share: float) -> str:
    return f"<span class=bar style='width:{8 * min(max(share, 0), 1):.2f}rem'></span>"


def _configuration(runs: Sequence[History]) -> str:
    if len(runs) == 1:
        run = runs[0]
        rows = [
            (path, _value(value), origin)
            for path, value in field_paths.leaves(run.config)
            if (origin := run.origins.get(path, "default")) and not origin.startswith(_DEFAULT)
        ]
        caption = f"Fields that preset {run.config.preset} and the defaults do not set"
        return html_page.table(caption, ("field", "value", "set by"), rows)
    found = differences(runs)
    if not found:
        return "<p>The configurations are the same.</p>"
    differing = [(path, *map(_value, values)) for path, values in found]
    return html_page.table("Fields that differ", ("field", *(run.name for run in runs)), differing)


def _software(runs: Sequence[History]) -> str:
    columns = [
        run.environment | {"commit": (run.software.get("commit") or "–")[:12]} for run in runs
    ]
    header = ("", *(run.name for run in runs))
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: [_value(column.get(name)) for column in columns] for name in names}
    differ = [(name, *row) for name, row in rows.items() if len(set(row)) > 1]
    same = [(name, row[0]) for name, row in rows.items() if len(set(row)) == 1]
    if len(runs) == 1:
        return html_page.table("At the last start", header, same)
    rest = html_page.table("", ("", "every run"), same)
    first = "<p>The same in all runs.</p>"
    if differ:
        first = html_page.table("What differs, at the last start", header, differ)
    return f"{first}<details><summary>The same in all</summary>{rest}</details>"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "–" if isinstance(value, list | tuple) else str(value)


def _shown(value: float | None) -> str:
    return "–" if value is None else numbers.shown(value, "{:.3f}")


def _large(value: float) -> str:
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= unit:
            return f"{value / unit:,.2f}{name}"
    return f"{value:,.0f}"


def _duration(hours: float) -> str:
    if not hours:
        return "–"
    seconds = round(3600 * hours)
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d} min"
    return f"{seconds // 3600:,}:{seconds % 3600 // 60:02d} h"
