"""Mixing: the source that each position of a run's endless order reads, as a pure function.

Dimensions: S sources, W positions.
"""

from collections.abc import Sequence

import numpy as np


class Interleave:
    """Reads sources evenly at fixed rates; only the rates' proportions matter.

    Window j of source s is due at time (j + 1/2) / rate_s. Positions are in order of due times as
    float64 rounds them, equal ones in order of sources. So the position alone determines the source
    and how many of its windows precede it: n · rate_s at position n, within (S + 1) / 2.
    """

    def __init__(self, rates: Sequence[float]):
        rates_S = np.asarray(rates, np.float64)
        self._rates_S = rates_S / rates_S.sum()

    def counts(self, position: int) -> np.ndarray:
        """Returns the number of windows of each source before `position`, int64 [S]."""
        counts_S, surplus = self._just_before(position)
        sources_W = self._merge(counts_S, surplus)[0]
        return counts_S + np.bincount(sources_W, minlength=len(counts_S))

    def places(self, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, its earlier windows), int64, for `number` positions from `first` on."""
        counts_S, surplus = self._just_before(first)
        sources_W, ranks_W = self._merge(counts_S, surplus + number)
        return sources_W[surplus:], ranks_W[surplus:]

    def _just_before(self, position: int) -> tuple[np.ndarray, int]:
        """Returns (number of windows due per source [S], `position` minus their sum)."""
        # Counts are rounded due shares, so S sources together are at most S / 2 ahead.
        time = max(0.0, float(position - len(self._rates_S)))
        counts_S = np.ceil(time * self._rates_S - 0.5).astype(np.int64)
        # The division in `_due` may round differently from this product.
        counts_S -= (counts_S > 0) & (_due(counts_S - 1, self._rates_S) >= time)
        counts_S += _due(counts_S, self._rates_S) < time
        return counts_S, position - int(counts_S.sum())

    def _merge(self, counts_S: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sources, ranks) of the next `number` windows after `counts_S`, in order."""
        sources = len(counts_S)
        ahead_S = np.ceil((number + sources) * self._rates_S).astype(np.int64) + 1
        sources_W = np.repeat(np.arange(sources), ahead_S)
        ranks_W = np.concatenate(
            [np.arange(n, n + k) for n, k in zip(counts_S, ahead_S, strict=True)]
        )
        due_W = _due(ranks_W, self._rates_S[sources_W])
        order_W = np.lexsort((sources_W, due_W))[:number]
        return sources_W[order_W], ranks_W[order_W]


def _due(ranks: np.ndarray, rates: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return (ranks + 0.5) / rates


class MixingSchedule:
    """Rates that change at positions, from ascending (position, rates); no window repeats."""

    def __init__(self, changes: Sequence[tuple[int, Sequence[float]]]):
        self._first = np.array([position for position, _ in changes], np.int64)
        self._parts = [Interleave(rates) for _, rates in changes]
        read_S = np.zeros(len(changes[0][1]), np.int64)
        self._read = [read_S]
        for part, length in zip(self._parts, np.diff(self._first), strict=False):
            read_S = read_S + part.counts(int(length))
            self._read.append(read_S)

    def counts(self, position: int) -> np.ndarray:
        """Returns the number of windows of each source before `position`, int64 [S]."""
        part = int(np.searchsorted(self._first, position, side="right")) - 1
        return self._read[part] + self._parts[part].counts(position - int(self._first[part]))

    def places(self, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `Interleave.places`, with ranks counted from the run's beginning."""
        sources, ranks = [], []
        while number:
            part = int(np.searchsorted(self._first, first, side="right")) - 1
            here = number
            if part + 1 < len(self._first):
                here = min(number, int(self._first[part + 1]) - first)
            sources_W, ranks_W = self._parts[part].places(first - int(self._first[part]), here)
            sources.append(sources_W)
            ranks.append(ranks_W + self._read[part][sources_W])
            first, number = first + here, number - here
        return np.concatenate(sources), np.concatenate(ranks)
