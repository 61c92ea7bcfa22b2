"""Trains every combination of some values with every seed, and compares the results.

    python -m experiments.sweep FILE --output=DIR [--corpus=SPEC] [--seeds=0,1,2] [--workers=1] \\
        [--axis=optimizer.learning_rate=0.01,0.02] [--field.path=value] [--dry_run]
    python -m experiments.sweep --output=DIR --preset=NAME --task=TASK --cache_dir=DIR \\
        --axis=model.mlp_activations='relu;gelu,linear' --seeds=0,1,2 --baseline=relu

FILE is a name in experiments/files or a .toml file (docs/experiments.md). Any field of the
trainer's configuration and any parameter of FILE is a flag and applies to all cells. A cell is a
run of trainer.pretrain in its own process, in OUTPUT/cells. Rerun the same command to resume:
finished cells are kept, killed ones resume, and failed ones are run again with --retry. You may
add seeds and values of axes. The results are written to table.md, results.jsonl and curves.png in
OUTPUT.
"""

import dataclasses
import functools
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.sweeps import definition
from experiments.sweeps.definition import Sweep
from tasks.storage import files, lock
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.flags import made, parse
from tasks.terminal.programs import program
from tasks.terminal.texts import listed

if TYPE_CHECKING:
    from experiments.sweeps.cells import Cell
    from experiments.sweeps.results import Values

    _Placed = tuple[Cell, str, str]  # a cell with its key and folder

_SWEEP = "sweep.json"
_TERMINATED = 75
_FILES = ", ".join(sorted(path.stem for path in definition.FILES.glob("*.toml")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command and of its cells."""

    file: str | None = field(None, f"a .toml file, or one of {_FILES}", positional=True)
    output: str = field(REQUIRED, "folder for the cells and the results", metavar="DIR")
    seeds: str | None = field(
        None, "seeds for each combination, such as 0,1,2; None means FILE's seeds, or 0"
    )
    axis: tuple[str, ...] = field(
        (),
        "values of a field or parameter, separated by ; if they contain commas; for an axis of "
        "FILE, the values to run; may be repeated",
        metavar="NAME=A,B",
        repeated=True,
    )
    metric: str | None = field(None, "metric to compare; None means FILE's metric, or loss")
    baseline: str | None = field(
        None, "value to compare others with, or AXIS=VALUE,AXIS=VALUE", metavar="VALUE"
    )
    tune: str | None = field(None, "axis whose best value each combination takes", metavar="AXIS")
    tune_seeds: int | None = field(
        None,
        "number of seeds that try all values of the tuned axis, while the others run with the best "
        "one only; None means FILE's number, or all seeds",
        rule=at_least(1),
    )
    workers: int = field(
        1, "number of cells to run at the same time", rule=at_least(1), aliases=("processes",)
    )
    retry: bool = field(False, "run failed cells again from where they ended")
    no_prepare: bool = field(
        False,
        "do not make vocabularies and caches, because they already exist, for instance where Beam "
        "is not installed",
    )
    dry_run: bool = field(False, "print cells, steps, tokens and time, and exit")
    step_times: str | None = field(
        None,
        "JSON of seconds per step by preset, written by benchmarks.step --output; adds the "
        "column speed-up",
        metavar="FILE",
    )
    # The sweep rejects unknown fields.
    cells: tuple[str, ...] = field((), "fields of the cells", rest=lambda words, known: None)


def run(flags: Flags) -> int:
    """Runs the sweep; returns 1 if a cell has not finished."""
    sweep = _sweep(flags)
    output = flags.output
    if not output:
        raise UserError("--output is empty: name a folder")
    if files.is_remote(output):
        raise UserError(f"--output={output}: the folder of a sweep must be local")
    output = os.path.abspath(files.local_path(output))

    from experiments.sweeps import cells, results, running

    planned = cells.plan(sweep, output)
    # Cells use the devices. This process computes only shapes, and must not hold the devices.
    environment = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"
    times = _step_times(flags.step_times, planned)
    if sweep.baseline or sweep.tune:
        results.lower_wins(sweep)  # or else the sweep would end in this error
    if flags.dry_run:
        _print_plan(sweep, planned, output)
        return 0
    files.make_folder(output)
    with lock.held(output, "sweep", "--output"), running.stoppable():
        try:
            _same_sweep(sweep, output)
            if not flags.no_prepare:
                running.prepare(planned, output, environment)
            placed = [
                (cell, key, files.join(output, cells.folder_of(cell, key)))
                for cell, key in ((cell, cell.key()) for cell in planned)
            ]
            check = functools.partial(results.outcome, metric=sweep.metric)
            tried = [each for each in placed if each[0].seed in sweep.trial_seeds]
            running.run(_to_run(tried, flags.retry), flags.workers, environment, check)
            if len(tried) < len(placed):
                others = _at_best(sweep, placed, tried)
                running.run(_to_run(others, flags.retry), flags.workers, environment, check)
                placed = tried + others
            return _report(sweep, placed, output, times)
        except running.Stopped:
            print("SIGTERM: run the same command to resume", file=sys.stderr)
            return _TERMINATED


def defined(words: Sequence[str]) -> Sweep:
    """Returns the sweep that a command line defines; the cells' configurations are not checked."""
    return _sweep(made(Flags, parse(Flags, words)))


def _sweep(flags: Flags) -> Sweep:
    sweep = definition.read(flags.file) if flags.file else Sweep("sweep")
    for text in flags.axis:
        sweep = definition.with_axis(sweep, text)
    sweep = definition.with_flags(sweep, list(flags.cells))
    changes: dict[str, object] = {}
    if flags.seeds is not None:
        try:
            changes["seeds"] = tuple(int(part) for part in flags.seeds.split(","))
        except ValueError as error:
            raise UserError(f"--seeds={flags.seeds}: give whole numbers, such as 0,1,2") from error
    if flags.baseline:
        changes["baseline"] = _baseline(sweep, flags.baseline)
    for name in ("metric", "tune", "tune_seeds"):
        if getattr(flags, name) is not None:
            changes[name] = getattr(flags, name)
    return definition.checked(dataclasses.replace(sweep, **changes))  # type: ignore[arg-type]


def _baseline(sweep: Sweep, text: str) -> dict[str, str]:
    labels = [choice.label for choice in sweep.axes[0].choices] if len(sweep.axes) == 1 else []
    if "=" not in text or text in labels:
        if not sweep.axes:
            raise UserError(f"--baseline={text}: there is no --axis whose values can be compared")
        if len(sweep.axes) != 1:
            raise UserError(f"--baseline={text}: write AXIS=VALUE, since there are several axes")
        return {sweep.axes[0].name: text}
    axis, _, label = text.partition("=")
    if any(axis == each.name and label in (c.label for c in each.choices) for each in sweep.axes):
        return {axis: label}  # which may contain commas
    return dict(pair.partition("=")[::2] for pair in filter(None, listed(text)))


def _same_sweep(sweep: Sweep, output: str) -> None:
    """Records the settings that cells share, or rejects the folder of a different sweep."""
    path = files.join(output, _SWEEP)
    if not files.exists(path):
        files.write_json(path, sweep.shared())
        return
    before, now = files.read_json(path), sweep.shared()
    if not isinstance(before, dict):
        raise UserError(f"{path} is not the record of a sweep: choose another --output")
    for part in now:
        theirs, ours = before.get(part), now[part]
        if theirs == ours:
            continue
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = sorted({*theirs, *ours})
            part = next(name for name in names if theirs.get(name) != ours.get(name))
            theirs, ours = theirs.get(part), ours.get(part)
        raise UserError(
            f"{output} holds a different sweep, whose {part} is {theirs or 'unset'}, not "
            f"{ours or 'unset'}: choose another --output"
        )


def _at_best(sweep: Sweep, placed: "list[_Placed]", tried: "list[_Placed]") -> "list[_Placed]":
    """Returns the cells not yet tried whose values are the best; none while a trial is left."""
    from experiments.sweeps import cells, results

    outcomes = [results.outcome(*each, sweep.metric) for each in tried]
    if any(outcome.status not in (cells.FINISHED, cells.FAILED) for outcome in outcomes):
        return []
    best = [dict(each) for each in results.tuned(results.curves_of(outcomes), sweep).values()]
    return [each for each in placed if each not in tried and each[0].values in best]


def _to_run(placed: "list[_Placed]", retry: bool) -> "list[_Placed]":
    from experiments.sweeps import cells

    status = [cells.load_record(folder, key).get("status") for _, key, folder in placed]
    kept = [cells.FINISHED] if retry else [cells.FINISHED, cells.FAILED]
    for word in kept:
        if count := status.count(word):
            print(f"{count} of {len(placed)} cells {word} before", flush=True)
    return [each for each, word in zip(placed, status, strict=True) if word not in kept]


def _step_times(path: str | None, planned: "list[Cell]") -> "dict[Values, float] | None":
    if not path:
        return None
    try:
        times = files.read_json(path)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"--step_times={path}: {error}; write the file with benchmarks.step --output"
        ) from error
    presets = {tuple(cell.values.items()): cell.config.preset for cell in planned}
    models: dict[str | None, object] = {}
    for cell in planned:
        preset, model = cell.config.preset, cell.config.model
        if models.setdefault(preset, model) != model:
            raise UserError(
                f"--step_times has a time for each preset, but models of {preset} differ here: "
                "leave it out"
            )
        if preset not in times:
            raise UserError(
                f"--step_times={path} lacks {preset}: measure it with "
                f"benchmarks.step --preset={preset} --output={path}"
            )
    return {values: times[preset] for values, preset in presets.items()}


def _report(
    sweep: Sweep, placed: "list[_Placed]", output: str, times: "dict[Values, float] | None"
) -> int:
    from experiments.sweeps import cells, drawing, estimating, results

    # Failures do not name the folder, so that equal sweeps have equal files.
    outcomes = [
        dataclasses.replace(each, why=each.why.replace(f"{output}/", ""))
        for each in (results.outcome(*place, sweep.metric) for place in placed)
    ]
    curves = results.curves_of(outcomes)
    lines = results.json_lines(outcomes, sweep.metric)
    files.write_bytes(files.join(output, "results.jsonl"), lines.encode())
    parameters = {
        tuple(cell.values.items()): estimating.cost(cell).parameters for cell, _, _ in placed
    }
    rates = {tuple(cell.values.items()): cells.rate(cell.config) for cell, _, _ in placed}
    text = results.table(sweep, curves, parameters, rates, times)
    notes = results.notes(sweep, outcomes)
    files.write_bytes(files.join(output, "table.md"), f"{text}\n\n{notes}\n".encode())
    print(f"{text}\n\n{notes}", flush=True)
    written = ["table.md", "results.jsonl"]
    if any(curves.values()):
        drawing.draw(sweep, curves, files.join(output, "curves.png"))
        written.append("curves.png")
    place = shlex.quote(output)
    print(f"written to {output}: {', '.join(written)}")
    print(
        f"next: {program('trainer.annexes.reports.report')} {place}/{cells.CELLS}/*/run", flush=True
    )
    left = [outcome for outcome in outcomes if outcome.status != cells.FINISHED]
    if left:
        failed = sum(each.status == cells.FAILED for each in left)
        advice = "--retry runs failed cells again" if failed else "run the same command to resume"
        print(
            f"{len(left)} of {len(outcomes)} cells have not finished; {failed} failed: {advice}",
            file=sys.stderr,
        )
    return int(bool(left))


def _print_plan(sweep: Sweep, planned: "list[Cell]", output: str) -> None:
    from experiments.sweeps import cells, estimating
    from tasks.terminal.table import table

    costs = {cell.label: estimating.cost(cell) for cell in planned}
    done = {cell.label: estimating.finished(cell, output) for cell in planned}
    over = [(cell, folder) for cell in planned if (folder := done[cell.label])]
    tried = [cell for cell in planned if cell.seed in sweep.trial_seeds]
    # The values that the other seeds run with: the best if they ran, or else the first.
    others = [cell for cell in planned if cell.seed not in sweep.trial_seeds]
    others.sort(key=lambda cell: not done[cell.label])
    at_best: dict[Sequence[str], Cell] = {}
    for cell in others:
        fixed = [value for name, value in cell.values.items() if name != sweep.tune]
        at_best.setdefault((*fixed, str(cell.seed)), cell)
    expected = [*tried, *at_best.values()]
    speed, source = estimating.speed(over, costs)
    rows = []
    for values, group in itertools.groupby(tried, lambda cell: cell.values):
        same = list(group)
        cost, left = costs[same[0].label], sum(not done[cell.label] for cell in same)
        sizes = (f"{n:,}" for n in (cost.parameters, cost.steps, cost.tokens))
        minutes = f"{cost.seconds(speed) / 60:,.1f}"
        counts = (len(same), left)
        rate = cells.rate(same[0].config)
        rows.append([*values.values(), rate, *sizes, f"{cost.operations:.2e}", minutes, *counts])
    names = (
        "learning rate",
        "parameters",
        "steps",
        "tokens",
        "FLOPs",
        "minutes",
        "seeds",
        "to run",
    )
    print(table([*planned[0].values, *names], rows))
    to_run = [costs[cell.label] for cell in expected if not done[cell.label]]
    hours = sum(cost.seconds(speed) for cost in to_run) / 3600
    if others:
        print(f"seeds after {tried[-1].seed}: at the best {sweep.tune} only")
    for command in dict.fromkeys(each for cell in planned for each in cell.prepare):
        print(f"before: python -m {shlex.join(command)}")
    print(
        f"{len(to_run)} of {len(expected)} cells to run: {sum(c.steps for c in to_run):,} steps, "
        f"{sum(c.tokens for c in to_run):,} tokens, about {hours:,.1f} hours for one worker "
        f"({speed / 1e9:,.0f} GFLOP/s, {source})"
    )


main = Command(Flags, run, waits=True)

if __name__ == "__main__":
    main.start()
