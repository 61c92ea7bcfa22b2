"""Finds the first report whose metrics are not bit for bit the same in two runs."""

import math
import struct
from typing import Any, NamedTuple

from trainer.reporting.history import History


class Report(NamedTuple):
    """A differing line of metrics, both values by name, and the last equal step of its split."""

    step: int
    split: str
    metrics: dict[str, tuple[Any, Any]]
    after: int


class Compared(NamedTuple):
    """The first differing line or None, the number of common lines, and the last common step."""

    first: Report | None
    lines: int
    last: int


def compare(one: History, other: History) -> Compared:
    """Compares the metrics lines common to both runs, ignoring speed."""
    sides = [
        {(line["step"], line["split"]): line["metrics"] for line in each.lines}
        for each in (one, other)
    ]
    common = sorted(sides[0].keys() & sides[1].keys())
    equal: dict[str, int] = {}
    for step, split in common:
        before, now = sides[0][step, split], sides[1][step, split]
        differ = {
            name: (before.get(name), now.get(name))
            for name in dict.fromkeys([*before, *now])
            if not same(before.get(name), now.get(name))
        }
        if differ:
            first = Report(step, split, differ, equal.get(split, 0))
            return Compared(first, len(common), common[-1][0])
        equal[split] = step
    return Compared(None, len(common), common[-1][0] if common else 0)


def same(one: Any, other: Any) -> bool:
    """Returns whether two values have the same bits; NaN equals NaN."""
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and one == other
