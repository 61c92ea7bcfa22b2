"""Orders of windows within an epoch, as pure functions.

Dimensions: W requested windows, B blocks.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np

from tasks.cache.windows import Windows
from tasks.objectives import noise
from tasks.terminal.command_line import UserError
from trainer.data.permutation import permuted

# Keep the seeds of orders apart from noise seeds, and the seed of the block order apart from the
# seeds of orders within blocks.
_ORDER, _BLOCKS = 0x0DE2, 0xB10C
# Rounds of the permutation's cipher. Four, grain's default, leave a pattern near powers of four
# (docs/decisions/009-the-order-has-a-version.md).
_ROUNDS = 10
# Long windows whose windows are permuted together: enough that the rows of a batch come from
# anywhere, and few enough that a change of length leaves little of an epoch unread.
_MOST_LONG, _LEAST_GROUPS = 1024, 64


class Order(Protocol):
    """Maps ranks in an epoch (first window read, second, …) to windows."""

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        """Returns the window, int64 [W], at each rank (0 to windows - 1) in its epoch."""


class Reading(abc.ABC):
    """Maps ranks in a run to epochs and windows."""

    # The number of windows per epoch; a UserError is raised if it is not known yet.
    windows: int
    # True if all windows of an epoch are known.
    complete = True

    @abc.abstractmethod
    def __call__(self, ranks_W: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (epoch, rank in it, window index) for each of `ranks_W`, each int64 [W]."""

    @abc.abstractmethod
    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        """Returns ranges [first, last) of windows to prefetch: a rank's block and the next."""

    def wait(self, rank: int, stopping: Callable[[], bool]) -> bool:
        """Waits until the window at a rank is known; returns False if `stopping()` came first."""
        return True


@dataclasses.dataclass(frozen=True)
class Epochs(Reading):
    """Epochs of the same windows, each in its own order."""

    windows: int
    order: Order

    def __call__(self, ranks_W: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epochs_W, ranks_W = np.divmod(ranks_W, self.windows)
        return epochs_W, ranks_W, self.order(epochs_W, ranks_W)

    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        return self.order.following(epoch, rank) if isinstance(self.order, BlockOrder) else []


class GlobalOrder:
    """A permutation of all windows, different in each epoch."""

    def __init__(self, windows: int, seed: int):
        self._windows, self._seed = windows, seed

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        windows_W = np.empty(len(ranks_W), np.int64)
        for epoch in np.unique(epochs_W).tolist():
            rows = np.flatnonzero(epochs_W == epoch)
            seed = _seed32(_epoch_key(self._seed, epoch))
            windows_W[rows] = permuted(ranks_W[rows], self._windows, seed, _ROUNDS)
        return windows_W


class CacheOrder:
    """The order of the cache, the same in every epoch."""

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        return ranks_W.astype(np.int64)


class BlockOrder:
    """A permutation of blocks and of the windows within each block, new in each epoch.

    Blocks are read one after the other, so a corpus larger than the disk needs room for only two.
    `firsts`, int64 [B + 1], is the result of `tasks.cache.windows.Windows.blocks`: the first window
    of each block, then the number of windows; no block is empty.
    """

    def __init__(self, firsts: np.ndarray, seed: int):
        self._firsts_B, self._sizes_B = firsts[:-1], np.diff(firsts)
        self._seed = seed
        # Prefetched batches span at most two epochs.
        self._blocks = functools.lru_cache(maxsize=4)(self._blocks_of)

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        windows_W = np.empty(len(ranks_W), np.int64)
        for epoch in np.unique(epochs_W).tolist():
            rows = np.flatnonzero(epochs_W == epoch)
            blocks_B, begins_B = self._blocks(epoch)
            turns_W = np.searchsorted(begins_B, ranks_W[rows], side="right") - 1
            for turn in np.unique(turns_W).tolist():
                some = rows[turns_W == turn]
                block = int(blocks_B[turn])
                inside_W, size = ranks_W[some] - begins_B[turn], int(self._sizes_B[block])
                windows_W[some] = self._firsts_B[block] + within_block(
                    inside_W, size, self._seed, epoch, block
                )
        return windows_W

    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        """Returns ranges [first, last) of windows to prefetch: a rank's block and the next."""
        blocks_B, begins_B = self._blocks(epoch)
        turn = int(np.searchsorted(begins_B, rank, side="right")) - 1
        last = turn + 1 == len(blocks_B)
        coming = self._blocks(epoch + 1)[0][0] if last else blocks_B[turn + 1]
        return [
            (int(self._firsts_B[block]), int(self._firsts_B[block] + self._sizes_B[block]))
            for block in (blocks_B[turn], coming)
        ]

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks of an epoch in order, and the rank at which each begins."""
        count = len(self._sizes_B)
        seed = _seed32(noise.fold_in(_epoch_key(self._seed, epoch), -_BLOCKS))
        blocks_B = permuted(np.arange(count), count, seed, _ROUNDS)
        sizes_B = self._sizes_B[blocks_B]
        return blocks_B, np.cumsum(sizes_B) - sizes_B


class NestedOrder:
    """An order of windows in long windows, whose length may change within an epoch.

    An epoch reads groups of `group` long windows, in an order of their own (a permutation if there
    is a seed), and within a group all windows that lie in them, permuted. So a group is the least
    that a change of length must finish or leave, for no token to be read twice in an epoch.
    """

    def __init__(self, long_windows: int, per_long: int, seed: int | None):
        self._count, self._per, self._seed = long_windows, per_long, seed
        self._group = max(1, min(_MOST_LONG, long_windows // _LEAST_GROUPS))

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        ranks_W = ranks_W.astype(np.int64)
        if self._seed is None:
            return ranks_W
        windows_W = np.empty(len(ranks_W), np.int64)
        groups_W = ranks_W // (self._group * self._per)
        for epoch, group in sorted({*zip(epochs_W.tolist(), groups_W.tolist(), strict=True)}):
            rows = np.flatnonzero((epochs_W == epoch) & (groups_W == group))
            first = group * self._group
            size = (min(self._count, first + self._group) - first) * self._per
            inside_W = ranks_W[rows] - first * self._per
            inside_W = within_block(inside_W, size, self._seed, epoch, group)
            turns_W, places_W = np.divmod(inside_W, self._per)
            seed = _seed32(noise.fold_in(_epoch_key(self._seed, epoch), -_BLOCKS))
            long_W = permuted(first + turns_W, self._count, seed, _ROUNDS)
            windows_W[rows] = long_W * self._per + places_W
        return windows_W

    def begin(self, long_windows: int) -> int:
        """Returns the first rank after these many long windows, in all epochs."""
        return long_windows * self._per

    def untouched(self, rank: int) -> int:
        """Returns the long windows before the first group that no rank below `rank` reads."""
        epochs, inside = divmod(-(-rank // self._per), self._count)
        group = self._group if self._seed is not None else 1
        return epochs * self._count + min(self._count, -(-inside // group) * group)


def no_window(name: str, windows: Windows) -> UserError:
    """Returns the error for a task or cache whose training split is too small."""
    return UserError(
        f"the training split of {name} has fewer than {windows.window_tokens} tokens, too few "
        "for one window: use more text or shorter lengths"
    )


def within_block(ranks_W: np.ndarray, size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Returns the places, int64 [W], read at ranks within a block of `size` windows."""
    key = _seed32(noise.fold_in(_epoch_key(seed, epoch), block))
    return permuted(ranks_W, size, key, _ROUNDS)


def _epoch_key(seed: int, epoch: int) -> np.ndarray:
    return noise.fold_in(noise.fold_in(seed, _ORDER), epoch)


def _seed32(key: np.ndarray) -> int:
    return int(key & np.uint64(0xFFFFFFFF))
