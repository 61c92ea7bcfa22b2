"""The wall time of runs in their report."""

import json

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.annexes.reports.test_report import made, parsed, training
from tests.trainer.monitoring.test_goodput import entry
from trainer.annexes.reports import report
from trainer.annexes.reports.page import results
from trainer.monitoring import goodput
from trainer.reporting import history


def test_the_report_shows_wall_time(tmp_path, capsys):
    folder = made(tmp_path / "a", training([10, 20]))
    first = entry(100.0, 0, 8, [(5, 50.0)], stepping=80.0)
    entries = [first, entry(200.0, 5, 9, [(20, 40.0)], stepping=3600.0)]
    path = tmp_path / "a" / goodput.GOODPUT_FILE
    path.write_text(json.dumps({"processes": entries}))
    text = parsed(folder).text
    assert "Wall time by use" in text
    for words in ("lost", "work after the checkpoint", "down", "1:00:50", "1:01:50"):
        assert words in text
    assert "evaluating" not in text
    assert "2 processes, one after another" in text
    assert dict(results(history.load(folder, "a")))["goodput"] == "98.4% of 1:01:50"
    report.main([folder])
    assert "98.4% of 1:01:50" in capsys.readouterr().out
    line = "goodput       98.4% of 1:01:50 in 2 processes; starting 0.5%, lost 0.8%, down 0.3%"
    assert goodput.text(entries) == line


def test_a_run_without_a_record_and_a_damaged_record_are_named(tmp_path):
    folder = made(tmp_path / "a", training([10]))
    assert "a did not record its wall time." in parsed(folder).text
    for damaged in ("{", '{"processes": [{"began": 1}]}', "[]"):
        (tmp_path / "a" / goodput.GOODPUT_FILE).write_text(damaged)
        with pytest.raises(UserError, match=r"goodput\.json is "):
            history.load(folder, "a")
