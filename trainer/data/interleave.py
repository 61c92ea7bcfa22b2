"""Which source each position of a run's endless order reads, as a function of the position.

Dimensions: S sources, W positions.
"""

from collections.abc import Sequence

import numpy as np


class Interleave:
    """Sources read at fixed rates, evenly: window j of source s is due at time
    (j + 1/2) / rate_s, and positions follow the due times, ties by source.

    So the position alone says which source is read and how many of its windows lie before, and
    whatever the position n, a source has had n · rate windows, give or take (S + 1) / 2.

    Args:
      rates: of each source, 0 or more; only their proportions count.
    """

    def __init__(self, rates: Sequence[float]):
        rates_S = np.asarray(rates, np.float64)
        self._rates_S = rates_S / rates_S.sum()

    def counts(self, position: int) -> np.ndarray:
        """Returns how many windows of each source lie before `position`: int64 [S]."""
        counts_S, surplus = self._just_before(position)
        sources_W = self._merge(counts_S, surplus)[0]
        return counts_S + np.bincount(sources_W, minlength=len(counts_S))

    def places(self, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, windows of it before) of positions first … first + number - 1:
        int64 [number] each."""
        counts_S, surplus = self._just_before(first)
        sources_W, ranks_W = self._merge(counts_S, surplus + number)
        return sources_W[surplus:], ranks_W[surplus:]

    def _just_before(self, position: int) -> tuple[np.ndarray, int]:
        """Returns counts [S] at a time with at most `position` windows due, and how many fewer."""
        # A source's count is its due share rounded, so that S sources are at most S / 2 ahead.
        time = max(0.0, float(position - len(self._rates_S)))
        counts_S = np.ceil(time * self._rates_S - 0.5).astype(np.int64)
        # The division that makes a due time may round the other way than this product.
        counts_S -= (counts_S > 0) & (self._due(counts_S - 1) >= time)
        counts_S += self._due(counts_S) < time
        return counts_S, position - int(counts_S.sum())

    def _merge(self, counts_S: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `number` windows after `counts_S`, in order: (sources, ranks)."""
        sources = len(counts_S)
        ahead_S = np.ceil((number + sources) * self._rates_S).astype(np.int64) + 1
        sources_W = np.repeat(np.arange(sources), ahead_S)
        ranks_W = np.concatenate(
            [np.arange(n, n + k) for n, k in zip(counts_S, ahead_S, strict=True)]
        )
        with np.errstate(divide="ignore"):
            due_W = (ranks_W + 0.5) / self._rates_S[sources_W]
        order_W = np.lexsort((sources_W, due_W))[:number]
        return sources_W[order_W], ranks_W[order_W]

    def _due(self, ranks_S: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return (ranks_S + 0.5) / self._rates_S


class Schedule:
    """Rates that change at given positions; no source loses its place, so none repeats a window.

    Args:
      changes: (position, rates of all sources), the first at position 0, ascending.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[float]]]):
        self._first = np.array([position for position, _ in changes], np.int64)
        self._parts = [Interleave(rates) for _, rates in changes]
        read_S = np.zeros(len(changes[0][1]), np.int64)
        self._read = [read_S]
        for part, length in zip(self._parts, np.diff(self._first), strict=False):
            read_S = read_S + part.counts(int(length))
            self._read.append(read_S)

    def places(self, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Interleave.places`; ranks count from the beginning of the run."""
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
