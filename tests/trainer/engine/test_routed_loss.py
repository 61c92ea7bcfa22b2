"""The auxiliary loss of Switch layers: its scale, sums over parts of a batch, and metrics."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import LossConfig
from trainer.config.presets import model_preset
from trainer.engine.loss import decoder_loss, model_loss, routed_loss, scale_of
from trainer.engine.step import zero_metrics
from trainer.model.spec import model_spec
from trainer.model.switch import Routing
from trainer.model.transformer import RoutedLogits, build_model

B, L, V = 4, 6, 11
AUXILIARY = 0.25


def batch_of():
    random = np.random.default_rng(0)
    there = np.arange(L) < np.array([[6], [4], [1], [5]])
    return random.normal(size=(B, L, V)), {
        "decoder_target_tokens": jnp.asarray(random.integers(1, V, (B, L)) * there),
        "decoder_loss_weights": jnp.asarray(there.astype(np.int32)),
    }


def output_of(logits):
    routing = Routing(jnp.float32(AUXILIARY), jnp.float32(3.0), jnp.float32(12.0))
    return RoutedLogits(jnp.asarray(logits, jnp.float32), routing)


@pytest.mark.parametrize(
    ("config", "multiple"),
    [
        # As in Mesh TensorFlow: a mean over positions, of which 16 of 24 have tokens.
        (LossConfig(normalizer="num_total_target_tokens"), 16 / 24),
        (LossConfig(normalizer="num_real_target_tokens"), 1.0),
        (LossConfig(normalizer="average_per_sequence"), 1.0),
        (LossConfig(), 16.0),
        (LossConfig(normalizing_constant=8.0), 2.0),
    ],
)
def test_the_auxiliary_loss_is_scaled_like_the_token_loss(config, multiple):
    logits, batch = batch_of()
    output = output_of(logits)
    plain, metrics = decoder_loss(output.logits_BLV, batch, config)
    loss, routed_metrics = routed_loss(output, batch, config)
    np.testing.assert_allclose(loss - plain, multiple * AUXILIARY, rtol=1e-5)
    assert routed_metrics["dropped_tokens"] == (3.0, 12.0)
    assert routed_metrics["auxiliary_loss"] == (AUXILIARY, 1.0)
    assert routed_metrics.keys() - metrics.keys() == {"dropped_tokens", "auxiliary_loss"}

    # The losses of equally balanced parts add up to the loss of the whole.
    scale = scale_of(batch, "decoder", config)
    parts = [
        routed_loss(
            output_of(logits[rows]),
            {name: array[rows] for name, array in batch.items()},
            config,
            scale,
        )[0]
        for rows in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(sum(parts), loss, rtol=1e-5)


@pytest.mark.parametrize("routed", [True, False])
def test_only_models_with_experts_report_dropped_tokens(routed):
    name = "tiny_switch_primer" if routed else "tiny_primer_ez"
    model = build_model(model_spec(model_preset(name)))
    assert (model_loss(model).of_batch is routed_loss) == routed
    assert ("dropped_tokens" in zero_metrics(model)) == routed
