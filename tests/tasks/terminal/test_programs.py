"""Advice names commands as the user's own command line does."""

import pytest

from palimpsest import __main__ as palimpsest
from tasks.terminal.programs import program
from trainer import evaluate


def test_a_module_is_run_by_python_unless_it_has_a_short_name(monkeypatch):
    seen = []
    kind = type(evaluate.main)
    monkeypatch.setattr(kind, "start", lambda *_: seen.append(program("vocab.train")))
    with pytest.raises(SystemExit):  # a real `start` never returns
        palimpsest.main(["evaluate", "run"])
    assert seen == ["palimpsest vocab train"]
    assert program("vocab.train") == "python -m vocab.train"
    assert program("tests.laboratory") == "python -m tests.laboratory"
