"""Denoising and language models: planned lengths, and examples that restore the window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import registry
from tasks.objectives import (
    DENOISING,
    AutoregressiveLM,
    DecoderPrefixLM,
    Denoising,
    Lengths,
    noise,
    prefix_lm,
    span_corruption,
)
from tasks.objectives.denoising import IidTokens, RandomSpans, RegularSpans
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from tests.support.spans import rebuilt

VOCABULARY = 32_100
IDS = TokenIds(VOCABULARY, 100)
ROOMY = Lengths(10_000, 10_000)


def examples_of(objective, lengths, seed=0, width=None, features=ROOMY, ids=IDS):
    generator = np.random.default_rng(seed)
    width = width or max(lengths)
    tokens = np.zeros((len(lengths), width), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = generator.integers(3, 30_000, length)
    keys = noise.fold_in(seed, np.arange(len(lengths)))
    made = objective.examples(tokens, np.array(lengths), keys, features, ids)
    return [
        (
            tokens[place, :length],
            {name: rows[place, : sizes[place]] for name, (rows, sizes) in made.items()},
        )
        for place, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 2**32))
def test_span_corruption_inverts(lengths, seed):
    for window, example in examples_of(span_corruption(), lengths, seed):
        assert example["inputs"][-1] == example["targets"][-1] == 1
        inputs, targets = (example[side][:-1].tolist() for side in ("inputs", "targets"))
        used = [[each for each in side if each >= VOCABULARY - 100] for side in (inputs, targets)]
        assert used[1] == list(range(VOCABULARY - 1, VOCABULARY - 1 - len(used[1]), -1))
        # A window of one token has no noise: T5 gives it a sentinel as targets.
        assert used[0] == (used[1] if len(window) > 1 else [])
        assert rebuilt(inputs, targets, VOCABULARY - 100) == window.tolist()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 2**32))
def test_prefix_and_rest_make_the_window(lengths, seed):
    for window, example in examples_of(prefix_lm(), lengths, seed):
        assert example["inputs"][-1] == example["targets"][-1] == 1
        joined = [*example["inputs"][:-1], *example["targets"][:-1]]
        assert joined == window.tolist()
        assert len(example["targets"]) > 1
        assert len(example["inputs"]) > 1 or len(window) == 1


def test_autoregressive_targets_are_the_window():
    for window, example in examples_of(AutoregressiveLM(), [511, 3]):
        assert list(example) == ["targets"]
        assert example["targets"].tolist() == [*window, 1]


@pytest.mark.parametrize(
    ("objective", "lengths", "says"),
    [
        (span_corruption(), Lengths(512, 100), "114"),
        (span_corruption(), Lengths(3, 30), "too short"),
        (prefix_lm(), Lengths(512, 256), "511"),
        (prefix_lm(), Lengths(2, 2), "too short"),
        (AutoregressiveLM(), Lengths(0, 1), "at least 2"),
    ],
)
def test_impossible_lengths_are_rejected_with_possible_ones(objective, lengths, says):
    with pytest.raises(UserError, match=says):
        objective.window_tokens(lengths)


def test_sentinels_needed():
    assert span_corruption().sentinels(Lengths(512, 114)) == 28
    assert span_corruption().sentinels(Lengths(2048, 456)) == 114
    assert prefix_lm().sentinels(Lengths(512, 512)) == 0


# Each experiment at the lengths that the T5 paper gave it: iid_15 had targets of 192 and 104.
@pytest.mark.parametrize(
    ("name", "published"),
    [("iid_15_u_u", 192), ("iid_15_d_d", 104), ("iid_50_u_u", 512), ("iid_15_m_f", 512)],
)
def test_published_lengths_serve(name, published):
    assert DENOISING[name].window_tokens(Lengths(512, published)) == 511
    assert DENOISING[name].fitting(512).targets > 0.9 * min(published, 430)


@pytest.mark.parametrize("name", DENOISING)
def test_examples_of_the_experiments_stay_within_their_plan(name):
    objective = DENOISING[name]
    lengths = objective.fitting(128)
    raw = objective.window_tokens(lengths)
    ids = TokenIds(VOCABULARY, 100 if name.endswith("f") else objective.sentinels(lengths))
    sides = [[], []]
    for window, example in examples_of(objective, [raw] * 1500, features=lengths, ids=ids):
        inputs, targets = example["inputs"][:-1], example["targets"][:-1]
        assert example["inputs"][-1] == example["targets"][-1] == 1
        for many, ones, most in (
            (sides[0], inputs, lengths.inputs),
            (sides[1], targets, lengths.targets),
        ):
            assert len(ones) < most
            many.append(len(ones) + 1)
        assert min(*inputs, *targets, ids.size) >= 3
        sentinels = [token for token in [*inputs, *targets] if token >= VOCABULARY - 100]
        assert min(sentinels, default=ids.size) >= ids.first_sentinel
        if name.endswith("u_u"):
            assert rebuilt(inputs, targets, VOCABULARY - 200) == window.tolist()
        elif name.endswith("d_d"):
            assert sorted([*inputs, *targets]) == sorted(window)
        else:
            assert targets.tolist() == window.tolist()
            assert len(inputs) == len(window)
        if name == "deshuffling":
            assert sorted(inputs) == sorted(window)
            assert inputs.tolist() != window.tolist()
    # The plan is not too generous: some window needs most of what it reserves.
    assert max(sides[1]) > 0.9 * lengths.targets
    if name.startswith("span"):
        assert min(sides[0]) == max(sides[0]) == lengths.inputs


def test_noise_ends_when_targets_or_sentinels_run_out():
    objective, lengths, ids = DENOISING["iid_50_u_u"], Lengths(40, 20), TokenIds(VOCABULARY, 5)
    for window, example in examples_of(objective, [39] * 300, features=lengths, ids=ids):
        assert len(example["targets"]) <= 20
        used = [token for side in example.values() for token in side if token >= VOCABULARY - 100]
        assert min(used) >= VOCABULARY - 5
        inputs, targets = (example[side][:-1] for side in ("inputs", "targets"))
        assert rebuilt(inputs, targets, VOCABULARY - 200) == window.tolist()
    dropping = Denoising(IidTokens(0.5), "drop_noise_tokens", "drop_nonnoise_tokens")
    sizes = [
        len(example["targets"])
        for _, example in examples_of(dropping, [39] * 300, features=lengths, ids=ids)
    ]
    assert max(sizes) == 20


def test_sentinels_of_the_inputs_run_out_too():
    """With targets that have none, the vocabulary's sentinels still bound the spans."""
    objective = Denoising(IidTokens(0.3), "noise_span_to_unique_sentinel", "drop_nonnoise_tokens")
    ids = TokenIds(1000, 10)
    tokens = np.full((50, 200), 7, np.int32)
    keys = noise.fold_in(0, np.arange(50))
    made = objective.examples(tokens, np.full(50, 200), keys, Lengths(256, 256), ids)
    inputs = made["inputs"][0]
    assert (inputs != 7).any()
    assert set(inputs[inputs > 7].tolist()) == set(range(990, 1000))


@pytest.mark.parametrize(
    "mask",
    [IidTokens(d) for d in (0.1, 0.15, 0.25, 0.5, 1.0)]
    + [RegularSpans(0.15, 1, 5), RegularSpans(0.5, 3, 3), RandomSpans(0.5, 3.0)],
)
@pytest.mark.parametrize("raw", [60, 511])
def test_bounds_hold_and_are_tight(mask, raw):
    windows = 4000
    keys = noise.fold_in(8, np.arange(windows))
    drawn = mask.draw(keys, np.full(windows, raw), raw)
    tokens, spans = drawn.sum(axis=1), noise.run_starts(drawn).sum(axis=1)
    bounds = mask.bounds(raw)
    assert tokens.min() >= bounds.fewest
    for values, bound in (
        (tokens, bounds.tokens),
        (spans, bounds.spans),
        (tokens + spans, bounds.tokens_and_spans),
    ):
        if mask.certain:
            assert values.max() == bound
        else:
            # Three standard deviations, rounded up; binomials of low density are skewed.
            assert (values > bound).mean() <= 0.005
            assert values.mean() + 2 * values.std() <= bound
            assert bound <= values.mean() + 3.4 * values.std() + 2


@pytest.mark.parametrize("mean", [1.0, 3.0, 8.0, 64.0])
@pytest.mark.parametrize("density", [0.1, 0.15, 0.3, 0.5])
def test_no_window_exceeds_the_planned_lengths(density, mean):
    """Short windows included, such as the last one of a split."""
    objective = span_corruption(density, mean)
    for inputs in (*range(8, 130, 3), 256, 512):
        lengths = objective.fitting(inputs)
        raw = objective.window_tokens(lengths)
        sizes = np.arange(1, raw + 1)
        tokens, spans = noise.span_counts(sizes, density, mean)
        made = sizes - tokens + spans + 1
        assert made.max() <= inputs
        assert made[-1] >= inputs - 1
        assert (tokens + spans + 1).max() == lengths.targets


def test_eos_after_documents_comes_from_the_cache():
    objective = AutoregressiveLM(eos="document")
    assert objective.separator == "eos"
    assert objective.window_tokens(Lengths(0, 512)) == 512
    for window, example in examples_of(objective, [512, 3]):
        assert example["targets"].tolist() == window.tolist()
    with pytest.raises(ValueError, match="line"):
        AutoregressiveLM(eos="line")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 2**32))
def test_prefix_and_predicted_tokens_of_a_decoder_make_the_window(lengths, seed):
    for window, example in examples_of(DecoderPrefixLM(), lengths, seed):
        assert example["targets"].tolist() == window.tolist()
        weights = example["weights"].tolist()
        split = len(window) - sum(weights)
        assert weights == [0] * split + [1] * sum(weights)
        assert split >= min(1, len(window) - 1)
        assert sum(weights) >= 1
        assert example["prefix"].sum() == min(split + 1, len(example["prefix"]))


def test_an_unknown_side_is_rejected():
    with pytest.raises(ValueError, match="drop_noise_tokens"):
        Denoising(inputs="drop_noise_token")


@pytest.mark.parametrize("name", registry.tasks())
def test_every_task_needs_at_most_a_hundred_sentinels_or_reports_how_many(name):
    task = registry.get(name)
    separator = task.objective.separator or "none"
    assert task.window_tokens >= 380
    if task.objective.sentinels(task.lengths) <= 100:
        task.check(task.lengths, IDS, separator, "it")
    else:
        assert name.rpartition("_u_u")[0].endswith(("iid_25", "iid_50"))
        with pytest.raises(UserError, match=r"needs up to 1\d\d sentinels"):
            task.check(task.lengths, IDS, separator, "it")


def test_a_wrong_separator_is_rejected():
    task = registry.get("rlm_full_lm")
    with pytest.raises(UserError, match="--separator=eos"):
        task.check(task.lengths, IDS, "none", "it")


def test_families():
    families = ("rlm", "c4", "lm1b", "pg19", "wikipedia", "python_docs")
    objectives_ = ("span_corruption", "prefix_lm", "autoregressive_lm", "ul2")
    known = registry.tasks()
    assert {f"{family}_{name}" for family in families for name in objectives_} <= set(known)
    assert known["c4_v220_autoregressive_language_modeling"].corpus == "hf:allenai/c4:en"
    for family in ("lm1b", "c4_v220", "pg19"):
        task = known[f"{family}_autoregressive_language_modeling"]
        assert (task.objective.eos, task.lengths) == ("window", Lengths(0, 512))
    # As many as Primer holds out of a corpus that has no split for it.
    assert "validation=0.02" in known["lm1b_autoregressive_language_modeling"].corpus
    with pytest.raises(UserError, match=r"c4_ul2") as error:
        registry.get("c4_ul")
    assert "rlm" not in str(error.value)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.0, 2.0, float("nan"), float("inf")])
def test_a_density_that_leaves_no_inputs_is_rejected(value):
    with pytest.raises(ValueError, match=r"noise_density is .*; it must be between 0 and 1"):
        span_corruption(value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_span_without_tokens_is_rejected(value):
    with pytest.raises(ValueError, match=r"mean_noise_span_length is .*; it must be above 0"):
        span_corruption(0.15, value)
