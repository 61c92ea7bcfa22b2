"""Random access into a permutation of any size, the same as grain's, in numpy.

grain's own function permutes one number per call, from Python.

Dimensions: W requested ranks.
"""

import functools
import operator
from collections.abc import Callable

import numpy as np

# Rounds of grain's Feistel network. Source: grain's default for shuffling.
_ROUNDS = 4
# Ranks that are permuted together: those of 32 batches of 128.
_STRETCH = 4096
# Below this count a cipher of 16 bits has to be repeated more than 4 times on average, as most of
# its results are out of range; grain's own function is called instead.
_FEW = 1 << 14


def permuted(ranks_W: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Returns the numbers at `ranks_W` in a permutation of 0 to `count` - 1, int64 [W].

    The permutation is grain's, `index_shuffle(rank, count - 1, seed, rounds=4)`: a cipher with an
    even number of bits, at least 16, is repeated until the result is below `count`. Here one pass
    of numpy permutes a stretch of ranks, which is cached, as ranks of a batch are neighbours.

    Args:
      ranks_W: int64 [W], from 0 to `count` - 1.
      count: how many numbers are permuted.
      seed: 32 bits.

    Differences: grain 0.2.18 uses two bits too few where `count - 1` is 2**16, 2**18, …: one number
      then appears twice and another never.
    """
    numbers_W = np.empty(len(ranks_W), np.int64)
    stretches_W = ranks_W // _STRETCH
    for stretch in np.unique(stretches_W).tolist():
        rows = stretches_W == stretch
        numbers_W[rows] = _stretch(stretch, count, seed)[ranks_W[rows] - stretch * _STRETCH]
    return numbers_W


# 32 kB each; 256 serve a mixture of many tasks, in all threads.
@functools.lru_cache(maxsize=256)
def _stretch(number: int, count: int, seed: int) -> np.ndarray:
    """Returns the numbers at ranks from `number * _STRETCH` on, int64 [up to _STRETCH]."""
    from grain.experimental import index_shuffle

    ranks = np.arange(number * _STRETCH, min((number + 1) * _STRETCH, count), dtype=np.uint64)
    if count < _FEW:
        return np.array(
            [index_shuffle(rank, count - 1, seed, _ROUNDS) for rank in ranks.tolist()],
            np.int64,
        )
    bits = max(16, (count - 1).bit_length() + 1 & ~1)
    keys = _round_keys(seed)
    numbers = _encrypted(ranks, bits // 2, keys)
    while len(beyond := np.flatnonzero(numbers >= count)):
        numbers[beyond] = _encrypted(numbers[beyond], bits // 2, keys)
    return numbers.astype(np.int64)


def _encrypted(values: np.ndarray, word_bits: int, keys: list[int]) -> np.ndarray:
    """Encrypts values by the Simon cipher, one round per key, with words of `word_bits` bits.

    Source: Beaulieu et al. 2013, "The SIMON and SPECK families of lightweight block ciphers",
      section 3.2; grain `index_shuffle.cc`, simon_encrypt.
    """
    mask = np.uint64((1 << word_bits) - 1)

    def rotated(word: np.ndarray, bits: int) -> np.ndarray:
        return word << np.uint64(bits) | word >> np.uint64(word_bits - bits)

    left, right = values >> np.uint64(word_bits), values & mask
    for key in keys:
        right_next = (
            left ^ (rotated(right, 1) & rotated(right, 8)) ^ rotated(right, 2) ^ np.uint64(key)
        )
        left, right = right, right_next & mask
    return left << np.uint64(word_bits) | right


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> list[int]:
    """Returns the keys of the rounds, 32 bits each, from a seed of 32 bits.

    Source: std::seed_seq::generate with one seed, ISO C++17 [rand.util.seedseq]; grain
      `index_shuffle.cc`, generate_keys.
    """
    words = [0x8B8B8B8B] * _ROUNDS

    def change(step: int, mixed: int, end: int, join: Callable[[int, int], int]) -> None:
        # With four words, the standard's p and q are 1 and 2.
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
