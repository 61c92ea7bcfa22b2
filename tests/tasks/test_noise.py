"""Span masks: T5's law, and functions of the key alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import noise

windows = st.lists(st.integers(1, 120), min_size=1, max_size=12).map(np.array)


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


def test_a_window_s_mask_does_not_depend_on_its_batch():
    lengths = np.array([141, 60, 141, 7])
    whole = mask_of(lengths)
    keys = noise.fold_in(0, np.arange(4))
    for place in range(4):
        alone = noise.span_mask(keys[[place]], lengths[[place]], 200)
        np.testing.assert_array_equal(alone[0, :141], whole[place])
        assert not alone[0, 141:].any()


def test_all_compositions_are_equally_likely():
    # 7 into 3 positive parts: 15 ways.
    draws = noise.uniforms(noise.fold_in(5, np.arange(15_000)), 6)
    parts = noise.compositions(np.full(15_000, 7), np.full(15_000, 3), draws)
    assert (parts.sum(axis=1) == 7).all()
    assert (parts > 0).all()
    ways, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(ways) == 15
    # Chi-square of 14 degrees of freedom: above 36.1 once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum() < 36.1


def test_uniforms_are_uniform_and_streams_differ():
    draws = noise.uniforms(noise.fold_in(np.arange(200), 3), 500)
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # 19 degrees of freedom, 1 in 1000
    assert len(np.unique(draws)) == draws.size
    assert (noise.fold_in(1, 2) != noise.fold_in(2, 1)).all()


def test_substitution_on_the_example_of_t5():
    # Source: T5 preprocessors' documentation: one sentinel a span, descending.
    tokens = np.arange(10, 20)[None]
    mask = np.array([[c == "1" for c in "0011000100"]])
    inputs, count = noise.substitute_spans(tokens, mask, np.array([10]), 32099)
    assert inputs[0, : count[0]].tolist() == [10, 11, 32099, 14, 15, 16, 32098, 18, 19]
    targets, count = noise.substitute_spans(tokens, ~mask, np.array([10]), 32099)
    assert targets[0, : count[0]].tolist() == [32099, 12, 13, 32098, 17, 32097]
