"""The order of windows within an epoch, as pure functions.

Dimensions: W windows asked for, B blocks.
"""

import functools
import operator
from collections.abc import Callable
from typing import Protocol

import numpy as np

from tasks.objectives import noise

# Rounds of grain's Feistel network. Source: grain's own default for shuffling.
_SHUFFLE_ROUNDS = 4
# Ranks whose places are computed at once: those of 32 batches of 128.
_STRETCH = 4096
# Of fewer windows, a cipher of 16 bits passes more than 4 times over most places that are none.
_FEW = 1 << 14
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


class CacheOrder:
    """The order of the cache, in every epoch."""

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        return ranks_W.astype(np.int64)


class BlockOrder:
    """A permutation of blocks and, in each, of its windows, others in each epoch.

    Blocks are read one after the other: two of them on the disk are enough, for a corpus that is
    larger than it.

    Args:
      firsts: int64 [B + 1], the first window of each block, from 0, then the number of windows, as
        `tasks.cache.windows.Windows.blocks` makes them; a block has at least one window.
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
        may be the next epoch's, for `tasks.cache.windows.Windows.prefetch`."""
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
    """Returns the places of `ranks_W` in a permutation of `count` numbers: int64 [W].

    The permutation is that of grain's `index_shuffle(rank, count - 1, seed, rounds=4)`: a cipher of
    an even number of bits, at least 16, again and again until the place is below `count`. Here a
    stretch of ranks is one pass of numpy, and kept: a batch takes its places from it.

    Differences: grain 0.2.18 takes two bits too few where `count - 1` is 2**16, 2**18, …, so that
      one window is read twice and another never.
    """
    places_W = np.empty(len(ranks_W), np.int64)
    stretches_W = ranks_W // _STRETCH
    for stretch in np.unique(stretches_W).tolist():
        rows = stretches_W == stretch
        places_W[rows] = _stretch(stretch, count, seed)[ranks_W[rows] - stretch * _STRETCH]
    return places_W


# 32 kB each: what a mixture of some tasks reads, for all threads.
@functools.lru_cache(maxsize=256)
def _stretch(number: int, count: int, seed: int) -> np.ndarray:
    """Returns the places of ranks from `number * _STRETCH` on: int64 [up to _STRETCH]."""
    from grain.experimental import index_shuffle

    ranks = np.arange(number * _STRETCH, min((number + 1) * _STRETCH, count), dtype=np.uint64)
    if count < _FEW:
        return np.array(
            [index_shuffle(rank, count - 1, seed, _SHUFFLE_ROUNDS) for rank in ranks.tolist()],
            np.int64,
        )
    bits = max(16, (count - 1).bit_length() + 1 & ~1)
    keys = _round_keys(seed)
    places = _encrypted(ranks, bits // 2, keys)
    while len(beyond := np.flatnonzero(places >= count)):
        places[beyond] = _encrypted(places[beyond], bits // 2, keys)
    return places.astype(np.int64)


def _encrypted(values: np.ndarray, word_bits: int, keys: list[int]) -> np.ndarray:
    """Two rounds of the Simon cipher a pair of keys, on words of any number of bits.

    Source: Beaulieu et al. 2013, "The SIMON and SPECK families of lightweight block ciphers",
      section 3.2; grain `index_shuffle.cc`, simon_encrypt.
    """
    mask = np.uint64((1 << word_bits) - 1)

    def turned(word: np.ndarray, bits: int) -> np.ndarray:
        return word << np.uint64(bits) | word >> np.uint64(word_bits - bits)

    left, right = values >> np.uint64(word_bits), values & mask
    for key in keys:
        right_next = (
            left ^ (turned(right, 1) & turned(right, 8)) ^ turned(right, 2) ^ np.uint64(key)
        )
        left, right = right, right_next & mask
    return left << np.uint64(word_bits) | right


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> list[int]:
    """The keys of the rounds, 32 bits each, of a seed of 32 bits.

    Source: std::seed_seq::generate, ISO C++17 [rand.util.seedseq], of one seed; grain
      `index_shuffle.cc`, generate_keys.
    """
    words = [0x8B8B8B8B] * _SHUFFLE_ROUNDS

    def change(step: int, mixed: int, end: int, join: Callable[[int, int], int]) -> None:
        # Of four words, the standard's p and q are 1 and 2.
        for place, value in ((step + 1, mixed), (step + 2, end)):
            words[place % 4] = join(words[place % 4], value) & 0xFFFFFFFF
        words[step % 4] = end & 0xFFFFFFFF

    for step in range(4):
        value = words[step] ^ words[(step + 1) % 4] ^ words[step - 1]
        mixed = 1664525 * (value ^ value >> 27) & 0xFFFFFFFF
        change(step, mixed, mixed + (1, 1 + seed, 2, 3)[step], operator.add)
    for step in range(4):
        value = words[step] + words[(step + 1) % 4] + words[step - 1] & 0xFFFFFFFF
        mixed = 1566083941 * (value ^ value >> 27) & 0xFFFFFFFF
        change(step, mixed, mixed - step & 0xFFFFFFFF, operator.xor)
    return words
