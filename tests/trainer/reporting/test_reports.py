"""What a run shows while it trains."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.support.runs import config_of, stub
from trainer.engine.guard import new_guard
from trainer.reporting import reports, startup


@pytest.fixture
def shown(monkeypatch):
    """Returns a function that reports updates 1 to `last`, and returns the notes by update."""
    monkeypatch.setattr(reports, "Speed", SimpleNamespace(of=lambda *_: None))

    def notes(last):
        found = reports.Reports(stub(config_of()), None, None, None, None)
        by_update = {}
        for step in range(1, last + 1):
            loss = jnp.float32(step), jnp.float32(2)
            found.after(step, SimpleNamespace(metrics={"loss": loss}, guard=new_guard()))
            by_update[step] = found.note
        return by_update

    return notes


def test_the_loss_is_shown_before_the_first_report(shown):
    notes = shown(10)
    assert notes[1] == ""
    assert notes[2] == "loss 0.500"
    assert notes[3] == notes[4] == "loss 1.000"
    assert notes[5] == notes[8] == "loss 2.000"
    assert notes[9] == notes[10] == "loss 4.000"


def test_lines_fit_the_terminal_and_stay_whole_in_files(monkeypatch):
    line = f"{'this run':<13} {'words of a run ' * 10}".rstrip()
    assert startup._filled(line) == line
    monkeypatch.setattr(startup.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    broken = startup._filled(line).split("\n")
    assert len(broken) == 4
    assert all(len(each) <= 60 for each in broken)
    assert all(each.startswith(" " * 14) for each in broken[1:])
