"""Logits, encoder outputs, losses, gradients and Adafactor steps are T5X's."""

import numpy as np
import optax
import pytest

from tests.support.compiled import compiled
from trainer.config import LossConfig, OptimizerConfig
from trainer.engine.loss import loss_and_metrics
from trainer.optim.optimizer import learning_rate_schedule, make_optimizer

# Settings of the two training runs in README.md.
OPTIMIZERS = {
    "train": OptimizerConfig(),
    "train_factored": OptimizerConfig(min_dim_size_to_factor=16),
}
# Number of steps to tolerance.
TOLERANCES = {1: 1e-6, 10: 1e-4}


@pytest.fixture(scope="session")
def trained(array_set, training):
    """Returns parameters and optimizer state after each number of TOLERANCES, and all losses."""
    batch = array_set.batch("packed" if array_set.names("batch/packed/") else "prefix_packed")
    optimizer = make_optimizer(OPTIMIZERS[training])

    @compiled
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, losses, kept = array_set.params, [], {}
    state = optimizer.init(params)
    for count in range(1, max(TOLERANCES) + 1):
        loss, gradients = array_set.value_and_gradient(params, batch)
        params, state = update(params, state, gradients)
        losses.append(float(loss))
        if count in TOLERANCES:
            kept[count] = params, state
    return kept, losses


def leaf(tree, name: str):
    for part in name.split("/"):
        tree = tree[part]
    return tree


def test_gradients(array_set, gradient_variant, assert_close):
    batch = array_set.batch(gradient_variant)
    _, ours = array_set.value_and_gradient(array_set.params, batch)
    for name in array_set.names(f"grads/{gradient_variant}/"):
        expected = array_set.arrays[f"grads/{gradient_variant}/{name}"]
        assert_close(leaf(ours, name), expected, 1e-5, name)


@pytest.mark.processes
def test_losses_along_the_way(array_set, training, trained, assert_close):
    _, losses = trained
    assert_close(losses, array_set.arrays[f"{training}/loss_before_step"], 1e-5)


def test_learning_rate(array_set, training):
    if f"{training}/learning_rate" not in array_set.arrays:
        pytest.skip(f"{array_set.name} keeps no learning rates of {training}")
    expected = array_set.arrays[f"{training}/learning_rate"]
    schedule = learning_rate_schedule(OPTIMIZERS[training])
    ours = [float(schedule(step)) for step in range(len(expected))]
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_parameters_after_steps(array_set, training, trained, assert_close):
    kept, _ = trained
    compared = 0
    for count, tolerance in TOLERANCES.items():
        prefix = f"{training}/params_after_{count}/"
        for name in array_set.names(prefix):
            expected = array_set.arrays[prefix + name]
            assert_close(leaf(kept[count][0], name), expected, tolerance, f"{prefix}{name}")
            compared += 1
    assert compared > 0


def test_optimizer_state_after_steps(array_set, training, trained, assert_close):
    kept, _ = trained
    prefix = f"{training}/opt_after_10/"
    if not array_set.names(prefix):
        pytest.skip(f"{array_set.name} keeps no optimizer state of {training}")
    moments = next(state for state in kept[10][1] if hasattr(state, "v_row"))
    for name in array_set.names(prefix):
        parameter, _, moment = name.rpartition("/")
        ours = leaf(getattr(moments, moment), parameter)
        assert_close(ours, array_set.arrays[prefix + name], TOLERANCES[10], f"{prefix}{name}")


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
