"""The loss: its value, gradient and normalisers, those that layers sow, and metrics that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import LossConfig
from trainer.config.presets import model_preset
from trainer.engine.loss import (
    decoder_loss,
    encoder_loss,
    loss_and_metrics,
    model_loss,
    scale_of,
    sequence_accuracy,
    sown_loss,
)
from trainer.model.feedforward import Sown
from trainer.model.spec import model_spec
from trainer.model.transformer import Predictions, SownLogits, build_model

B, L, V = 2, 6, 11
AVERAGE = "average_per_sequence"
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, L, V)).astype(np.float32) * 3
TARGETS = RNG.integers(1, V, (B, L))
WEIGHTS = np.array([[1, 1, 0.5, 2, 0, 0], [1, 1, 1, 1, 1, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 0]])


def by_definition(logits, targets, weights, z_loss, label_smoothing):
    """Returns per-token loss and z-loss in float64, from full target distributions."""
    logits = logits.astype(np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    off = label_smoothing / (logits.shape[-1] - 1)
    target = np.where(np.arange(logits.shape[-1]) == targets[..., None], 1 - label_smoothing, off)
    entropy = -np.sum(target * np.log(np.maximum(target, 1e-300)), axis=-1)
    cross_entropy = -np.sum(target * (logits - log_z[..., None]), axis=-1)
    return (cross_entropy - entropy) * weights, z_loss * log_z**2 * weights


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0.0, 1e-4, 0.1]), st.sampled_from([0.0, 0.1]), st.integers(0, 2**31))
def test_value_is_the_definition(z_loss, label_smoothing, seed):
    logits = np.random.default_rng(seed).normal(size=(B, L, V)).astype(np.float32) * 5
    loss, metrics = loss_and_metrics(logits, TARGETS, WEIGHTS, LossConfig(z_loss, label_smoothing))
    token_loss, token_z = by_definition(logits, TARGETS, WEIGHTS, z_loss, label_smoothing)
    np.testing.assert_allclose(loss, token_loss.sum() + token_z.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["z_loss"][0], token_z.sum(), rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradient_is_that_of_the_definition(label_smoothing):
    def plain(logits):
        off = label_smoothing / (V - 1)
        target = jax.nn.one_hot(TARGETS, V) * (1 - label_smoothing - off) + off
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
        z_loss = 0.01 * jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return jnp.sum((cross_entropy + z_loss) * WEIGHTS)

    def ours(logits):
        return loss_and_metrics(logits, TARGETS, WEIGHTS, LossConfig(0.01, label_smoothing))[0]

    gradient = jax.grad(ours)(LOGITS)
    np.testing.assert_allclose(gradient, jax.grad(plain)(LOGITS), atol=2e-6)
    assert np.all(gradient[WEIGHTS == 0] == 0)


def test_metrics_do_not_depend_on_the_normaliser():
    token_loss, _ = by_definition(LOGITS, TARGETS, WEIGHTS, 0.0, 0.0)
    correct = (LOGITS.argmax(-1) == TARGETS) * WEIGHTS
    for config in (
        LossConfig(),
        LossConfig(label_smoothing=0.2),
        LossConfig(normalizer=AVERAGE),
        LossConfig(normalizing_constant=7.0),
    ):
        _, metrics = loss_and_metrics(LOGITS, TARGETS, WEIGHTS, config)
        np.testing.assert_allclose(metrics["loss"][0], token_loss.sum(), rtol=1e-6)
        np.testing.assert_allclose(metrics["accuracy"][0], correct.sum(), rtol=1e-6)
        for total, weight in metrics.values():
            assert total.dtype == weight.dtype == jnp.float32
            assert weight == WEIGHTS.sum()


@pytest.mark.parametrize(
    ("config", "divisor"),
    [
        (LossConfig(), 1.0),
        (LossConfig(normalizer="num_real_target_tokens"), WEIGHTS.sum()),
        (LossConfig(normalizer="num_total_target_tokens"), B * L),
        (LossConfig(normalizing_constant=233472.0), 233472.0),
    ],
)
def test_normalizers_divide_the_sum(config, divisor):
    total = sum(part.sum() for part in by_definition(LOGITS, TARGETS, WEIGHTS, 1e-4, 0.0))
    loss, _ = loss_and_metrics(LOGITS, TARGETS, WEIGHTS, config)
    np.testing.assert_allclose(loss, total / divisor, rtol=1e-5)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "packed"])
def test_average_per_sequence_is_the_mean_of_means(segments):
    config = LossConfig(z_loss=0.0, normalizer=AVERAGE)
    loss, _ = loss_and_metrics(LOGITS, TARGETS, WEIGHTS, config, segments)
    token_loss, _ = by_definition(LOGITS, TARGETS, WEIGHTS, 0.0, 0.0)
    rows = np.ones((B, L), int) if segments is None else segments
    means = [
        token_loss[row][rows[row] == segment].sum() / WEIGHTS[row][rows[row] == segment].sum()
        for row in range(B)
        for segment in np.unique(rows[row])
        if WEIGHTS[row][rows[row] == segment].sum() > 0
    ]
    np.testing.assert_allclose(loss, np.mean(means), rtol=1e-5)


def test_a_row_of_zero_weight_gives_no_nan():
    weights = WEIGHTS.copy()
    weights[0] = 0
    config = LossConfig(normalizer=AVERAGE)
    loss, gradient = jax.value_and_grad(
        lambda logits: loss_and_metrics(logits, TARGETS, weights, config)[0]
    )(LOGITS)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))
    assert np.all(gradient[0] == 0)


def test_large_logits_and_bfloat16_are_summed_in_float32():
    loss, _ = loss_and_metrics(LOGITS * 1e4, TARGETS, WEIGHTS, LossConfig(z_loss=0.0))
    assert np.isfinite(loss)
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    loss, _ = loss_and_metrics(half, TARGETS, WEIGHTS, LossConfig())
    exact, _ = loss_and_metrics(half.astype(jnp.float32), TARGETS, WEIGHTS, LossConfig())
    assert loss.dtype == jnp.float32
    assert loss == exact


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("normalizer", {"normalizer": "mean"}),
        ("z_loss", {"z_loss": -1e-4}),
        ("label_smoothing", {"label_smoothing": 1.0}),
        ("normalizing_constant", {"normalizing_constant": 0.0}),
        ("normalizing_constant", {"normalizing_constant": 2.0, "normalizer": AVERAGE}),
    ],
)
def test_a_rejected_field_is_named(field, arguments):
    with pytest.raises(ValueError, match=rf"LossConfig\.{field} "):
        LossConfig(**arguments)


ROW_LOGITS = RNG.normal(size=(B, 2)).astype(np.float32) * 2
MASKED = {
    "encoder_input_tokens": TARGETS,
    "encoder_target_tokens": TARGETS,
    "encoder_loss_weights": np.array([[0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]),
    "sentence_order": np.array([1, 0]),
}


def order_by_definition():
    logits = ROW_LOGITS.astype(np.float64)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(B), MASKED["sentence_order"]]


def test_encoder_loss_is_the_sum_of_two_means():
    config = LossConfig(z_loss=0.0, normalizer="num_real_target_tokens")
    loss, metrics = encoder_loss(Predictions(LOGITS, ROW_LOGITS), MASKED, config)
    weights = MASKED["encoder_loss_weights"]
    tokens, _ = by_definition(LOGITS, TARGETS, weights, 0.0, 0.0)
    order = order_by_definition()
    np.testing.assert_allclose(loss, tokens.sum() / 3 + order.mean(), rtol=1e-5)
    right = (LOGITS.argmax(-1) == TARGETS) * weights
    expected = {
        "loss": (tokens.sum(), 3),
        "z_loss": (0, 3),
        "accuracy": (right.sum(), 3),
        "order_loss": (order.sum(), B),
        "order_accuracy": ((ROW_LOGITS.argmax(-1) == MASKED["sentence_order"]).sum(), B),
    }
    assert metrics.keys() == expected.keys()
    for name, pair in expected.items():
        np.testing.assert_allclose(metrics[name], pair, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("config", "share"),
    [
        (LossConfig(), 3.0),
        (LossConfig(normalizer="num_total_target_tokens"), 3 / (B * L)),
        (LossConfig(normalizer=AVERAGE), 1.0),
        (LossConfig(normalizing_constant=12.0), 3 / 12),
    ],
)
def test_the_normaliser_scales_both_means_alike(config, share):
    weights = MASKED["encoder_loss_weights"]
    tokens, _ = loss_and_metrics(LOGITS, TARGETS, weights, config)
    loss, _ = encoder_loss(Predictions(LOGITS, ROW_LOGITS), MASKED, config)
    np.testing.assert_allclose(loss - tokens, share * order_by_definition().mean(), rtol=1e-4)


def test_only_chosen_tokens_are_predicted():
    def loss(logits, row_logits, batch):
        return encoder_loss(Predictions(logits, row_logits), batch, LossConfig())[0]

    by_token, by_row = jax.grad(loss, argnums=(0, 1))(LOGITS, ROW_LOGITS, MASKED)
    moved = np.any(np.asarray(by_token) != 0, axis=-1)
    np.testing.assert_array_equal(moved, MASKED["encoder_loss_weights"] > 0)
    assert np.all(np.any(np.asarray(by_row) != 0, axis=-1))
    # Rows of padding, as in the last batch of an evaluation, have no sentence order either.
    padded = {name: array.copy() for name, array in MASKED.items()}
    for array in padded.values():
        array[1] = 0
    by_row = jax.grad(loss, argnums=1)(LOGITS, ROW_LOGITS, padded)
    assert np.all(np.any(np.asarray(by_row) != 0, axis=-1) == [True, False])
    _, metrics = encoder_loss(Predictions(LOGITS, ROW_LOGITS), padded, LossConfig())
    assert metrics["order_loss"][1] == 1


def test_without_sentence_order_the_loss_is_masked_lm_only():
    batch = {name: array for name, array in MASKED.items() if name != "sentence_order"}
    loss, metrics = encoder_loss(Predictions(LOGITS, ROW_LOGITS), batch, LossConfig())
    assert (
        loss == loss_and_metrics(LOGITS, TARGETS, MASKED["encoder_loss_weights"], LossConfig())[0]
    )
    assert metrics["order_loss"] == metrics["order_accuracy"] == (0, 0)


@pytest.mark.parametrize("preset", ["t5_1_1_tiny", "lm_tiny", "bert_tiny"])
def test_model_loss_names_all_its_metrics(preset):
    model = build_model(model_spec(model_preset(preset)))
    side = "encoder" if preset == "bert_tiny" else "decoder"
    batch = {f"{side}_{name}": TARGETS for name in ("input_tokens", "target_tokens")}
    batch[f"{side}_loss_weights"] = WEIGHTS
    output = Predictions(LOGITS, ROW_LOGITS) if preset == "bert_tiny" else LOGITS
    expected = model_loss(model)
    _, metrics = expected.of_batch(output, batch, LossConfig())
    assert set(metrics) == set(expected.metrics)


def test_a_target_that_ties_is_wrong():
    logits, targets = jnp.asarray([[[2.0, 2, 1], [1, 2, 0], [5, 5, 5]]]), jnp.asarray([[0, 1, 0]])
    _, metrics = loss_and_metrics(logits, targets, jnp.ones((1, 3)), LossConfig())
    assert metrics["accuracy"] == (1, 3)


def test_a_sequence_is_correct_if_all_its_targets_are():
    targets = jnp.asarray([[1, 2, 0], [2, 1, 1], [0, 0, 0]])
    predicted = jnp.asarray([[1, 2, 1], [2, 1, 2], [1, 1, 1]])
    batch = {"decoder_target_tokens": targets, "decoder_loss_weights": (targets > 0).astype(int)}
    total, rows = sequence_accuracy(jax.nn.one_hot(predicted, 3), batch)["sequence_accuracy"]
    assert (float(total), float(rows)) == (1.0, 2.0)


AUXILIARY = 0.25


def sown_batch():
    random = np.random.default_rng(0)
    there = np.arange(L) < np.array([[6], [4], [1], [5]])
    return random.normal(size=(4, L, V)), {
        "decoder_target_tokens": jnp.asarray(random.integers(1, V, (4, L)) * there),
        "decoder_loss_weights": jnp.asarray(there.astype(np.int32)),
    }


def output_of(logits):
    sown = Sown(jnp.float32(AUXILIARY), {"shares": (jnp.float32(3.0), jnp.float32(12.0))})
    return SownLogits(jnp.asarray(logits, jnp.float32), sown)


@pytest.mark.parametrize(
    ("config", "multiple"),
    [
        # As in Mesh TensorFlow: a mean over positions, of which 16 of 24 have tokens.
        (LossConfig(normalizer="num_total_target_tokens"), 16 / 24),
        (LossConfig(normalizer="num_real_target_tokens"), 1.0),
        (LossConfig(normalizer=AVERAGE), 1.0),
        (LossConfig(), 16.0),
        (LossConfig(normalizing_constant=8.0), 2.0),
    ],
)
def test_the_auxiliary_loss_is_scaled_like_the_token_loss(config, multiple):
    logits, batch = sown_batch()
    output = output_of(logits)
    plain, metrics = decoder_loss(output.logits_BLV, batch, config)
    loss, sown_metrics = sown_loss(output, batch, config)
    np.testing.assert_allclose(loss - plain, multiple * AUXILIARY, rtol=1e-5)
    assert sown_metrics["shares"] == (3.0, 12.0)
    assert sown_metrics["auxiliary_loss"] == (AUXILIARY, 1.0)
    assert sown_metrics.keys() - metrics.keys() == {"shares", "auxiliary_loss"}

    # The losses of equally balanced parts add up to the loss of the whole.
    scale = scale_of(batch, "decoder", config)
    parts = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: array[rows] for name, array in batch.items()}
        parts += sown_loss(output_of(logits[rows]), part, config, scale)[0]
    np.testing.assert_allclose(parts, loss, rtol=1e-5)
