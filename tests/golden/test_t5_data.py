"""Lengths, span masks, sentinels and features against the T5 library and seqio."""

import json

import numpy as np
import pyarrow as pa
import pytest

from tasks.cache.pack import Documents, packer
from tasks.objectives import (
    AutoregressiveLM,
    DecoderPrefixLM,
    Lengths,
    noise,
    span_corruption_lengths,
)
from tasks.objectives.denoising import SIDES
from tasks.vocabulary import TokenIds
from trainer.data.features import FeatureConverter


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
    assert rows
    for inputs, density, mean, _, _, tokens, targets in rows:
        assert span_corruption_lengths(inputs, density, mean) == (tokens, targets)


def test_masks_have_the_counts_of_t5_s(data):
    masks = ragged(data, "noise_mask/mask")
    rolled = data["noise_mask/random_roll"]
    assert masks
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


def test_span_lengths_give_the_masks_of_t5(data):
    """Compares the step from two compositions to the mask, with compositions of T5's generator."""
    masks = ragged(data, "noise_mask/mask")
    checked = 0
    for mask, rolled in zip(masks, data["noise_mask/random_roll"], strict=True):
        if rolled or len(mask) < 2:
            continue
        borders = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
        spans = np.diff([0, *borders, len(mask)])
        ours = noise.alternate(
            spans[None, ::2], spans[None, 1::2], np.array([len(mask)]), len(mask) + 3
        )
        assert ours[0].tolist() == [*(mask > 0), False, False, False]
        checked += 1
    assert checked > 80


@pytest.mark.parametrize("kind", ["regular", "random_prefix"])
def test_other_masks_of_t5_are_among_ours(data, kind):
    """Every mask of T5's generator is drawn by ours with some key."""
    masks = ragged(data, f"noise_mask_{kind}/mask")
    keys = noise.fold_in(0, np.arange(20_000))
    for mask in masks:
        lengths = np.full(len(keys), len(mask))
        if kind == "regular":
            drawn = noise.regular_mask(keys, lengths, len(mask), 0.15, 1, 5)
        else:
            drawn = noise.prefix_mask(keys, lengths, len(mask), 0.5)
        assert (drawn == (mask > 0)).all(axis=1).any()


SIDES_OF_T5 = (
    *("noise_token_to_sentinel", "noise_span_to_sentinel", "nonnoise_span_to_sentinel"),
    *("drop_noise_tokens", "drop_nonnoise_tokens"),
    *("noise_span_to_unique_sentinel", "nonnoise_span_to_unique_sentinel"),
)


@pytest.mark.parametrize("name", SIDES_OF_T5)
def test_sides_match_the_functions_of_t5(data, settings, name):
    ids = TokenIds(settings["vocab_size"], 100)
    for tokens, mask, expected in zip(
        ragged(data, "span_fns/tokens"),
        ragged(data, "span_fns/mask"),
        ragged(data, f"span_fns/{name}"),
        strict=True,
    ):
        lengths = np.array([len(tokens)])
        ours, count = SIDES[name].make(tokens[None], mask[None] > 0, lengths, lengths, ids)
        assert ours[0, : count[0]].tolist() == expected.tolist()


def test_packed_rows_are_the_joined_documents_of_t5(data):
    """reduce_concat_tokens joins documents in their order, sixteen at a time; our rows all."""
    documents = [document for document in ragged(data, "docs/targets") if len(document)]
    rows = packer("concat", 100, "none")
    ids = pa.array([str(number) for number in range(len(documents))])
    lengths = np.array([len(document) for document in documents])
    made = [rows.add(Documents(ids, np.concatenate(documents), lengths)), rows.finish()]
    ours = np.concatenate([part.tokens for part in made])
    theirs = np.concatenate(ragged(data, "pipeline/reduce_concat_tokens_16/targets"))
    assert len(theirs)
    assert np.array_equal(ours[: len(theirs)], theirs)


def test_full_lm_is_t5_s(data):
    """Documents with EOS after each, cut into windows: T5's full_lm, given as many documents."""
    documents = ragged(data, "docs/targets")
    stream = np.concatenate([np.append(document, 1) for document in documents])
    expected = ragged(data, "pipeline/full_lm/targets")
    objective = AutoregressiveLM(eos="document")
    lengths = Lengths(0, 64)
    window = objective.window_tokens(lengths)
    rows = stream[: len(expected) * window].reshape(len(expected), window)
    keys = np.zeros(len(rows), np.uint64)
    sizes = np.full(len(rows), window)
    made, counts = objective.examples(rows, sizes, keys, lengths, TokenIds(1000, 100))["targets"]
    for row, count, target in zip(made, counts, expected, strict=True):
        assert row[:count].tolist() == target.tolist()


def test_prefix_lm_of_a_decoder_matches_t5(data, monkeypatch):
    """Compares the features of pack_prefix_lm_decoder_only, split at the positions of T5."""
    stem = "pipeline/pack_prefix_lm_decoder_only/"
    expected = {
        name.split("/")[2]: np.stack(ragged(data, f"{stem}{name.split('/')[2]}"))
        for name in data
        if name.startswith(stem) and name.endswith("/values")
    }
    targets = expected["decoder_target_tokens"]
    assert len(expected) == 4
    splits = np.argmax(expected["decoder_loss_weights"], axis=1)
    monkeypatch.setattr(noise, "integers", lambda keys, least, most: splits)
    lengths = Lengths(0, targets.shape[1])
    sizes, keys = np.full(len(targets), targets.shape[1]), np.zeros(len(targets), np.uint64)
    examples = DecoderPrefixLM().examples(targets, sizes, keys, lengths, TokenIds(1000, 100))
    ours = FeatureConverter(lengths, encoder_decoder=False)(examples)
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def chi_square(ours, theirs):
    """Returns chi-square for two histograms being draws of one distribution, and its freedom."""
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


def test_masks_have_the_distribution_of_t5(data):
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
    drawn = theirs_by_position.sum() / 85  # every mask of 568 tokens has 85 of noise
    share, expected = masks.mean(axis=0), theirs_by_position / drawn
    deviation = np.sqrt(np.maximum(expected * (1 - expected), 1e-4) * (1 / drawn + 1 / windows))
    assert (np.abs(share - expected) / deviation).max() < 5
    # Other distributions with the same means are detected.
    independent = noise.uniforms(keys, 568) < 85 / 568
    generator = np.random.default_rng(0)
    geometric = [generator.geometric(28 / total, (windows, 28)) for total in (483, 85)]
    for wrong in (independent, noise.alternate(*geometric, np.full(windows, 568), 568)):
        statistic, freedom = chi_square(span_lengths(wrong), theirs_by_length)
        assert statistic > 2 * freedom


@pytest.mark.parametrize(
    ("converter", "encoder_decoder"), [("encdec_nopack", True), ("prefixlm_nopack", False)]
)
def test_features_match_the_converters_of_seqio(data, settings, converter, encoder_decoder):
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
