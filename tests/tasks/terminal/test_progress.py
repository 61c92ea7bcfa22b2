"""Progress on terminals of any width, and in files."""

import io

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
