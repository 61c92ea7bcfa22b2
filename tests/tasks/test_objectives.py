"""Objectives: lengths arithmetic and examples that lead back to the window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import noise, objectives
from tasks.command_line import UserError
from tasks.objectives import AutoregressiveLM, Lengths, PrefixLM, SpanCorruption

VOCABULARY = 32_100


def examples_of(objective, lengths, seed=0, width=None):
    generator = np.random.default_rng(seed)
    width = width or max(lengths)
    tokens = np.zeros((len(lengths), width), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = generator.integers(3, 30_000, length)
    keys = noise.fold_in(seed, np.arange(len(lengths)))
    made = objective.examples(tokens, np.array(lengths), keys, VOCABULARY)
    return [
        (
            tokens[place, :length],
            {name: rows[place, : sizes[place]] for name, (rows, sizes) in made.items()},
        )
        for place, length in enumerate(lengths)
    ]


# Source: T5's random_spans_helper run for these lengths.
@pytest.mark.parametrize(
    ("inputs", "density", "mean", "expected"),
    [
        (512, 0.15, 3.0, (568, 114)),
        (256, 0.15, 3.0, (284, 58)),
        (128, 0.15, 3.0, (141, 29)),
        (1024, 0.15, 3.0, (1137, 229)),
        (2048, 0.15, 3.0, (2274, 456)),
        (512, 0.5, 3.0, (766, 512)),
        (512, 0.15, 8.0, (588, 100)),
        (64, 0.2, 1.0, (63, 27)),
    ],
)
def test_span_corruption_lengths(inputs, density, mean, expected):
    assert objectives.span_corruption_lengths(inputs, density, mean) == expected


def test_full_windows_fill_both_sides_exactly():
    for _, example in examples_of(SpanCorruption(), [568] * 20):
        assert len(example["inputs"]) == 512
        assert len(example["targets"]) == 114


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 2**32))
def test_span_corruption_inverts(lengths, seed):
    for window, example in examples_of(SpanCorruption(), lengths, seed):
        assert example["inputs"][-1] == example["targets"][-1] == 1
        spans = {}
        for token in example["targets"][:-1]:
            if token >= VOCABULARY - 100:
                spans[token] = current = []
            else:
                current.append(token)
        expected = list(range(VOCABULARY - 1, VOCABULARY - 1 - len(spans), -1))
        assert list(spans) == expected
        rebuilt = []
        for token in example["inputs"][:-1]:
            rebuilt += spans.pop(token) if token in spans else [token]
        # A window of one token has no noise: T5 gives it a sentinel as targets.
        assert len(spans) == (1 if len(window) == 1 else 0)
        assert rebuilt == window.tolist()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 2**32))
def test_prefix_and_rest_make_the_window(lengths, seed):
    for window, example in examples_of(PrefixLM(), lengths, seed):
        assert example["inputs"][-1] == example["targets"][-1] == 1
        joined = [*example["inputs"][:-1], *example["targets"][:-1]]
        assert joined == window.tolist()
        assert len(example["targets"]) > 1
        assert len(example["inputs"]) > 1 or len(window) == 1


def test_prefix_lengths_are_uniform():
    lengths = [len(e["inputs"]) - 1 for _, e in examples_of(PrefixLM(), [11] * 10_000)]
    counts = np.bincount(lengths, minlength=11)
    assert counts[0] == 0
    assert ((counts[1:] - 1000) ** 2 / 1000).sum() < 27.9  # 9 degrees of freedom, 1 in 1000


def test_autoregressive_targets_are_the_window():
    for window, example in examples_of(AutoregressiveLM(), [511, 3]):
        assert list(example) == ["targets"]
        assert example["targets"].tolist() == [*window, 1]


@pytest.mark.parametrize(
    ("objective", "lengths", "says"),
    [
        (SpanCorruption(), Lengths(512, 100), "114"),
        (SpanCorruption(), Lengths(3, 30), "too short"),
        (PrefixLM(), Lengths(512, 256), "512"),
        (PrefixLM(), Lengths(2, 2), "at least 3"),
        (AutoregressiveLM(), Lengths(0, 1), "at least 2"),
    ],
)
def test_lengths_that_cannot_work_are_refused_with_those_that_would(objective, lengths, says):
    with pytest.raises(UserError, match=says):
        objective.window_tokens(lengths)


def test_sentinels_needed():
    assert SpanCorruption().sentinels(Lengths(512, 114)) == 28
    assert SpanCorruption().sentinels(Lengths(2048, 456)) == 114
    assert PrefixLM().sentinels(Lengths(512, 512)) == 0
