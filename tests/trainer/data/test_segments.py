"""Documents of a row as segments: the same examples, and no attention from one to another."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from tasks.cache.lineage import Lineage
from tasks.objectives import (
    AutoregressiveLM,
    DecoderPrefixLM,
    Lengths,
    noise,
    prefix_lm,
    span_corruption,
)
from tasks.objectives.ul2 import MixtureOfDenoisers
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from tests.support import runs, window_caches
from tests.support.trees import assert_close
from trainer.config import LossConfig
from trainer.config.from_flags import build_config
from trainer.config.presets import model_preset
from trainer.data import features, segments
from trainer.data.batches import BatchMaker
from trainer.engine.loss import decoder_loss
from trainer.evaluating import whole_splits
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params

IDS = TokenIds(600, 100)
# Objective -> (preset, lengths).
SHAPES = {
    "spans": (span_corruption(), "t5_1_1_tiny", Lengths(64, 20)),
    "ul2": (MixtureOfDenoisers(), "t5_1_1_tiny", Lengths(48, 48)),
    "lm": (AutoregressiveLM(), "lm_tiny", Lengths(0, 61)),
    "prefix": (DecoderPrefixLM(), "lm_tiny", Lengths(0, 60)),
}


@pytest.fixture(scope="module", params=["best_fit", "concat"])
def cache(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches") / request.param
    return window_caches.make(folder, request.param, 40, largest=IDS.first_sentinel)


def makers(cache, name):
    """Returns the makers of rows without segments and with them."""
    objective, model, lengths = SHAPES[name]
    windows = cache.windows(objective.window_tokens(lengths))
    converter = features.converter(model_preset(model), lengths)
    segments.check(objective, lengths, converter)
    return [
        BatchMaker(windows, objective, converter, IDS, by_document=by_document)
        for by_document in (False, True)
    ]


def test_every_token_has_the_document_that_the_lineage_says(cache):
    windows = cache.windows(57, keep_tails=True)
    lineage = Lineage(cache.folder, cache.manifest, "train")
    indices = np.arange(len(windows))[::-1]
    tokens_WN, lengths_W, documents_WN = windows.read_documents(indices)
    same_WN, same_W = windows.read(indices)
    assert np.array_equal(tokens_WN, same_WN)
    assert np.array_equal(lengths_W, same_W)
    several = 0
    for index, length, documents_N in zip(indices, lengths_W, documents_WN, strict=True):
        counts = [part.tokens for part in lineage.parts(windows.where(int(index)))]
        assert documents_N[:length].tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
        several += len(counts) > 1
    assert several > 20


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_without_segments(cache, name):
    plain, by_document = makers(cache, name)
    indices = np.arange(24)
    keys = noise.training_keys(1, "t", np.zeros(24, np.int64), indices)
    before, batch = plain.make(indices, keys), by_document.make(indices, keys)
    first = (batch["decoder_positions"] == 0) & (batch["decoder_segment_ids"] > 0)
    assert first.sum() > 24
    for feature, array in before.items():
        if feature == "decoder_input_tokens":
            assert np.array_equal(batch[feature][~first], array[~first])
            assert not batch[feature][first].any()
        else:
            assert np.array_equal(batch[feature], array)
    # Tokens that are copied from a window belong to their documents, in the inputs exactly.
    tokens_WN, lengths_W, documents_WN = by_document.windows.read_documents(indices)
    for row in range(24):
        own = {
            (int(token), int(document) + 1)
            for token, document in zip(
                tokens_WN[row, : lengths_W[row]], documents_WN[row], strict=False
            )
        }
        side = "encoder_input" if "encoder_input_tokens" in batch else "decoder_target"
        segment_L = batch[f"{side.partition('_')[0]}_segment_ids"][row]
        for token, segment in zip(batch[f"{side}_tokens"][row], segment_L, strict=True):
            copied = 2 < token < IDS.first_sentinel
            assert not copied or (int(token), int(segment)) in own
        for found in (segment_L, batch["decoder_segment_ids"][row]):
            assert (np.diff(found[found > 0]) >= 0).all()
    assert by_document.blank().keys() == batch.keys()


def alone(batch):
    """Returns the rows of a segmented batch with one document each, without segments."""
    pairs = [
        (row, int(segment))
        for row in range(len(batch["decoder_target_tokens"]))
        for segment in np.unique(batch["decoder_segment_ids"][row])
        if segment
    ]
    single = {
        feature: np.zeros((len(pairs), array.shape[1]), array.dtype)
        for feature, array in batch.items()
        if "segment" not in feature and "positions" not in feature
    }
    for number, (row, segment) in enumerate(pairs):
        for feature in single:
            chosen = batch[f"{feature.split('_')[0]}_segment_ids"][row] == segment
            single[feature][number, : chosen.sum()] = batch[feature][row, chosen]
    return single, len(pairs)


def losses_of(config, **changes):
    """Returns functions of a batch, of one layer a stack: (loss, gradients), and the loss."""
    layers = {"num_decoder_layers": 1, "num_encoder_layers": min(1, config.num_encoder_layers)}
    exact = {"dropout_rate": 0.0, "dtype": "float32"}
    spec = model_spec(dataclasses.replace(config, **layers, **exact, **changes))
    model, params = build_model(spec), jax.jit(partial(init_params, spec))(jax.random.key(0))

    def loss(params, batch):
        with jax.default_matmul_precision("highest"):
            logits = model.apply({"params": params}, batch, deterministic=True)
            return decoder_loss(logits, batch, LossConfig(normalizer="sum"))[0]

    return (partial(jax.jit(each), params) for each in (jax.value_and_grad(loss), loss))


@pytest.mark.processes
@pytest.mark.parametrize("cache", ["best_fit"], indirect=True)
@pytest.mark.parametrize("name", ["spans", "lm", "prefix"])
def test_documents_of_a_row_have_the_losses_and_gradients_they_have_alone(cache, name):
    _, maker = makers(cache, name)
    _, _, documents_WN = maker.windows.read_documents(np.arange(len(maker.windows)))
    indices = np.flatnonzero(documents_WN.max(axis=1))[:5]
    batch = maker.make(indices, noise.training_keys(1, "t", np.zeros(5, np.int64), indices))
    single, count = alone(batch)
    assert count > len(indices)
    learned, loss = losses_of(model_preset(SHAPES[name][1]), vocab_size=IDS.size)
    together, apart = learned(batch), learned(single)
    mixed = loss({feature: batch[feature] for feature in single})
    np.testing.assert_allclose(together[0], apart[0], rtol=2e-6)
    assert_close(together[1], apart[1], scale=2e-5, atol=2e-8)
    assert abs(float(mixed) - float(apart[0])) > 1e-3  # the comparison can fail


@pytest.mark.parametrize(
    ("objective", "model", "lengths"),
    [
        (prefix_lm(), "t5_1_1_tiny", Lengths(64, 64)),
        (span_corruption(), "lm_tiny", Lengths(64, 20)),
    ],
)
def test_objectives_that_cannot_have_segments_are_one_line(objective, model, lengths):
    converter = features.converter(model_preset(model), lengths)
    with pytest.raises(UserError, match=r"--data.segment_documents=true: .*leave it out"):
        segments.check(objective, lengths, converter)


@pytest.mark.parametrize(("task", "kept"), [("span_corruption", True), ("deshuffling", False)])
def test_another_task_is_evaluated_with_segments_if_it_can_have_them(
    task, kept, text_cache, capsys
):
    flags = ("--data.segment_documents=true", "--batch_size=2", "--lengths.targets=64")
    config, origins = build_config(runs.TINY, runs.flags_of(text_cache, "nowhere", *flags))
    other = whole_splits._on_another_task(config, origins, f"python_docs_{task}")
    run = whole_splits._opened(other, origins, another=True)
    assert run.config.data.segment_documents == kept
    assert ("leave it out" in capsys.readouterr().out) != kept
    if not kept:
        with pytest.raises(UserError, match="segment_documents=true: this objective"):
            whole_splits._opened(other, origins, another=False)
