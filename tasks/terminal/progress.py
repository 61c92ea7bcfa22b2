"""Progress of long operations: a bar on a terminal, otherwise a line every ten seconds."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_LINE_SECONDS = 10.0


class Progress:
    """Shows progress towards `total` (None if unknown). Use `shown`, which closes it.

    `unit` is "" for counts, "B" for bytes.
    """

    def __init__(self, description: str, total: float | None, done: float = 0, unit: str = ""):
        self._description, self._total, self._before, self._unit = description, total, done, unit
        self._begin = self._shown = time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self.bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn() if unit == "B" else progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self.bar.add_task(description, total=total, completed=done, note="")
            self.bar.start()

    def update(self, done: float, note: str = "") -> None:
        """Shows that `done` units are done, including earlier ones."""
        if self.bar:
            self.bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            parts = [self._description, *([self._amount(done)] if self._total else []), note]
            print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)

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
