"""Stretches of data that a run does not train on: `--data.skip`."""

import re
from collections.abc import Sequence


class Skips:
    """The batches that updates read, if some batches are left out.

    Batches and updates count from 1. Update u reads the u-th batch that is kept, so each later
    update reads a later batch than it would have. `ranges` are (first batch left out, next kept).
    """

    def __init__(self, texts: Sequence[str] = ()):
        """`texts` are ranges FIRST:NEXT; raises ValueError unless they ascend without overlap."""
        self.ranges: list[tuple[int, int]] = []
        last = 1
        for text in texts:
            found = re.fullmatch(r"(\d+):(\d+)", text)
            if not found or not last <= int(found[1]) < int(found[2]) < 2**31:
                raise ValueError(f"{text} is not a range FIRST:NEXT after those before it")
            last = int(found[2])
            self.ranges.append((int(found[1]), last))

    def batch(self, update: int) -> int:
        """Returns the batch that an update reads; also how many have passed after it, 0 for 0."""
        for first, following in self.ranges:
            if update >= first:
                update += following - first
        return update

    def updates(self, batch: int) -> int:
        """Returns how many updates read the batches up to this one."""
        return batch - sum(following - first for first, following in self.up_to(batch))

    def up_to(self, batch: int) -> list[tuple[int, int]]:
        """Returns the ranges left out up to a batch, cut after it; adjacent ones are one."""
        found: list[tuple[int, int]] = []
        for first, following in self.ranges:
            following = min(following, batch + 1)
            if found and found[-1][1] == first < following:
                found[-1] = (found[-1][0], following)
            elif first < following:
                found.append((first, following))
        return found


def is_valid(texts: Sequence[str]) -> bool:
    """Returns whether `Skips` takes the texts."""
    try:
        Skips(texts)
    except ValueError:
        return False
    return True


def described(ranges: Sequence[tuple[int, int]]) -> str:
    """Returns ranges in words: "batches 3 to 4 and 9"."""
    parts = [
        f"{first:,} to {end - 1:,}" if end - first > 1 else f"{first:,}" for first, end in ranges
    ]
    plural = "es" * (len(parts) > 1 or " " in parts[0])
    return f"batch{plural} {' and '.join(parts)}"
