"""Progress of long operations: a bar on a terminal or in a notebook, otherwise lines.

There is a line every ten seconds; one that says nothing new is left out.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_LINE_SECONDS = 10.0
_CELL_SECONDS = 0.5
# Columns of a bar, and of what stands beside it without the description: spinner, amounts, times.
_NARROWEST, _WIDEST, _BESIDE_BAR = 10, 40, 44
_CELL_COLUMNS = 24
# The bars that are shown in cells, each in the block of the one before.
_in_cells: list["Progress"] = []


class Progress:
    """Shows progress towards `total` (None if unknown). Use `shown`, which closes it.

    `unit` is "" for counts, "B" for bytes.
    """

    def __init__(self, description: str, total: float | None, done: float = 0, unit: str = ""):
        self._description, self._total, self._before, self._unit = description, total, done, unit
        self._begin = self._shown = time.monotonic()
        self.bar: Any = None
        self._line = ""
        self._last = done, ""
        self._outer = next(reversed(_in_cells), None)
        self._cell = _cell()
        if self._cell:
            _in_cells.append(self)
            self._show()
        elif sys.stderr.isatty():
            self.bar = _bar(description, unit)
            self._task = self.bar.add_task(description, total=total, completed=done)
            self.bar.start()

    def update(self, done: float, note: str = "") -> None:
        """Shows that `done` units are done, including earlier ones."""
        self._last = done, note
        if self.bar:
            self.bar.note = note
            self.bar.update(self._task, completed=done)
        elif time.monotonic() - self._shown >= (_CELL_SECONDS if self._cell else _LINE_SECONDS):
            self._shown = time.monotonic()
            if self._cell:
                self._show()
                return
            parts = [self._description, self._amount(done), self._left(done), note]
            line = "  ".join(filter(None, parts))
            if line != self._line:
                print(line, file=sys.stderr, flush=True)
            self._line = line

    def end(self) -> None:
        """Leaves the last state on the screen, or in the output of a cell."""
        if self.bar:
            self.bar.stop()
        elif self._cell:
            _in_cells.remove(self)
            if self._outer:
                self._outer._show()
            else:
                self._show(over=True)

    def _show(self, over: bool = False, below: str = "") -> None:
        """Shows the bar in a cell, below the one in whose block it is, which replaces it later."""
        assert self._cell
        text = self._text(*self._last, over) + below
        if self._outer:
            self._outer._show(below=f"\n{text}")
        else:
            self._cell(text)

    def _text(self, done: float, note: str, over: bool) -> str:
        """Returns the bar of a cell, with the time left or, when it is `over`, taken."""
        bar, passed = "", time.monotonic() - self._begin
        if self._total:
            full = round(_CELL_COLUMNS * min(done / self._total, 1))
            bar = "━" * full + "┈" * (_CELL_COLUMNS - full)
        times = f"in {clock(passed)}" if over else self._left(done) or clock(passed)
        line = "  ".join(filter(None, [self._description, bar, self._amount(done), times]))
        return f"{line}\n  {note}" if note else line

    def _amount(self, done: float) -> str:
        if not self._total:
            return ""
        amounts = f"{done:,.0f}/{self._total:,.0f}"
        if self._unit == "B":
            amounts = f"{done / 1e6:,.1f}/{self._total / 1e6:,.1f} MB"
        return f"{done / self._total:4.0%}  {amounts}"

    def _left(self, done: float) -> str:
        if not self._total:
            return ""
        passed, seconds = done - self._before, time.monotonic() - self._begin
        return f"{clock(seconds / passed * (self._total - done)) if passed > 0 else '?'} left"


def _cell() -> Callable[[str], None] | None:
    """Returns a function that shows a text in a notebook's cell, in place of the one before.

    Returns None elsewhere, as in IPython on a terminal.
    """
    ipython = sys.modules.get("IPython")
    if not ipython or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    handle = ipython.display.DisplayHandle()
    ways = iter([handle.display])
    return lambda text: next(ways, handle.update)({"text/plain": text}, raw=True)


def _bar(description: str, unit: str) -> Any:
    """Returns a bar as wide as the terminal permits, with its attribute `note` on a line below."""
    from rich import progress
    from rich.console import Console, RenderableType
    from rich.text import Text

    class Bar(progress.Progress):
        note = ""

        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.note:
                yield Text(f"  {self.note}")

    console = Console(stderr=True)
    width = console.width - len(description) - _BESIDE_BAR
    return Bar(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(max(_NARROWEST, min(_WIDEST, width))),
        progress.DownloadColumn() if unit == "B" else progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def shown(
    description: str, total: float | None, done: float = 0, unit: str = ""
) -> Iterator[Progress]:
    """Yields a Progress and closes it at the end of the block."""
    progress = Progress(description, total, done, unit)
    try:
        yield progress
    finally:
        progress.end()


def clock(seconds: float) -> str:
    """Returns "M:SS", or "H:MM:SS" from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
