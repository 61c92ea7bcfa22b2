"""Results of a sweep: finished cells, and their table and JSON lines.

Apart from times, equal configurations, caches and kinds of device give equal bytes.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps import cells
from experiments.sweeps.cells import Cell
from experiments.sweeps.curves import Curve, Spread, steps_ratio
from experiments.sweeps.definition import Sweep, filled, is_number
from tasks.storage import files
from tasks.terminal import table as tables
from tasks.terminal.command_line import UserError
from trainer.checkpoints.early_stopping import flattened, lower_is_better, value_of
from trainer.reporting.metrics import NORMS, finite, read_metrics


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A cell and its outcome."""

    cell: Cell
    key: str
    status: str  # as recorded; "" until the cell has ended
    why: str = ""  # the cause of a failure
    # For a finished cell: metrics of the last evaluation, and the curve of the compared metric.
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curve: Curve | None = None


def outcome(cell: Cell, key: str, folder: str, metric: str) -> Outcome:
    """Returns the outcome of a cell; raises UserError if its evaluations lack the metric."""
    record = cells.load_record(folder, key)
    status, why = record.get("status", ""), record.get("why", "")
    if status != cells.FINISHED:
        return Outcome(cell, key, status, why)
    by_step: dict[int, dict[str, Mapping[str, float]]] = {}
    for line in read_metrics(files.join(folder, cell.stages[-1].folder)):
        if line["split"] not in ("train", NORMS):
            by_step.setdefault(line["step"], {})[line["split"]] = line["metrics"]
    if not by_step:
        raise UserError(f"{folder} has lost its evaluations: delete it and run the same command")
    flat = {step: flattened(results) for step, results in by_step.items()}
    values = tuple(value_of("metric", metric, each) for each in flat.values())
    known, curve = flat[max(flat)], Curve(tuple(flat), values)
    return Outcome(cell, key, status, why, known, curve)


def json_lines(outcomes: Sequence[Outcome], metric: str) -> str:
    """Returns a line of JSON per cell; numbers that are not finite become "nan" or "inf"."""
    lines = []
    for each in outcomes:
        line: dict[str, Any] = {"values": each.cell.values, "seed": each.cell.seed}
        line |= {"status": each.status or "not run", "key": each.key}
        if each.curve:
            line |= {"metric": metric, "value": each.curve.final, "metrics": each.metrics}
            line = finite({**line, "curve": dataclasses.asdict(each.curve)})
        elif each.why:
            line["why"] = each.why
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


Values = tuple[tuple[str, str], ...]
Curves = Mapping[Values, Mapping[int, Curve]]


def curves_of(outcomes: Sequence[Outcome]) -> dict[Values, dict[int, Curve]]:
    """Returns finished cells' curves by combination of the axes' values, then by seed."""
    found: dict[Values, dict[int, Curve]] = {}
    for each in outcomes:
        by_seed = found.setdefault(tuple(each.cell.values.items()), {})
        if each.curve:
            by_seed[each.cell.seed] = each.curve
    return found


def baseline_of(values: Values, baseline: Mapping[str, str]) -> Values:
    """Returns the combination to compare with: equal except on the baseline's axes."""
    return tuple((axis, baseline.get(axis, label)) for axis, label in values)


def lower_wins(sweep: Sweep) -> bool:
    """Returns whether lower values of the metric are better; raises UserError if unknown."""
    module = (sweep.then or sweep.base).get("task_module")
    module = module and filled(module, sweep.parameters)
    return lower_is_better("metric", sweep.metric, module)


def tuned(curves: Curves, sweep: Sweep) -> dict[Values, Values]:
    """Returns combination of the other axes -> combination with the best value of `tune`.

    Means over the sweep's `trial_seeds` are compared; combinations that lack one are left out.
    """
    best: dict[Values, tuple[float, Values]] = {}
    sign = 1 if lower_wins(sweep) else -1
    for values, by_seed in curves.items():
        others = tuple(pair for pair in values if pair[0] != sweep.tune)
        if by_seed.keys() >= {*sweep.trial_seeds}:
            score = sign * Spread.of([by_seed[seed].final for seed in sweep.trial_seeds]).mean
            if score == score and (others not in best or score < best[others][0]):
                best[others] = score, values
    return {others: values for others, (_, values) in best.items()}


def table(
    sweep: Sweep,
    curves: Curves,
    parameters: Mapping[Values, int],
    rates: Mapping[Values, str],
    step_times: Mapping[Values, float] | None = None,
) -> str:
    """Returns a Markdown table with one line per combination of the axes' values.

    Differences from the baseline are paired by seed. `parameters` holds counts and `rates` learning
    rates in words, by combination; `step_times` holds seconds per update, and adds a column of
    speed-ups.
    """
    best = tuned(curves, sweep) if sweep.tune else {}
    header = [axis.name for axis in sweep.axes] + ["learning rate", "parameters", "seeds"]
    header += [sweep.metric]
    header += ["minus baseline"] * bool(sweep.baseline) + ["95 % interval"]
    ratios = bool(sweep.baseline) and lower_wins(sweep)
    header += ["ratio of steps"] * ratios + ["speed-up"] * bool(ratios and step_times)
    rows = []
    for values, by_seed in curves.items():
        labels = [label for _, label in values]
        if values in best.values():
            at = [axis.name for axis in sweep.axes].index(sweep.tune)
            labels[at] = f"{labels[at]} (best{_edge(curves, sweep.tune, values)})"
        row = [*labels, rates[values], f"{parameters[values]:,}", len(by_seed)]
        row += _measured(sweep, curves, values, best)
        if ratios:
            theirs = _base(sweep, values, best)
            base = curves.get(theirs, {})
            pairs = [(base[seed], one) for seed, one in by_seed.items() if seed in base]
            ratio = Spread.of([steps_ratio(*pair) for pair in pairs]) if pairs else None
            row.append(ratio.shown(2) if ratio else "-")
            if step_times:
                row.append(
                    f"{ratio.mean * step_times[theirs] / step_times[values]:.2f}" if ratio else "-"
                )
        rows.append(row)
    return tables.table(header, rows, markdown=True)


def _base(sweep: Sweep, values: Values, best: Mapping[Values, Values]) -> Values:
    """Returns the combination to compare with; if an axis is tuned, the baseline's best."""
    theirs = baseline_of(values, sweep.baseline)
    others = tuple(pair for pair in theirs if pair[0] != sweep.tune)
    return best.get(others, theirs)


def _measured(
    sweep: Sweep, curves: Curves, values: Values, best: Mapping[Values, Values]
) -> list[str]:
    """Returns table cells: the metric, its difference from any baseline, and the interval."""
    by_seed, nothing = curves[values], ["-"] * (1 + bool(sweep.baseline))
    if not by_seed:
        return ["-", *nothing]
    own = Spread.of([each.final for each in by_seed.values()])
    if diverged := sum(not math.isfinite(each.final) for each in by_seed.values()):
        return [f"diverged ({diverged} of {len(by_seed)})", *nothing]
    if not sweep.baseline:
        return [own.shown(), own.shown_interval()]
    base = curves.get(_base(sweep, values, best), {})
    pairs = [(one.final, base[seed].final) for seed, one in by_seed.items() if seed in base]
    if not pairs or base is by_seed:
        return [own.shown(), *nothing]
    difference = Spread.of([ours - theirs for ours, theirs in pairs])
    return [own.shown(), difference.shown(sign=True), difference.shown_interval(sign=True)]


def _edge(curves: Curves, tune: str, values: Values) -> str:
    """Returns a note if a tuned value is at an end of its range, where others may be better."""
    others = [pair for pair in values if pair[0] != tune]
    tried = [
        dict(curve)[tune]
        for curve in curves
        if [pair for pair in curve if pair[0] != tune] == others
    ]
    if not all(map(is_number, tried)):
        return ""
    numbers = [float(each) for each in tried]
    return ", at the edge" if float(dict(values)[tune]) in (min(numbers), max(numbers)) else ""


def notes(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """Returns the text below the table, which explains its columns and lists failed cells."""
    lines = [
        f"{sweep.metric} of the last evaluation: mean ± standard deviation over seeds; intervals "
        f"are Student's, of the mean{' difference, paired by seed' if sweep.baseline else ''}."
    ]
    if sweep.baseline:
        shown = ", ".join(f"{axis}={label}" for axis, label in sweep.baseline.items())
        tuned_too = f", each at its best {sweep.tune}" if sweep.tune else ""
        if sweep.trial_seeds != sweep.seeds:
            tuned_too += f" by seed {', '.join(map(str, sweep.trial_seeds))}"
        lines.append(f"Baseline: {shown}, with equal values on the other axes{tuned_too}.")
    for each in outcomes:
        if each.status == cells.FAILED:
            lines.append(f"Failed: {each.cell.label}: {each.why}")
    return "\n".join(lines)
