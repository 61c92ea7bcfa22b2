"""Noise masks have T5's distribution, and depend on the key alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.objectives import noise, noise_loops

windows = st.lists(st.integers(1, 120), min_size=1, max_size=12).map(np.array)


def test_streams_of_keys_never_change():
    # A change would alter the noise of runs that are resumed, and their evaluation losses.
    windows_W, epochs_W = np.array([0, 1, 10**9]), np.array([0, 3, 3])
    training = [18180242232064266543, 11185732213140203016, 12283835050304366680]
    evaluation = [2464777400298166378, 3808166768976920823, 1065040704435668426]
    assert noise.training_keys(7, "c4_ul2", epochs_W, windows_W).tolist() == training
    assert noise.evaluation_keys(7, windows_W).tolist() == evaluation
    assert noise.window_keys(7, "c4_ul2", "train", 3, windows_W).tolist()[1:] == training[1:]
    for epoch in (0, 3):
        keys = noise.window_keys(7, "c4_ul2", "validation", epoch, windows_W)
        assert keys.tolist() == evaluation


def mask_of(lengths, seed=0, width=None, density=0.15, mean=3.0):
    keys = noise.fold_in(seed, np.arange(len(lengths)))
    return noise.span_mask(keys, lengths, width or int(lengths.max()), density, mean)


@given(
    windows,
    st.integers(0, 2**63),
    st.sampled_from([0.1, 0.15, 0.3, 0.5, 0.75]),
    st.sampled_from([1.0, 2.0, 3.0, 8.0]),
)
def test_masks_have_the_counts_of_the_formula(lengths, seed, density, mean):
    mask = mask_of(lengths, seed, density=density, mean=mean)
    tokens, spans = noise.span_counts(lengths, density, mean)
    for row, length, count, runs in zip(mask, lengths, tokens, spans, strict=True):
        assert not row[length:].any()
        assert not row[0]
        if length > 1:
            assert row.sum() == count
            assert row[length - 1]
            assert (row[1:] & ~row[:-1]).sum() == runs


# Source: T5's random_spans_noise_mask; float32 rounds 190 x 0.15 = 28.5 up, float64 down.
@pytest.mark.parametrize(
    ("length", "expected"), [(568, (85, 28)), (284, (43, 14)), (190, (29, 10)), (2, (1, 1))]
)
def test_span_counts(length, expected):
    tokens, spans = noise.span_counts(np.array([length]), 0.15, 3.0)
    assert (tokens[0], spans[0]) == expected


def test_masks_of_windows_do_not_depend_on_the_batch():
    lengths = np.array([141, 60, 141, 7])
    whole = mask_of(lengths)
    keys = noise.fold_in(0, np.arange(4))
    for place in range(4):
        alone = noise.span_mask(keys[[place]], lengths[[place]], 200)
        np.testing.assert_array_equal(alone[0, :141], whole[place])
        assert not alone[0, 141:].any()


def test_all_compositions_are_equally_likely():
    # 7 into 3 positive parts: 15 ways.
    keys = noise.fold_in(5, np.arange(15_000))
    parts = noise.compositions(keys, np.full(15_000, 7), np.full(15_000, 3))
    assert (parts.sum(axis=1) == 7).all()
    assert (parts > 0).all()
    ways, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(ways) == 15
    # Chi-square of 14 degrees of freedom: above 36.1 once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum() < 36.1


def subsets(keys, totals, sizes):
    chosen = np.zeros((len(keys), max(totals.max(), 1)), np.uint8)
    for row in zip(keys, totals, sizes, chosen, strict=True):
        noise_loops._choose(*row)
    return chosen.view(bool)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(0, 2**63),
)
def test_subsets_have_their_sizes_and_do_not_depend_on_the_batch(numbers, seed):
    totals = np.array([total for total, _ in numbers])
    sizes = np.array([round(total * share) for total, share in numbers])
    keys = noise.fold_in(seed, np.arange(len(totals)))
    chosen = subsets(keys, totals, sizes)
    assert chosen.sum(axis=1).tolist() == sizes.tolist()
    for place, total in enumerate(totals):
        assert not chosen[place, total:].any()
        alone = subsets(keys[[place]], totals[[place]], sizes[[place]])
        assert alone[0, :total].tolist() == chosen[place, :total].tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_all_subsets_are_equally_likely(size):
    # 2 of 6 are drawn, 4 of 6 are left over: 15 ways each.
    windows = 15_000
    keys = noise.fold_in(9, np.arange(windows))
    chosen = subsets(keys, np.full(windows, 6), np.full(windows, size))
    ways, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(ways) == 15
    assert ((counts - 1000) ** 2 / 1000).sum() < 36.1  # 14 degrees of freedom, 1 in 1000


@given(st.integers(1, 90), st.floats(0, 1), st.integers(0, 2**63))
def test_a_subset_is_the_first_different_numbers_of_a_stream(total, share, seed):
    size, keys = round(total * share), noise.fold_in(seed, np.arange(1))
    numbers = (noise.uniforms(keys, 4000)[0] * total).astype(int).tolist()
    inverted = 2 * size > total
    drawn = list(dict.fromkeys(numbers))[: total - size if inverted else size]
    expected = [(number in drawn) != inverted for number in range(total)]
    assert subsets(keys, np.array([total]), np.array([size]))[0].tolist() == expected


@given(windows, st.integers(0, 2**63), st.sampled_from([0.1, 0.15, 0.5]), st.integers(1, 6))
def test_regular_spans_have_equal_length_and_distance(lengths, seed, density, longest):
    keys = noise.fold_in(seed, np.arange(len(lengths)))
    mask = noise.regular_mask(keys, lengths, int(lengths.max()), density, 1, longest)
    for row, length in zip(mask, lengths, strict=True):
        assert not row[length:].any()
        starts = np.flatnonzero(noise.run_starts(row[None])[0])
        ends = np.flatnonzero(noise.run_starts(~row[None, ::-1])[0])
        whole = starts[(starts > 0) & (starts + longest < length)]
        if len(whole) and len(ends):
            sizes = {int(np.argmin(row[start:])) for start in whole}
            assert len(sizes) == 1
            (size,) = sizes
            assert 1 <= size <= longest
            period = noise.regular_period(size, density)
            assert set(np.diff(whole).tolist()) <= {int(period)}


def test_independent_noise_has_its_density_and_no_memory():
    mask = noise.iid_mask(noise.fold_in(3, np.arange(2000)), np.full(2000, 100), 100, 0.15)
    assert abs(mask.mean() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / mask.size)
    pairs = (mask[:, 1:] & mask[:, :-1]).mean()
    assert abs(pairs - 0.15**2) < 4 * np.sqrt(0.0225 / mask.size)


@pytest.mark.parametrize("density", [0.15, 0.25, 0.5])
def test_prefixes_are_uniform_from_the_shortest_on(density):
    windows = 20_000
    keys = noise.fold_in(4, np.arange(windows))
    sizes = noise.prefix_mask(keys, np.full(windows, 21), 21, density).sum(axis=1)
    least = max(1, round((1 - 2 * density) * 20))
    counts = np.bincount(sizes, minlength=21)
    expected = windows / (21 - least)
    assert not counts[:least].any()
    freedom = 20 - least
    statistic = ((counts[least:] - expected) ** 2 / expected).sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom)


def test_limited_noise_keeps_what_fits():
    mask = np.array([[c == "1" for c in "0110101101"]])
    shown = {
        limits: "".join("01"[int(c)] for c in noise.limit_noise(mask, *limits)[0])
        for limits in ((1, 9, 9), (1, 5, 9), (0, 4, 9), (1, 99, 2))
    }
    assert shown == {
        (1, 9, 9): "0110101100",
        (1, 5, 9): "0110100000",
        (0, 4, 9): "0110100000"[:6] + "1000",
        (1, 99, 2): "0110100000",
    }


@given(windows, st.integers(0, 2**63))
def test_permuting_moves_only_noise(lengths, seed):
    keys = noise.fold_in(seed, np.arange(len(lengths)))
    width = int(lengths.max())
    tokens = np.random.default_rng(seed).integers(3, 900, (len(lengths), width)).astype(np.int32)
    mask = noise.iid_mask(keys, lengths, width, 0.5)
    moved = noise.permute(tokens, mask, keys)
    assert (moved[~mask] == tokens[~mask]).all()
    for row in range(len(lengths)):
        assert sorted(moved[row, mask[row]]) == sorted(tokens[row, mask[row]])


def test_permutations_are_equally_likely():
    tokens = np.tile(np.arange(3, 6, dtype=np.int32), (6000, 1))
    moved = noise.permute(tokens, np.ones((6000, 3), bool), noise.fold_in(2, np.arange(6000)))
    ways, counts = np.unique(moved, axis=0, return_counts=True)
    assert len(ways) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # 5 degrees of freedom, 1 in 1000


def test_replaced_tokens_have_their_shares():
    tokens = np.full((400, 500), 7, np.int32)
    mask = np.broadcast_to(np.arange(500) % 2 == 1, tokens.shape)
    keys = noise.fold_in(6, np.arange(400))
    out = noise.replace_tokens(
        tokens, mask, keys, 999, np.arange(3, 900), random_share=0.1, kept_share=0.1
    )
    assert (out[~mask] == 7).all()
    inside = out[mask]
    shares = [(inside == 999).mean(), (inside == 7).mean(), ((inside < 900) & (inside != 7)).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=4 * np.sqrt(0.16 / len(inside)))
    drawn = inside[(inside != 999) & (inside != 7)]
    assert (drawn.min(), drawn.max()) == (3, 899)


def test_uniforms_are_uniform_and_streams_differ():
    draws = noise.uniforms(noise.fold_in(np.arange(200), 3), 500)
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # 19 degrees of freedom, 1 in 1000
    assert len(np.unique(draws)) == draws.size
    assert (noise.fold_in(1, 2) != noise.fold_in(2, 1)).all()


def test_substitution_on_t5s_example():
    # Source: T5 preprocessors' documentation: one sentinel a span, descending.
    tokens = np.arange(10, 20)[None]
    mask = np.array([[c == "1" for c in "0011000100"]])
    inputs, count = noise.substitute_spans(tokens, mask, np.array([10]), 32099)
    assert inputs[0, : count[0]].tolist() == [10, 11, 32099, 14, 15, 16, 32098, 18, 19]
    targets, count = noise.substitute_spans(tokens, ~mask, np.array([10]), 32099)
    assert targets[0, : count[0]].tolist() == [32099, 12, 13, 32098, 17, 32097]
