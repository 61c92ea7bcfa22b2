"""The report on a run that answered a suite."""

import pytest

from tasks.annexes.questions import scores
from tests.support.runs import config_of, trained
from tests.trainer.annexes.suites.test_suite import ROOT
from tests.trainer.annexes.suites.test_suite import questions as questions
from trainer import training
from trainer.annexes.reports import curves, report
from trainer.reporting import history


@pytest.mark.processes  # a run that is evaluated
def test_the_report_shows_every_question(text_cache, questions, tmp_path):
    flags = ["--train_steps=4", "--evaluation.every_steps=2", "--metrics.tensorboard=false"]
    suite = f"{questions},{ROOT}/tasks/annexes/questions/files/english/agreement.jsonl"
    flags += [f"--evaluation.suite={suite}", "--evaluation.examples=4"]
    model_dir = trained(text_cache, tmp_path / "model", *flags, lengths=(64, 18))
    before = scores.path(str(model_dir), "4")
    report.main([str(model_dir)])
    page = (model_dir / "report.html").read_text()
    assert page.count("<details>") == len({each.set for each in scores.read(before)}) == 2
    assert "The function [<b>returns</b> | return the] a list of the values." in page
    (chart,) = [each for each in curves.charts(history.load_all([str(model_dir)]))
                if each.title == "Right answers"]  # fmt: skip
    assert {each.label for each in chart.series} >= {"mine", "agreement"}
    assert chart.series[0].x["steps"] == [2, 4]


def test_a_finished_run_names_the_report_first():
    text = training._next(config_of("--model_dir=my runs/1"))
    assert text.startswith("next: palimpsest report 'my runs/1'\n")
