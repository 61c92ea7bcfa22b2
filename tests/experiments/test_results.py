"""Tables of sweeps: pairs by seed, best values of a tuned axis, failed cells."""

import dataclasses
import json
import math
import sys
import types

import pytest

from experiments.sweeps import cells, drawing, results
from experiments.sweeps.cells import Cell
from experiments.sweeps.curves import Curve
from experiments.sweeps.definition import Axis, Choice, Sweep
from experiments.sweeps.results import Outcome
from tasks.metrics.metric import Metric
from tasks.terminal.command_line import UserError


def axis(name, *labels):
    return Axis(name, tuple(Choice(label, {name: label}) for label in labels))


def outcome(values, seed, final, status=cells.FINISHED, why=""):
    curve = Curve((1, 2), (9.0, final)) if status == cells.FINISHED else None
    return Outcome(Cell(values, seed, (), ()), "k", status, why, {"loss": final}, curve)


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def constant(curves):
    """Returns equal numbers of parameters and learning rates."""
    return {values: 1 for values in curves}, {values: "0.1" for values in curves}


ARMS = Sweep("s", axes=(axis("arm", "a", "b"),), seeds=(0, 1), baseline={"arm": "a"})


def test_differences_are_paired_by_seed():
    outcomes = [
        *(outcome({"arm": "a"}, seed, final) for seed, final in ((0, 4.0), (1, 5.0))),
        *(outcome({"arm": "b"}, seed, final) for seed, final in ((0, 3.9), (1, 4.8), (7, 1.0))),
    ]
    curves = results.curves_of(outcomes)
    sizes = {values: 1000 for values in curves}
    rates = {values: "0.01 to the end" for values in curves}
    header, _, base, other = rows(results.table(ARMS, curves, sizes, rates))
    assert header == [
        *("arm", "learning rate", "parameters", "seeds", "loss", "minus baseline", "95 % interval"),
        "ratio of steps",
    ]
    assert base[:6] == ["a", "0.01 to the end", "1,000", "2", "4.5000 ± 0.7071", "-"]
    # Of seeds 0 and 1 alone: 3 of the seeds have run, and the baseline has no seed 7.
    assert other[3] == "3"
    assert other[5] == "-0.1500 ± 0.0707"
    # 12.706 is Student's quantile of one degree of freedom.
    assert other[6] == "-0.7853 to +0.4853"
    times = {(("arm", "a"),): 1.0, (("arm", "b"),): 2.0}
    with_times = rows(results.table(ARMS, curves, sizes, rates, times))
    assert float(with_times[3][-1]) == pytest.approx(float(other[7].split()[0]) / 2, abs=0.011)


def test_a_diverged_cell_is_worse_and_json(tmp_path):
    outcomes = [
        outcome({"arm": "a"}, 0, 4.0),
        outcome({"arm": "b"}, 0, math.nan),
        outcome({"arm": "b"}, 1, math.inf),
    ]
    curves = results.curves_of(outcomes)
    _, _, _, other = rows(results.table(ARMS, curves, *constant(curves)))
    assert other[4:] == ["diverged (2 of 2)", "-", "-", "-"]
    lines = [json.loads(line) for line in results.json_lines(outcomes, "loss").splitlines()]
    assert [line["value"] for line in lines] == [4.0, "nan", "inf"]


@pytest.mark.parametrize(
    ("tried", "note"),
    [(("1", "3", "2"), "(best, at the edge)"), (("3", "1", "0.5"), "(best, at the edge)"),
     (("2", "3", "10"), "(best)"), (("2", "x", "3"), "(best)")],
)  # fmt: skip
def test_an_edge_is_by_number_whatever_the_order(tried, note):
    sweep = Sweep("s", axes=(axis("rate", *tried),), tune="rate")
    finals = {label: 1.0 if label == "3" else 2.0 for label in tried}
    curves = results.curves_of([outcome({"rate": n}, 0, finals[n]) for n in tried])
    shown = results.table(sweep, curves, *constant(curves))
    assert f"3 {note}" in shown


def test_a_tuned_axis_takes_its_best_value_with_all_seeds():
    sweep = Sweep(
        "s", axes=(axis("arm", "a", "b"), axis("rate", "1", "2", "3")), seeds=(0, 1),
        baseline={"arm": "a"}, tune="rate",
    )  # fmt: skip
    finals = {
        ("a", "1"): (5.0, 5.0), ("a", "2"): (4.0, 4.2), ("a", "3"): (6.0, 6.0),
        ("b", "1"): (3.0, 3.2), ("b", "2"): (5.0, 5.0), ("b", "3"): (0.1, None),
    }  # fmt: skip
    outcomes = [
        outcome({"arm": arm, "rate": rate}, seed, final)
        if final is not None
        else outcome({"arm": arm, "rate": rate}, seed, 0.0, cells.FAILED, "loss is nan")
        for (arm, rate), both in finals.items()
        for seed, final in enumerate(both)
    ]
    curves = results.curves_of(outcomes)
    found = rows(results.table(sweep, curves, *constant(curves)))
    best = [row for row in found if "best" in row[1]]
    assert [row[:2] for row in best] == [["a", "2 (best)"], ["b", "1 (best, at the edge)"]]
    # Compared with the baseline's best, not with its equal rate.
    assert best[1][6] == "-1.0000 ± 0.0000"
    del curves[("arm", "a"), ("rate", "1")]  # tried with one arm only
    times = {values: 1.0 + (values[0][1] == "b") for values in curves}
    timed = rows(results.table(sweep, curves, *constant(curves), times))
    ratio, speed_up = next(row for row in timed if row[:2] == best[1][:2])[-2:]
    assert float(speed_up) == pytest.approx(float(ratio.split()[0]) / 2, abs=0.01)
    assert "Failed: arm=b, rate=3, seed 1: loss is nan" in results.notes(sweep, outcomes)
    lines = [json.loads(line) for line in results.json_lines(outcomes, "loss").splitlines()]
    assert lines[0]["value"] == 5.0
    assert lines[0]["curve"] == {"steps": [1, 2], "values": [9.0, 5.0]}
    assert lines[-1]["why"] == "loss is nan"


def test_a_tuned_axis_is_chosen_by_its_trial_seeds_only():
    """The mean of both seeds would choose the other rate."""
    sweep = Sweep(
        "s", axes=(axis("arm", "a", "b"), axis("rate", "1", "2")), seeds=(0, 1),
        baseline={"arm": "a"}, tune="rate", tune_seeds=1,
    )  # fmt: skip
    outcomes = [
        *(outcome({"arm": "a", "rate": rate}, 0, final) for rate, final in (("1", 3), ("2", 4))),
        *(outcome({"arm": "b", "rate": rate}, 0, final) for rate, final in (("1", 2), ("2", 1))),
        outcome({"arm": "a", "rate": "1"}, 1, 9.0), outcome({"arm": "b", "rate": "2"}, 1, 7.0),
        outcome({"arm": "b", "rate": "1"}, 1, -9.0),
    ]  # fmt: skip
    curves = results.curves_of(outcomes)
    found = rows(results.table(sweep, curves, *constant(curves)))[2:]
    assert [row[1] for row in found] == ["1 (best, at the edge)", "2", "1", "2 (best, at the edge)"]
    assert [row[4] for row in found] == ["2", "1", "2", "2"]
    assert found[3][6] == "-2.0000 ± 0.0000"
    assert "each at its best rate by seed 0." in results.notes(sweep, outcomes)


def test_higher_is_better_of_accuracy():
    sweep = Sweep("s", axes=(axis("rate", "1", "2"),), metric="accuracy", tune="rate")
    outcomes = [outcome({"rate": "1"}, 0, 0.5), outcome({"rate": "2"}, 0, 0.6)]
    assert results.tuned(results.curves_of(outcomes), sweep) == {(): (("rate", "2"),)}


def test_the_direction_of_a_users_metric_is_in_its_module(monkeypatch):
    odd = Metric("odd", lambda targets, predictions: {}, lower_is_better=False)
    monkeypatch.setitem(sys.modules, "my_metrics", types.SimpleNamespace(METRICS=(odd,)))
    sweep = Sweep("s", base={"task_module": "my_metrics"}, metric="odd")
    assert not results.lower_wins(sweep)
    named = {"base": {"task_module": "{module}"}, "parameters": {"module": "my_metrics"}}
    assert not results.lower_wins(dataclasses.replace(sweep, **named))
    with pytest.raises(UserError, match="unknown whether lower is better"):
        results.lower_wins(dataclasses.replace(sweep, base={}))


def test_seeds_that_stopped_early_are_drawn_as_far_as_all_of_them():
    drawn = []
    panel = types.SimpleNamespace(
        plot=lambda x, y, **_: drawn.append((x, y)), fill_between=lambda *_, **__: None
    )
    drawing._band(panel, [{1: 3.0, 2: 2.0, 3: 1.0}, {1: 5.0, 2: 4.0}, {}], "C0", "a")
    assert drawn == [([1, 2], [4.0, 3.0])]


def test_equal_curves_give_equal_pictures(tmp_path):
    outcomes = [outcome({"arm": arm}, seed, 4.0 + seed) for arm in "ab" for seed in (0, 1)]
    for name in ("one.png", "two.png"):
        drawing.draw(ARMS, results.curves_of(outcomes), str(tmp_path / name))
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert len(one) > 10_000
