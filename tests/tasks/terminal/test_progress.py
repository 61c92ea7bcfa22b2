"""Progress on terminals of any width, in files and in notebooks."""

import io
import sys
import types

import pytest
from rich.console import Console

from tasks.terminal import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_and_its_note_fit_the_terminal(monkeypatch, width):
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    note = "starting; the first build on a machine also compiles its tokenizer"
    with progress.shown("building", 884_800, 0, "B") as bar:
        bar.update(442_400, note)
        paper = Console(file=io.StringIO(), width=width)
        paper.print(bar.bar.get_renderable())
    first, *rest = paper.file.getvalue().rstrip().split("\n")
    assert "442.4/884.8 kB" in first
    assert " ".join(" ".join(rest).split()) == note
    assert len(rest) == 1 + (width < len(note))


def test_a_line_that_says_nothing_new_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    with progress.shown("building", 200e6, 0, "B") as bar:
        for done, note in ((0, "starting"), (0, "starting"), (0, "still"), (0, "still")):
            bar.update(done, note)
    assert capsys.readouterr().err.splitlines() == [
        "building    0%  0.0/200.0 MB  ? left  starting",
        "building    0%  0.0/200.0 MB  ? left  still",
    ]


class Handle:
    """A display of a notebook, which keeps what each message shows."""

    shown: list[tuple[str, str]] = []

    def display(self, content, raw):
        self.shown.append(("display", content["text/plain"]))

    def update(self, content, raw):
        self.shown.append(("update", content["text/plain"]))


@pytest.fixture
def cell(monkeypatch):
    """Returns the messages that a notebook gets while this process is its kernel."""
    shell = types.SimpleNamespace(kernel=1)
    display = types.SimpleNamespace(DisplayHandle=Handle)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(Handle, "shown", [])
    monkeypatch.setattr(progress, "_CELL_SECONDS", 0)
    return Handle.shown


def test_a_notebook_has_one_bar_that_stays(cell):
    with progress.shown("training", 4) as bar:
        bar.update(1)
        bar.update(3, "loss 2")
        bar.update(4, "loss 1")
    assert [way for way, _ in cell] == ["display"] + ["update"] * 4
    texts = [text for _, text in cell]
    assert texts[0] == f"training  {'┈' * 24}    0%  0/4  ? left"
    assert texts[1] == f"training  {'━' * 6}{'┈' * 18}   25%  1/4  0:00 left"
    assert texts[2].endswith(" left\n  loss 2")
    assert texts[-1] == f"training  {'━' * 24}  100%  4/4  in 0:00\n  loss 1"


def test_a_notebook_is_told_twice_a_second_at_most(cell, monkeypatch):
    monkeypatch.setattr(progress, "_CELL_SECONDS", 1000)
    with progress.shown("training", 10_000) as bar:
        for done in range(10_000):
            bar.update(done)
    assert len(cell) == 2
    assert "9,999/10,000" in cell[-1][1]


def test_a_bar_within_another_is_below_it_until_it_ends(cell):
    with progress.shown("training", 4) as outer:
        outer.update(2)
        with progress.shown("evaluating", 2) as inner:
            inner.update(1)
        outer.update(4)
    assert [way for way, _ in cell].count("display") == 1
    texts = [text for _, text in cell]
    assert [len(text.splitlines()) for text in texts] == [1, 1, 2, 2, 1, 1, 1]
    assert "evaluating" in texts[3].splitlines()[1]
    assert texts[4].startswith("training")


def test_ipython_on_a_terminal_is_no_notebook(cell, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: types.SimpleNamespace())
    with progress.shown("training", 4):
        pass
    assert not cell
