"""The order of windows within an epoch, as pure functions.

Dimensions: W windows asked for, B blocks.
"""

import functools
from typing import Protocol

import numpy as np

from tasks import noise

# Rounds of grain's Feistel network. Source: grain's own default for shuffling.
_SHUFFLE_ROUNDS = 4
# Separate the seeds of orders from those of noise, and that of the blocks from those inside them.
_ORDER, _BLOCKS = 0x0DE2, 0xB10C


class Order(Protocol):
    """Which window is read at a place of an epoch."""

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        """Returns window indices int64 [W] of ranks (0 to windows - 1) in epochs."""


class GlobalOrder:
    """A permutation of all windows, another one in each epoch."""

    def __init__(self, windows: int, seed: int):
        self._windows, self._seed = windows, seed

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        windows_W = np.empty(len(ranks_W), np.int64)
        for epoch in np.unique(epochs_W).tolist():
            rows = np.flatnonzero(epochs_W == epoch)
            seed = _seed32(_epoch_key(self._seed, epoch))
            windows_W[rows] = _shuffled(ranks_W[rows], self._windows, seed)
        return windows_W


class BlockOrder:
    """A permutation of blocks and, in each, of its windows, others in each epoch.

    Blocks are read one after the other: two of them on the disk are enough, for a corpus that is
    larger than it.

    Args:
      firsts: int64 [B + 1], the first window of each block, from 0, then the number of windows, as
        `tasks.windows.Windows.blocks` makes them; a block has at least one window.
      seed: of the order.
    """

    def __init__(self, firsts: np.ndarray, seed: int):
        self._firsts_B, self._sizes_B = firsts[:-1], np.diff(firsts)
        self._seed = seed
        # Batches made ahead lie in two epochs at most.
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
                windows_W[some] = self._firsts_B[block] + _shuffled(
                    ranks_W[some] - begins_B[turn],
                    int(self._sizes_B[block]),
                    _seed32(noise.fold_in(_epoch_key(self._seed, epoch), block)),
                )
        return windows_W

    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        """Returns windows [first, last) of the block at a place and of the block after it, which
        may be the next epoch's, for `tasks.windows.Windows.prefetch`."""
        blocks_B, begins_B = self._blocks(epoch)
        turn = int(np.searchsorted(begins_B, rank, side="right")) - 1
        last = turn + 1 == len(blocks_B)
        coming = self._blocks(epoch + 1)[0][0] if last else blocks_B[turn + 1]
        return [
            (int(self._firsts_B[block]), int(self._firsts_B[block] + self._sizes_B[block]))
            for block in (blocks_B[turn], coming)
        ]

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks of an epoch in their order, and the rank at which each begins."""
        count = len(self._sizes_B)
        seed = _seed32(noise.fold_in(_epoch_key(self._seed, epoch), -_BLOCKS))
        blocks_B = _shuffled(np.arange(count), count, seed)
        sizes_B = self._sizes_B[blocks_B]
        return blocks_B, np.cumsum(sizes_B) - sizes_B


def _epoch_key(seed: int, epoch: int) -> np.ndarray:
    return noise.fold_in(noise.fold_in(seed, _ORDER), epoch)


def _seed32(key: np.ndarray) -> int:
    return int(key & np.uint64(0xFFFFFFFF))


def _shuffled(ranks_W: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Returns the places of `ranks_W` in a permutation of `count` numbers: int64 [W]."""
    from grain.experimental import index_shuffle

    last = count - 1
    # Where `last` is 2**16, 2**18, …, grain 0.2.18 takes a block of too few bits, and gives `last`
    # the place of 0. One number more is right, and its place is not ours: go on from there.
    if last >= 1 << 16 and last & (last - 1) == 0:
        last += 1
    places_W = [index_shuffle(rank, last, seed, _SHUFFLE_ROUNDS) for rank in ranks_W.tolist()]
    if last >= count:
        places_W = [
            index_shuffle(place, last, seed, _SHUFFLE_ROUNDS) if place >= count else place
            for place in places_W
        ]
    return np.array(places_W, np.int64)
