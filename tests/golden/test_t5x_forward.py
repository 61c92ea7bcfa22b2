"""Logits, encoder outputs and losses are T5X's, for every batch and loss setting found."""

import numpy as np

from tests.support.compiled import compiled
from trainer.config import LossConfig
from trainer.engine.loss import loss_and_metrics

TOLERANCE = 1e-5
NORMALIZERS = {
    "None": "sum",
    "NUM_REAL_TARGET_TOKENS": "num_real_target_tokens",
    "NUM_TOTAL_TARGET_TOKENS": "num_total_target_tokens",
    "AVERAGE_PER_SEQUENCE": "average_per_sequence",
}


def loss_of(array_set, variant: str, config: LossConfig):
    batch = array_set.batch(variant)
    loss, metrics = loss_and_metrics(
        array_set.logits(variant),
        batch["decoder_target_tokens"],
        batch["decoder_loss_weights"],
        config,
        batch.get("decoder_segment_ids"),
    )
    return float(loss), metrics


def test_logits(array_set, logits_variant, assert_close):
    expected = array_set.arrays[f"logits/{logits_variant}"]
    weights = array_set.batch(logits_variant)["decoder_loss_weights"][: len(expected)]
    ours = array_set.logits(logits_variant)[: len(expected)]
    assert ours.dtype == np.float32
    assert_close(ours[weights > 0], expected[weights > 0], TOLERANCE)


def test_encoder_output(array_set, encoder_variant, assert_close):
    batch = array_set.batch(encoder_variant)
    encode = compiled(lambda params, batch: array_set.model.apply(params, batch, method="encode"))
    ours = np.asarray(encode({"params": array_set.params}, batch))
    expected = array_set.arrays[f"encoder_output/{encoder_variant}"]
    tokens = batch["encoder_input_tokens"] > 0
    assert_close(ours[tokens], expected[tokens], TOLERANCE)


def test_loss(array_set, loss_variant, assert_close):
    loss, metrics = loss_of(array_set, loss_variant, LossConfig())
    expected = {
        name: array_set.arrays[f"{name}/{loss_variant}"]
        for name in ("loss", "z_loss", "weight_sum")
    }
    assert_close(loss, expected["loss"], TOLERANCE)
    assert_close(metrics["z_loss"][0], expected["z_loss"], TOLERANCE)
    assert_close(metrics["loss"][1], expected["weight_sum"], TOLERANCE)
    assert_close(metrics["loss"][0], expected["loss"] - expected["z_loss"], TOLERANCE)


def test_loss_settings(array_set, loss_setting):
    variant, _, settings = loss_setting.partition("/")
    told = dict(setting.split("=") for setting in settings.split(","))
    config = LossConfig(
        z_loss=float(told["z"]),
        label_smoothing=float(told["ls"]),
        normalizer=NORMALIZERS[told["lnf"]],
    )
    without_z = LossConfig(0.0, config.label_smoothing, config.normalizer)
    loss, _ = loss_of(array_set, variant, config)
    z_loss = loss - loss_of(array_set, variant, without_z)[0]
    expected_loss, expected_z_loss = array_set.arrays[f"loss_variants/{loss_setting}"]
    np.testing.assert_allclose(loss, expected_loss, rtol=TOLERANCE)
    # A difference of two losses, exact to float32 rounding of the losses.
    np.testing.assert_allclose(z_loss, expected_z_loss, rtol=0, atol=1e-6 * expected_loss)
