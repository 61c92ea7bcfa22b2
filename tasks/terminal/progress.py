"""Progress of long operations: a bar on a terminal, otherwise a line every ten seconds.

A line that says nothing new is left out.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_LINE_SECONDS = 10.0
# Columns of a bar, and of what stands beside it without the description: spinner, amounts, times.
_NARROWEST, _WIDEST, _BESIDE_BAR = 10, 40, 44


class Progress:
    """Shows progress towards `total` (None if unknown). Use `shown`, which closes it.

    `unit` is "" for counts, "B" for bytes.
    """

    def __init__(self, description: str, total: float | None, done: float = 0, unit: str = ""):
        self._description, self._total, self._before, self._unit = description, total, done, unit
        self._begin = self._shown = time.monotonic()
        self.bar: Any = None
        self._line = ""
        if sys.stderr.isatty():
            self.bar = _bar(description, unit)
            self._task = self.bar.add_task(description, total=total, completed=done)
            self.bar.start()

    def update(self, done: float, note: str = "") -> None:
        """Shows that `done` units are done, including earlier ones."""
        if self.bar:
            self.bar.note = note
            self.bar.update(self._task, completed=done)
        elif time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            parts = [self._description, *([self._amount(done)] if self._total else []), note]
            line = "  ".join(filter(None, parts))
            if line != self._line:
                print(line, file=sys.stderr, flush=True)
            self._line = line

    def _amount(self, done: float) -> str:
        assert self._total
        passed = done - self._before
        left = "?"
        if passed > 0:
            left = clock((time.monotonic() - self._begin) / passed * (self._total - done))
        amounts = f"{done:,.0f}/{self._total:,.0f}"
        if self._unit == "B":
            amounts = f"{done / 1e6:,.1f}/{self._total / 1e6:,.1f} MB"
        return f"{done / self._total:4.0%}  {amounts}  {left} left"


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
        if progress.bar:  # it stays on the screen
            progress.bar.stop()


def clock(seconds: float) -> str:
    """Returns "M:SS", or "H:MM:SS" from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
