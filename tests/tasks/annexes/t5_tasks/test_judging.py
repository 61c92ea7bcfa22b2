"""Predictions on caches of pairs, judged by T5's tasks."""

import sys

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.conftest import pairs_and_text as pairs_and_text
from tests.trainer.conftest import text_cache as text_cache
from tests.trainer.data.test_pairs import PAIRS, run_of


def test_predictions_are_judged_as_a_supervised_task_does(pairs_and_text):
    flags = ("--evaluation.supervised=glue_stsb", "--evaluation.metrics=task,exact_match")
    (examples,) = run_of(pairs_and_text, PAIRS, *flags).data.examples("validation")
    assert [metric.name for metric in examples.predicted] == ["pearson", "spearman", "exact_match"]
    first, second = examples.read(2)
    # Words are no similarities.
    assert (first.target, second.target) == (-1.0, -1.0)
    assert examples.postprocess("3.4", first) == 3.4
    flags = ("--evaluation.supervised=super_glue_multirc",)
    (examples,) = run_of(pairs_and_text, PAIRS, *flags).data.examples("validation")
    with pytest.raises(UserError, match="multirc reads 'group' of examples, but caches do not"):
        examples.read(1)
    with pytest.raises(UserError, match="unknown supervised task glue_sts "):
        run_of(pairs_and_text, PAIRS, "--evaluation.supervised=glue_sts").data.examples(
            "validation"
        )
    assert run_of(pairs_and_text, PAIRS).data.examples("validation") == []


def test_packages_of_a_supervised_tasks_metrics_are_asked_for_first(pairs_and_text, monkeypatch):
    data = run_of(pairs_and_text, PAIRS, "--evaluation.supervised=glue_stsb").data
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match="the metric pearson needs the package scipy"):
        data.examples("validation")
