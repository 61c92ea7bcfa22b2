"""Lengths, span masks, sentinels and features against the T5 library and seqio."""

import json

import numpy as np
import pytest

from tasks import noise
from tasks.objectives import Lengths, span_corruption_lengths
from trainer.batches import FeatureConverter


@pytest.fixture(scope="module")
def data(reference):
    if not reference.has("data"):
        pytest.skip(f"{reference.folder} holds no data.npz")
    return reference.arrays("data")


@pytest.fixture(scope="module")
def settings(reference):
    path = reference.folder / "data.json"
    if not path.is_file():
        pytest.skip(f"{reference.folder} holds no data.json")
    return json.loads(path.read_text())


def ragged(data, name):
    borders = np.cumsum(data[f"{name}/lengths"])[:-1]
    return np.split(data[f"{name}/values"], borders)


def test_lengths_are_those_of_random_spans_helper(settings):
    # Rows of [inputs, density, mean span, extra inputs, extra targets, tokens, targets]; ours
    # always has one sentinel a span on both sides.
    rows = [row for row in settings["random_spans_helper"] if row[3:5] == [1, 1]]
    assert len(rows) > 100
    for inputs, density, mean, _, _, tokens, targets in rows:
        assert span_corruption_lengths(inputs, density, mean) == (tokens, targets)


def test_masks_have_the_counts_of_t5_s(data):
    masks = ragged(data, "noise_mask/mask")
    rolled = data["noise_mask/random_roll"]
    assert len(masks) > 100
    for number, mask in enumerate(masks):
        (tokens,), (spans,) = noise.span_counts(
            data["noise_mask/length"][[number]],
            data["noise_mask/noise_density"][number],
            data["noise_mask/mean_noise_span_length"][number],
        )
        if len(mask) > 1:
            assert mask.sum() == tokens
        if len(mask) > 1 and not rolled[number]:
            mask = mask.astype(bool)
            assert (mask[1:] & ~mask[:-1]).sum() == spans


def test_a_shuffle_is_a_gather_by_the_argsort_of_its_draws(data):
    """The step from draws to borders, with the draws of TensorFlow's generator."""
    shuffled = [name for name in data if name.startswith("rng/shuffle_range_40/")]
    assert shuffled
    for name in shuffled:
        draws = data[f"rng/uniform_f32_64/{name.rsplit('/', 1)[1]}"][:40].astype(np.float64)
        # 41 tokens into 4 parts: the borders are where the shuffle put the numbers 0, 1 and 2.
        parts = noise.compositions(np.array([41]), np.array([4]), draws[None])
        borders = np.flatnonzero(np.argsort(draws, kind="stable") < 3)
        assert parts[0].tolist() == np.diff([0, *(borders + 1), 41]).tolist()


def test_spans_become_sentinels_as_in_t5(data, settings):
    columns = zip(
        ragged(data, "span_fns/tokens"),
        ragged(data, "span_fns/mask"),
        ragged(data, "span_fns/noise_span_to_unique_sentinel"),
        ragged(data, "span_fns/nonnoise_span_to_unique_sentinel"),
        strict=True,
    )
    for tokens, mask, inputs, targets in columns:
        for side, expected in ((mask > 0, inputs), (mask == 0, targets)):
            ours, count = noise.substitute_spans(
                tokens[None], side[None], np.array([len(tokens)]), settings["vocab_size"] - 1
            )
            assert ours[0, : count[0]].tolist() == expected.tolist()


def chi_square(ours, theirs):
    """Statistic of two histograms being draws of one law, and its degrees of freedom."""
    kept = (ours + theirs) >= 20
    ours = np.append(ours[kept], ours[~kept].sum())
    theirs = np.append(theirs[kept], theirs[~kept].sum())
    scale = np.sqrt(theirs.sum() / ours.sum())
    difference = (ours * scale - theirs / scale) ** 2 / np.maximum(ours + theirs, 1)
    return difference.sum(), len(ours) - 1


def span_lengths(masks):
    edges = np.diff(np.pad(masks.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    begins, ends = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return np.bincount(ends[1] - begins[1], minlength=61)[:61]


def test_masks_follow_t5_s_law(data):
    name = "mask_statistics_568/"
    theirs_by_position = data[f"{name}noise_count_by_position"]
    theirs_by_length = data[f"{name}span_length_histogram_0_to_60"]
    windows = 10_000
    keys = noise.fold_in(1, np.arange(windows))
    masks = noise.span_mask(keys, np.full(windows, 568), 568)
    statistic, freedom = chi_square(span_lengths(masks), theirs_by_length)
    # The 99.9 % point of chi-square is below freedom + 4.5 sqrt(freedom) from 8 degrees on.
    assert freedom > 10
    assert statistic < freedom + 4.5 * np.sqrt(freedom)
    share, expected = masks.mean(axis=0), theirs_by_position / 4000
    deviation = np.sqrt(np.maximum(expected * (1 - expected), 1e-4) * (1 / 4000 + 1 / windows))
    assert (np.abs(share - expected) / deviation).max() < 5
    # Another law of the same means is told apart.
    wrong = noise.uniforms(keys, 568) < 85 / 568
    statistic, freedom = chi_square(span_lengths(wrong), theirs_by_length)
    assert statistic > 10 * freedom


@pytest.mark.parametrize(
    ("converter", "encoder_decoder"), [("encdec_nopack", True), ("prefixlm_nopack", False)]
)
def test_features_are_those_of_seqio_s_converters(data, settings, converter, encoder_decoder):
    expected = {
        name.rsplit("/", 1)[1]: array
        for name, array in data.items()
        if name.startswith(f"converter/{converter}/")
    }
    rows = len(expected["decoder_target_tokens"])
    inputs, targets = (
        ragged(data, f"converter/in/{side}")[:rows] for side in ("inputs", "targets")
    )
    lengths = Lengths(**settings["converters"][converter]["task_feature_lengths"])
    ours = FeatureConverter(lengths, encoder_decoder)(
        {"inputs": padded(inputs), "targets": padded(targets)}
    )
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def padded(lists):
    lengths = np.array([len(item) for item in lists])
    out = np.zeros((len(lists), lengths.max()), np.int32)
    for row, item in zip(out, lists, strict=True):
        row[: len(item)] = item
    return out, lengths
