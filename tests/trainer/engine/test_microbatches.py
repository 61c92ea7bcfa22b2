"""n microbatches equal one, in gradients and metrics, for every normaliser."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.cases import rows
from tests.support.compiled import compiled
from tests.support.parameters import slow_unless
from tests.support.runs import config_of
from tests.support.trees import assert_close
from trainer.config import LossConfig, config_changes
from trainer.config.from_flags import build_config
from trainer.config.unused_fields import refuse_unread
from trainer.engine.loss import model_loss
from trainer.engine.step import make_gradients
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params

B, L, V = 6, 10, 64
KEY = jax.random.key(2)
LOSSES = {
    "sum": LossConfig(),
    "constant": LossConfig(normalizing_constant=77.0),
    "real": LossConfig(normalizer="num_real_target_tokens"),
    "total": LossConfig(normalizer="num_total_target_tokens"),
    "sequences": LossConfig(normalizer="average_per_sequence", label_smoothing=0.1, z_loss=1e-2),
}


def batch_of(preset):
    """Returns rows with ever more tokens, so that no two microbatches have the same weight."""
    rng = np.random.default_rng(0)
    side = "encoder" if preset == "bert_tiny" else "decoder"
    lengths = np.linspace(1, L, B).astype(int)[:, None]
    there = np.arange(L) < lengths
    batch = {
        f"{side}_input_tokens": rng.integers(3, V, (B, L)) * there,
        f"{side}_target_tokens": rng.integers(3, V, (B, L)) * there,
        f"{side}_loss_weights": there * rng.integers(1, 4, (B, L)),
        f"{side}_segment_ids": there * (1 + (np.arange(L) >= lengths // 2)),
    }
    if side == "encoder":
        batch["encoder_input_tokens"][2] = 0  # a row of padding has no order
        batch["sentence_order"] = rng.integers(0, 2, B)
    return {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}


@functools.cache
def model_of(preset, dropout_rate=0.0, flags=()):
    """Returns (configuration, model, parameters) of a model with one layer."""
    sizes = {"vocab_size": V, "emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
    layers = "num_encoder_layers" if preset == "bert_tiny" else "num_decoder_layers"
    values = {**sizes, layers: 1, "dropout_rate": dropout_rate}
    sizes = [f"--model.{name}={value}" for name, value in values.items()]
    config, _ = build_config(preset, [*sizes, *flags])
    spec = model_spec(config.model)
    return config, build_model(spec), init_params(spec, jax.random.key(1))


@functools.cache
def gradients_of(preset, loss, microbatches, dropout_rate=0.0, flags=(), jit=jax.jit):
    config, model, params = model_of(preset, dropout_rate, flags)
    config = dataclasses.replace(config, loss=loss, microbatches=microbatches)
    return jit(make_gradients(model, config))(params, batch_of(preset), KEY)


@functools.cache
def plain_gradients(loss, dropout_rate, flags, jit):
    """Returns a function of (parameters, batch, key), by automatic differentiation alone."""
    _, model, _ = model_of("lm_tiny", dropout_rate, flags)

    def of(params, batch, key):
        output = model.apply({"params": params}, batch, deterministic=False, rngs={"dropout": key})
        return model_loss(model).of_batch(output, batch, loss)[0]

    return jit(jax.grad(of))


def plain_gradient(loss, rows, key, dropout_rate=0.5, flags=(), jit=jax.jit):
    """Returns the gradient for some rows of the batch."""
    _, _, params = model_of("lm_tiny", dropout_rate, flags)
    batch = {name: array[rows] for name, array in batch_of("lm_tiny").items()}
    return plain_gradients(loss, dropout_rate, flags, jit)(params, batch, key)


QUICK = [("lm_tiny", "real"), ("bert_tiny", "sequences")]
CASES = [*QUICK, ("bert_tiny", "sum"), *(("lm_tiny", name) for name in LOSSES if name != "real")]
CASES += rows("MICROBATCHES")


@pytest.mark.parametrize(("preset", "name"), slow_unless(QUICK, CASES))
def test_microbatches_equal_one(preset, name):
    one, metrics = gradients_of(preset, LOSSES[name], 1)
    three, sums = gradients_of(preset, LOSSES[name], 3)
    assert sums.keys() == metrics.keys()
    for metric, pair in metrics.items():
        np.testing.assert_allclose(sums[metric], pair, rtol=1e-5, err_msg=metric)
    size = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(one))
    assert {leaf.dtype for leaf in jax.tree.leaves(three)} == {jnp.dtype("float32")}
    assert_close(three, one, rtol=1e-7, atol=2e-6 * size)


def test_each_microbatch_has_a_dropout_key_of_its_own():
    gradients, _ = gradients_of("lm_tiny", LOSSES["sum"], 2, dropout_rate=0.5)
    parts = [
        plain_gradient(LOSSES["sum"], slice(part, None, 2), jax.random.fold_in(KEY, part))
        for part in range(2)
    ]
    assert_close(gradients, jax.tree.map(jnp.add, *parts), rtol=1e-7, atol=1e-5)


def of_parts(loss, slices):
    """Returns the sum of the gradients of parts, each with its own normalizer."""
    parts = [plain_gradient(loss, part, KEY, dropout_rate=0.0) for part in slices]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


@pytest.mark.parametrize(
    "name", slow_unless({"real"}, [name for name in LOSSES if name not in ("sum", "constant")])
)
def test_t5x_normalizes_adjacent_rows_by_themselves(name):
    loss = dataclasses.replace(LOSSES[name], normalize_over="microbatch")
    found, _ = gradients_of("lm_tiny", loss, 3)
    expected = of_parts(loss, [slice(0, 2), slice(2, 4), slice(4, 6)])
    size = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    assert_close(found, expected, rtol=1e-7, atol=2e-6 * size)
    whole, _ = gradients_of("lm_tiny", LOSSES[name], 3)
    differences = jax.tree.map(lambda one, two: jnp.max(jnp.abs(one - two)), found, whole)
    assert max(map(float, jax.tree.leaves(differences))) > 0.1 * size


def test_the_law_of_microbatches_is_part_of_the_run():
    flags = ["--loss.normalizer=num_real_target_tokens", "--microbatches=2", "--batch_size=6"]
    law = "--loss.normalize_over=microbatch"
    before = config_of(*flags, law)
    (change,) = config_changes(before, config_of(*flags), 1)
    assert "loss.normalize_over was microbatch, is batch" in change
    (change,) = config_changes(before, config_of(*flags, law, "--microbatches=3"), 1)
    assert "microbatches was 2, is 3, and each part of the batch is normalized" in change
    with pytest.raises(UserError, match="normalize_over has no effect unless --microbatches"):
        refuse_unread(*build_config("lm_tiny", [law]))


# These come last, since the tests after them in this module would compile as slowly.
@pytest.mark.processes
@pytest.mark.usefixtures("compiled_as_users_do")
def test_one_microbatch_is_the_plain_gradient():
    """They are equal bit for bit, dropout included, so that older runs resume identically."""
    gradients, _ = gradients_of("lm_tiny", LOSSES["real"], 1, dropout_rate=0.5, jit=compiled)
    plain = plain_gradient(LOSSES["real"], slice(None), KEY, jit=compiled)
    jax.tree.map(np.testing.assert_array_equal, gradients, plain)


@pytest.mark.processes
@pytest.mark.usefixtures("compiled_as_users_do")
@pytest.mark.parametrize("scanned", slow_unless({"true"}, ["false", "true"]))
def test_kernels_rounded_in_advance_give_the_gradient_of_the_plain_model(scanned):
    flags = (f"--model.scan_layers={scanned}", "--model.dtype=bfloat16")
    gradients, _ = gradients_of("lm_tiny", LOSSES["real"], 1, flags=flags, jit=compiled)
    plain = plain_gradient(LOSSES["real"], slice(None), KEY, 0.0, flags, compiled)
    jax.tree.map(np.testing.assert_array_equal, gradients, plain)
