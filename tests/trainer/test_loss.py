"""The loss: its value, its gradient, its normalisers, and metrics that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import LossConfig
from trainer.loss import loss_and_metrics

B, L, V = 2, 6, 11
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, L, V)).astype(np.float32) * 3
TARGETS = RNG.integers(1, V, (B, L))
WEIGHTS = np.array([[1, 1, 0.5, 2, 0, 0], [1, 1, 1, 1, 1, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 0]])


def by_definition(logits, targets, weights, z_loss, label_smoothing):
    """Per-token loss and z-loss in float64, with a whole target distribution."""
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


def test_metrics_are_weighted_sums_whatever_is_optimised():
    token_loss, _ = by_definition(LOGITS, TARGETS, WEIGHTS, 0.0, 0.0)
    correct = (LOGITS.argmax(-1) == TARGETS) * WEIGHTS
    for config in (
        LossConfig(),
        LossConfig(label_smoothing=0.2),
        LossConfig(normalizer="average_per_sequence"),
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
    config = LossConfig(z_loss=0.0, normalizer="average_per_sequence")
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


def test_a_row_that_counts_for_nothing_gives_no_nan():
    weights = WEIGHTS.copy()
    weights[0] = 0
    config = LossConfig(normalizer="average_per_sequence")
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
        (
            "normalizing_constant",
            {"normalizing_constant": 2.0, "normalizer": "average_per_sequence"},
        ),
    ],
)
def test_a_configuration_names_the_field_it_refuses(field, arguments):
    with pytest.raises(ValueError, match=rf"LossConfig\.{field} "):
        LossConfig(**arguments)
