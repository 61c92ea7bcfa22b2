"""Orders of windows: permutations, equal to grain's, and blocks."""

import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.objectives import noise
from trainer.data.order import BlockOrder, CacheOrder, GlobalOrder

seeds = st.integers(0, 2**64 - 1)
blocks = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(
    lambda sizes: np.concatenate([[0], np.cumsum(sizes)])
)


def epoch_of(order, epoch, windows):
    return order(np.full(windows, epoch), np.arange(windows)).tolist()


@settings(max_examples=50)
@given(st.integers(1, 300), seeds, st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(windows, seed, epoch):
    assert sorted(epoch_of(GlobalOrder(windows, seed), epoch, windows)) == list(range(windows))


def test_without_shuffling_an_epoch_is_the_cache():
    assert epoch_of(CacheOrder(), 3, 7) == list(range(7))
    assert CacheOrder()(np.zeros(2, int), np.arange(2, dtype=np.int32)).dtype == np.int64


@pytest.mark.parametrize(
    "windows", [2**14 - 1, 2**14, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1, 300_000]
)
def test_an_epoch_of_many_windows_is_a_permutation(windows):
    order = GlobalOrder(windows, 5)
    first = np.array(epoch_of(order, 0, windows))
    assert np.array_equal(np.sort(first), np.arange(windows))
    # Neighbours are no longer neighbours, and places say nothing of windows.
    assert np.mean(np.abs(np.diff(first)) < windows / 100) < 0.03
    assert abs(np.corrcoef(first, np.arange(windows))[0, 1]) < 0.05
    assert first.tolist() != epoch_of(order, 1, windows)
    assert first.tolist() != epoch_of(GlobalOrder(windows, 6), 0, windows)


def deviation(distances, count, bins=256):
    """Returns chi-square per degree of freedom of distances from a uniform distribution."""
    found = np.bincount((distances % count - 1) * bins // (count - 1), minlength=bins)
    expected = len(distances) / bins
    return ((found - expected) ** 2 / expected).sum() / (bins - 1)


@pytest.mark.parametrize("windows", [2**16, 2**20, 300_000, 5_000_000, 2**24])
def test_distances_of_neighbours_are_those_of_a_random_order(windows):
    ranks = np.arange(2**16)
    found = GlobalOrder(windows, 7)(np.zeros_like(ranks), ranks)
    # The standard deviation of a random order's is 0.09.
    assert max(deviation(found[gap:] - found[:-gap], windows) for gap in (1, 2, 8, 64)) < 1.4
    # Neighbours of the cache do not meet in a batch more often than by chance.
    batches = np.sort(found.reshape(-1, 512), axis=1)
    pairs, chance = (np.diff(batches, axis=1) == 1).sum(), 2**16 * 511 / windows
    assert abs(pairs - chance) < 5 * chance**0.5 + 5


@settings(max_examples=200)
@given(
    st.integers(1, 2**45).filter(lambda windows: (windows - 1).bit_count() != 1 or windows < 2**16),
    seeds,
    st.integers(0, 1000),
    st.data(),
)
def test_the_permutation_is_grains(windows, seed, epoch, data):
    ranks = data.draw(st.lists(st.integers(0, windows - 1), max_size=8))
    key = noise.fold_in(noise.fold_in(seed, 0x0DE2), epoch)
    grain_seed = int(key & np.uint64(0xFFFFFFFF))
    expected = [index_shuffle(rank, windows - 1, grain_seed, 10) for rank in ranks]
    order = GlobalOrder(windows, seed)
    found = order(np.full(len(ranks), epoch), np.array(ranks, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == expected


def both_orders(sizes, seed):
    return GlobalOrder(int(sizes[-1]), seed), BlockOrder(sizes, seed)


@settings(max_examples=50)
@given(blocks, seeds, st.data())
def test_a_window_does_not_depend_on_the_other_ranks_requested(firsts, seed, data):
    windows = int(firsts[-1])
    places = data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, windows - 1)), max_size=20)
    )
    epochs, ranks = np.array(places, np.int64).reshape(-1, 2).T
    for order, other in zip(both_orders(firsts, seed), both_orders(firsts, seed), strict=True):
        alone = [int(other(np.array([e]), np.array([r]))[0]) for e, r in places]
        assert order(epochs, ranks).tolist() == alone


@settings(max_examples=40)
@given(blocks, seeds, st.integers(0, 1000))
def test_each_block_is_read_once_and_as_a_whole(firsts, seed, epoch):
    windows = int(firsts[-1])
    order = epoch_of(BlockOrder(firsts, seed), epoch, windows)
    assert sorted(order) == list(range(windows))
    block_of = np.searchsorted(firsts, order, side="right") - 1
    changes = np.count_nonzero(np.diff(block_of))
    assert changes == len(firsts) - 2


def test_blocks_and_their_windows_have_a_new_order_in_each_epoch():
    firsts = np.arange(0, 1001, 50)
    order = BlockOrder(firsts, 3)
    turns, insides = [], []
    for epoch in range(3):
        windows = np.array(epoch_of(order, epoch, 1000))
        turns.append(tuple(windows[::50] // 50))
        insides += [tuple(block % 50) for block in windows.reshape(20, 50)]
    assert len(set(turns)) == 3
    assert len(set(insides)) == 60
    assert tuple(range(50)) not in insides


def test_following_returns_the_windows_of_this_block_and_the_next():
    firsts = np.array([0, 30, 70, 80])
    order = BlockOrder(firsts, 1)
    for epoch in range(4):
        coming = epoch_of(order, epoch, 80) + epoch_of(order, epoch + 1, 80)
        for rank in range(80):
            (first, last), (next_first, next_last) = order.following(epoch, rank)
            assert first <= coming[rank] < last
            later = next(n for n in range(rank, 160) if n == 80 or not first <= coming[n] < last)
            assert next_first <= coming[later] < next_last
