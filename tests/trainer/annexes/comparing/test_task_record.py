"""Examples that a changed module makes otherwise."""

import json
import os

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.data.test_task_record import run_of as run_of
from trainer.annexes.comparing.explanation import Explanation
from trainer.config import load_record, save_config
from trainer.data.task_record import warn_of_changes


def test_explain_and_evaluate_notice_another_module(run_of, tmp_path, capsys):
    run = run_of("my_spans")
    model_dir = str(tmp_path / "model")
    os.mkdir(model_dir)
    save_config(run.config, {}, run.data.record)
    assert load_record(model_dir) == json.loads(json.dumps(run.data.record))
    Explanation(model_dir, 3)
    warn_of_changes(model_dir, run.data.tasks_record)
    assert not capsys.readouterr().err
    now = run_of("my_spans", density=0.3)
    with pytest.raises(UserError, match=r"different examples \(objective of my_spans: mask\.noise"):
        Explanation(model_dir, 3)
    warn_of_changes(model_dir, now.data.tasks_record)
    lines = capsys.readouterr().err.splitlines()
    assert "objective of my_spans: mask.noise_density was 0.15, is 0.3" in lines[0]
