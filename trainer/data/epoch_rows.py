"""Layouts: which windows each row of a task holds, as pure functions of the row's rank.

Dimensions: W requested rows, E examples in these rows.
"""

import dataclasses
import itertools
from typing import NamedTuple, Protocol

import numpy as np

from tasks.cache.pair_windows import PairWindows
from tasks.objectives import Lengths, noise
from tasks.objectives.objective import Slots
from tasks.objectives.packing import Deck
from tasks.terminal.command_line import UserError
from trainer.data.order import Epochs, Reading

_SHUFFLE = 0xDEC4  # separates the order of a deck's windows from other draws
# Pairs packed together, largest first. With exponential lengths (means 60 and 15, rows of 512 and
# 128), groups of 1,024 leave 8% and 5% empty; groups of 4,096 leave 10% and 7%; one group in cache
# order with 64 open rows leaves 17% and 15%.
_GROUP = 1024
_INDEX_ROWS = 1 << 20


class Members(NamedTuple):
    """The examples of some rows, in row order; arrays are int64 [E].

    Attributes:
      rows_E: index of each example's row among the requested rows, ascending.
      epochs_E: number of earlier complete passes over the windows.
      ranks_E: number of windows read earlier in the same epoch.
      partners_E: the example whose key each one uses, itself unless it mirrors another.
      slots: how the windows become examples; None means the objective's own draws.
    """

    rows_E: np.ndarray
    epochs_E: np.ndarray
    ranks_E: np.ndarray
    windows_E: np.ndarray
    partners_E: np.ndarray
    slots: Slots | None


class Layout(Protocol):
    """A layout of rows; `rows_per_epoch` is the mean number that read every window once."""

    @property
    def rows_per_epoch(self) -> float: ...

    def members(self, ranks_W: np.ndarray) -> Members:
        """Returns the examples of the rows at these ranks, counted from the run's beginning."""

    def last_window(self, rank: int) -> int:
        """Returns the highest rank of a window that the row at a rank needs."""


@dataclasses.dataclass(frozen=True)
class OneByOne:
    """Rows of one example each."""

    reading: Reading

    @property
    def rows_per_epoch(self) -> float:
        return float(self.reading.windows)

    def members(self, ranks_W: np.ndarray) -> Members:
        epochs_W, ranks_W, windows_W = self.reading(ranks_W)
        rows_W = np.arange(len(ranks_W))
        return Members(rows_W, epochs_W, ranks_W, windows_W, rows_W, None)

    def last_window(self, rank: int) -> int:
        return rank


@dataclasses.dataclass(frozen=True)
class Decks:
    """Rows of consecutive decks; each deck of windows is shuffled, and may span two epochs."""

    reading: Reading
    deck: Deck
    seed: int

    @property
    def rows_per_epoch(self) -> float:
        return self.reading.windows * self.deck.rows / self.deck.windows

    def members(self, ranks_W: np.ndarray) -> Members:
        deck = self.deck
        decks_W, places_W = np.divmod(ranks_W, deck.rows)
        firsts_W = deck.firsts_R1[places_W]
        counts_W = deck.firsts_R1[places_W + 1] - firsts_W
        rows_E = np.repeat(np.arange(len(ranks_W)), counts_W)
        slots_E = _ranges(firsts_W, counts_W)
        decks_E = decks_W[rows_E]
        unique, of_E = np.unique(decks_E, return_inverse=True)
        keys = noise.fold_in(noise.fold_in(self.seed, _SHUFFLE), unique)
        turns = np.argsort(noise.uniforms(keys, deck.windows), axis=1, kind="stable")
        ranks_E = decks_E * deck.windows + turns[of_E, slots_E]
        epochs_E, ranks_E, windows_E = self.reading(ranks_E)
        mirrored_E = deck.mirrored_G[slots_E]
        partners_E = np.arange(len(rows_E)) - mirrored_E
        slots = Slots(deck.choices_G[slots_E], mirrored_E)
        return Members(rows_E, epochs_E, ranks_E, windows_E, partners_E, slots)

    def last_window(self, rank: int) -> int:
        return (rank // self.deck.rows + 1) * self.deck.windows - 1


class PackedPairs:
    """Rows of neighbouring pairs: the same rows in every epoch, in a new order.

    Rows are planned at construction from the lengths in the cache's index: neighbouring pairs are
    packed together, best fit decreasing. This takes about a microsecond and 12 bytes of memory per
    pair. Raises a UserError if a pair does not fit into a row.

    `ends` are the numbers of tokens (EOS) that rows add to each side; both sides share one sequence
    if `together`; no row spans two of `blocks`, int64 [B + 1], from `Windows.blocks`.
    """

    def __init__(
        self,
        windows: PairWindows,
        ends: tuple[int, int],
        rows: Lengths,
        together: bool,
        blocks: np.ndarray | None = None,
    ):
        from trainer.data.best_fit import best_fit

        count = len(windows)
        limits = (rows.inputs + rows.targets, 0) if together else (rows.inputs, rows.targets)
        sides = [
            windows.lengths(begin, min(begin + _INDEX_ROWS, count))
            for begin in range(0, count, _INDEX_ROWS)
        ]
        inputs_P, targets_P = (
            np.concatenate([np.zeros(0, np.int64), *each]) for each in zip(*sides, strict=True)
        )
        inputs_P, targets_P = inputs_P + ends[0], targets_P + ends[1]
        if together:
            inputs_P, targets_P = inputs_P + targets_P, np.zeros_like(targets_P)
        if count and (inputs_P.max() > limits[0] or targets_P.max() > limits[1]):
            raise UserError(
                f"pairs have up to {inputs_P.max():,} and {targets_P.max():,} tokens, rows "
                f"{limits[0]:,} and {limits[1]:,}: make --lengths longer"
            )
        larger_P = np.maximum(inputs_P * max(limits[1], 1), targets_P * limits[0])
        row_P, opened = np.empty(count, np.int64), [0]
        for first, last in itertools.pairwise([0, count] if blocks is None else blocks.tolist()):
            rows_before = opened[-1]
            for begin in range(first, last, _GROUP):
                end = min(begin + _GROUP, last)
                group = begin + np.argsort(-larger_P[begin:end], kind="stable")
                found = best_fit(inputs_P[group], targets_P[group], *limits)
                row_P[group] = rows_before + found
                rows_before += int(found.max()) + 1
            opened.append(rows_before)
        self.blocks_B1 = np.array(opened)  # the first row of each block, then the number of rows
        self.pairs_P = np.argsort(row_P, kind="stable")
        self.firsts_R1 = np.searchsorted(row_P[self.pairs_P], np.arange(row_P.max(initial=-1) + 2))
        self.filled = tuple(
            float(side.sum() / max(1, self.rows * limit))
            for side, limit in zip((inputs_P, targets_P), limits, strict=True)
            if limit
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.firsts_R1) - 1


@dataclasses.dataclass(frozen=True)
class PairRows:
    """Rows of packed pairs, in the order of `reading`."""

    plan: PackedPairs
    reading: Epochs  # of rows, not of windows

    @property
    def rows_per_epoch(self) -> float:
        return float(self.plan.rows)

    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        """Returns ranges [first, last) of pairs: a rank's block and the next one."""
        firsts_R1 = self.plan.firsts_R1
        return [
            (int(firsts_R1[first]), int(firsts_R1[last]))
            for first, last in self.reading.following(epoch, rank)
        ]

    def members(self, ranks_W: np.ndarray) -> Members:
        epochs_W, ranks_W, rows_W = self.reading(ranks_W)
        firsts_W = self.plan.firsts_R1[rows_W]
        counts_W = self.plan.firsts_R1[rows_W + 1] - firsts_W
        rows_E = np.repeat(np.arange(len(ranks_W)), counts_W)
        windows_E = self.plan.pairs_P[_ranges(firsts_W, counts_W)]
        examples_E = np.arange(len(rows_E))
        return Members(rows_E, epochs_W[rows_E], ranks_W[rows_E], windows_E, examples_E, None)

    def last_window(self, rank: int) -> int:
        return int(self.plan.firsts_R1[-1]) - 1


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `counts` consecutive numbers from each of `firsts` on, concatenated."""
    begins = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts)
