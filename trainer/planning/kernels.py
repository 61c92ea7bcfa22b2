"""Cycles of Pallas kernels on a TPU, from the schedule that libtpu writes of each.

The compiler estimates cycles of fusions but not of kernels. It can write each kernel's final
instruction bundles, a bundle being about one cycle; loops, the grid's among them, are marked and
end with a comparison with their count. Waiting for HBM is not in them.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile

from trainer.engine.kernel_schedule import dump_flags

# "  0x27 LB: >> { … }": a bundle in two loops, the first one of a loop's body.
_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s*(?P<mark>[A-Z]{2})?\s*:\s*(?P<depth>>*)\s*\{")
_EXIT = re.compile(r"scmp\.ge\.[su]32\S* %\w+, (\d+) /\* loop exit test \*/")
# The grid's loop runs twice more, to fetch ahead and to write behind.
_STAGES = 2


class Schedules:
    """The folder that libtpu writes schedules to; make it before libtpu is loaded."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="schedules_", ignore_cleanup_errors=True)
        arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
        # libtpu reads them once, when it is loaded.
        flags = dump_flags(self._folder.name)
        os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {flags}".strip()

    def cycles(self, name: str) -> int | None:
        """Returns the cycles of a custom call by its name; None if it has no schedule."""
        pattern = f"*-{glob.escape(name)}-*-final_bundles.txt"
        found = [
            path
            for path in sorted(glob.glob(os.path.join(self._folder.name, pattern)))
            if "schedule-analysis" not in path
        ]
        if not found:
            return None
        with open(found[-1]) as file:
            return bundles(file.read())

    def clear(self) -> None:
        """Removes the schedules of the programs compiled so far, whose names may come again."""
        for path in glob.glob(os.path.join(glob.escape(self._folder.name), "*")):
            os.remove(path)


def bundles(text: str) -> int:
    """Returns the bundles that a kernel executes, loops included, from its `final_bundles`."""
    total, loops = 0, _Loops()
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            total += loops.next(len(found["depth"]), found["mark"] == "LB")
            loops.note(_EXIT.search(line), "stage = " in line)
    return total + loops.close(0)


class _Loops:
    """The loops around a bundle; the bundles of each are multiplied where it ends."""

    def __init__(self) -> None:
        # For each loop, outermost first: bundles so far, runs, whether it is a pipeline of a grid.
        self._open: list[tuple[int, int, bool]] = []

    def next(self, depth: int, begins: bool) -> int:
        """Counts a bundle; returns the bundles to count outside of all loops."""
        outside = self.close(depth - 1 if begins else depth)
        while len(self._open) < depth:
            self._open.append((0, 1, False))
        return outside + self._add(1)

    def note(self, exit_test: re.Match | None, staged: bool) -> None:
        """Notes what the last bundle says of the loop that it is in."""
        if self._open:
            count, runs, grid = self._open[-1]
            runs = int(exit_test[1]) if exit_test else runs
            self._open[-1] = (count, runs, grid or (staged and len(self._open) == 1))

    def close(self, depth: int) -> int:
        """Ends the loops deeper than `depth`; returns the bundles to count outside of all."""
        outside = 0
        while len(self._open) > depth:
            count, runs, grid = self._open.pop()
            times = max(runs - _STAGES * grid, 1)
            outside += self._add(count * times)
        return outside

    def _add(self, count: int) -> int:
        if not self._open:
            return count
        total, runs, grid = self._open[-1]
        self._open[-1] = (total + count, runs, grid)
        return 0
