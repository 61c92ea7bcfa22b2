"""Metrics of labels and numbers on small examples with known values."""

import pytest

from tasks.metrics.metric import METRICS
from tasks.terminal.command_line import UserError


def value(name, targets, predictions):
    return METRICS[name](targets, predictions)[name]


def test_labels():
    assert value("accuracy", [1, 0, 1, 1], [1, 0, 0, -1]) == 50
    assert value("accuracy", ["a", "b"], ["a", "c"]) == 50
    pytest.importorskip("sklearn")
    assert value("f1", [1, 0, 1, 1], [1, 1, 0, -1]) == pytest.approx(100 * 2 / 5)
    assert value("f1", [1, 0], [1, -1]) == pytest.approx(100 * 2 / 3)
    assert value("matthews", [1, 0, 1, 0], [1, 0, 1, 0]) == pytest.approx(100)
    assert value("matthews", [1, 0, 1, 0], [0, 1, 0, 1]) == pytest.approx(-100)
    # Of classes among the targets alone: a 2/3, b 0.
    assert value("macro_f1", ["a", "b"], ["a", "a"]) == pytest.approx(100 / 3)


def test_correlations():
    pytest.importorskip("scipy")
    assert value("spearman", [1, 2, 3], ["1", "10", "11"]) == pytest.approx(100)
    assert value("pearson", [1.0, 2.0, 3.0], [2, 4, 6]) == pytest.approx(100)
    assert value("pearson", [1.0, 2.0], ["no", "number"]) == 0
    for odd in ("nan", "inf", "1e400"):
        assert value("pearson", [1, 2, 3], ["1", "2", odd]) == value(
            "pearson", [1, 2, 3], [1, 2, -1]
        )


def test_targets_of_another_kind_are_one_line():
    texts = ["equivalent", "not_equivalent"]
    with pytest.raises(UserError, match="a target is 'equivalent': use macro_f1"):
        METRICS["f1"](texts, texts)
    with pytest.raises(UserError, match="targets with a group and a value"):
        METRICS["grouped_exact_match"](texts, texts)
