"""Random access into a permutation of any size, identical to grain's, in NumPy.

grain's own function permutes one number per call. Dimensions: W requested ranks.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

# Ranks permuted together: 128 batches of 128 rows.
_STRETCH = 1 << 14
# The cipher's minimum number of bits. Ranges this small are encrypted all at once.
_LEAST_BITS = 16


def permuted(ranks_W: np.ndarray, count: int, seed: int, rounds: int) -> np.ndarray:
    """Returns the numbers at `ranks_W` in a permutation of 0 to `count` - 1, int64 [W].

    The permutation is grain's `index_shuffle(rank, count - 1, seed, rounds)`: a cipher with an even
    number of bits, at least 16, is repeated until the result is below `count`. `seed` has 32 bits;
    `rounds` is even and at least 4. Stretches of ranks are cached, since a batch's are neighbours.

    Differences: grain 0.2.18 uses two bits too few if `count - 1` is 2**16, 2**18, …: one number
    then appears twice and another never.
    """
    numbers_W = np.empty(len(ranks_W), np.int64)
    stretches_W = ranks_W // _STRETCH
    for stretch in np.unique(stretches_W).tolist():
        rows = stretches_W == stretch
        numbers_W[rows] = _stretch(stretch, count, seed, rounds)[ranks_W[rows] - stretch * _STRETCH]
    return numbers_W


# 128 kB each; 256 suffice for a mixture of many tasks, in all threads.
@functools.lru_cache(maxsize=256)
def _stretch(number: int, count: int, seed: int, rounds: int) -> np.ndarray:
    """Returns the numbers at ranks from `number * _STRETCH` on, int64 [up to _STRETCH]."""
    ranks = np.arange(number * _STRETCH, min((number + 1) * _STRETCH, count), dtype=np.uint64)
    bits = max(_LEAST_BITS, (count - 1).bit_length() + 1 & ~1)
    keys = _round_keys(seed, rounds)
    if bits == _LEAST_BITS:
        every = _encrypted(np.arange(1 << bits, dtype=np.uint64), keys, bits).astype(np.int64)
        # With few numbers in range, the cipher repeats thousands of times: `ahead` takes the next
        # 1, 2, 4, … steps at once, up to a number in range.
        ahead = np.where(np.arange(1 << bits) < count, np.arange(1 << bits), every)
        numbers = every[ranks]
        while (numbers >= count).any():
            numbers, ahead = ahead[numbers], ahead[ahead]
        return numbers
    numbers = _encrypted(ranks, keys, bits)
    beyond = np.flatnonzero(numbers >= count)
    while len(beyond):
        numbers[beyond] = again = _encrypted(numbers[beyond], keys, bits)
        beyond = beyond[again >= count]
    return numbers.astype(np.int64)


def _encrypted(values: np.ndarray, keys: list[int], bits: int) -> np.ndarray:
    """Encrypts values of `bits` bits with the Simon cipher, one round per key.

    Source: Beaulieu et al. 2013, "The SIMON and SPECK families of lightweight block ciphers",
    section 3.2; grain `index_shuffle.cc`, simon_encrypt.
    """
    word_bits = bits // 2
    # Shifting a word next to its copy rotates it.
    kind: Any = np.uint32 if word_bits <= 16 else np.uint64
    mask = kind((1 << word_bits) - 1)
    high: np.ndarray = (values >> np.uint64(word_bits)).astype(kind)
    low: np.ndarray = values.astype(kind) & mask
    by_1, by_2, by_8 = (kind(word_bits - bits) for bits in (1, 2, 8))
    for key in keys:
        twice = low | low << kind(word_bits)
        mixed = (twice >> by_1 & twice >> by_8) ^ twice >> by_2 ^ kind(key & int(mask)) ^ high
        high, low = low, mixed & mask
    return high.astype(np.uint64) << np.uint64(word_bits) | low


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int, rounds: int) -> list[int]:
    """Returns the round keys, 32 bits each, for a seed of 32 bits.

    Source: std::seed_seq::generate with one seed, ISO C++17 [rand.util.seedseq], for 4 to 38 words;
    grain `index_shuffle.cc`, generate_keys.
    """
    words = [0x8B8B8B8B] * rounds
    gap = 3 if rounds >= 7 else (rounds - 1) // 2
    near = (rounds - gap) // 2

    def change(step: int, mixed: int, end: int, join: Callable[[int, int], int]) -> None:
        for place, value in ((step + near, mixed), (step + near + gap, end)):
            words[place % rounds] = join(words[place % rounds], value) & 0xFFFFFFFF
        words[step] = end & 0xFFFFFFFF

    for step in range(rounds):
        value = words[step] ^ words[(step + near) % rounds] ^ words[step - 1]
        mixed = 1664525 * (value ^ value >> 27) & 0xFFFFFFFF
        change(step, mixed, mixed + (step or 1) + (seed if step == 1 else 0), operator.add)
    for step in range(rounds):
        value = words[step] + words[(step + near) % rounds] + words[step - 1] & 0xFFFFFFFF
        mixed = 1566083941 * (value ^ value >> 27) & 0xFFFFFFFF
        change(step, mixed, mixed - step & 0xFFFFFFFF, operator.xor)
    return words
