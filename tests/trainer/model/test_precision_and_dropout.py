"""bfloat16 stays near float32; dropout is a function of its key and off when deterministic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.support.cases import rows
from tests.support.compiled import compiled
from tests.support.trees import assert_close
from trainer.model.dense import Shared, einsum_float32
from trainer.model.parametrisation import StandardParametrisation

BERT = {"model": "bert", "head_dim": 8}


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        *({"model": "t5_1_1"}, {"model": "lm", "tied_logits": True}, BERT),
        *(BERT | {"position": position} for position in ("relative", "rotary")),
        *rows("IN_BFLOAT16"),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_bfloat16_is_close_to_float32(make_tiny, batch, changes):
    tiny, half = make_tiny(**changes), make_tiny(**changes, dtype="bfloat16")

    def logits_and_gradients(model):
        def mean_square(params):
            output = model.model.apply({"params": params}, batch)
            logits = output[0] if isinstance(output, tuple) else output
            return jnp.mean(jnp.square(logits)), logits

        gradients, logits = jax.jit(jax.grad(mean_square, has_aux=True))(tiny.params)
        return logits, np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)])

    logits, gradients = logits_and_gradients(tiny)
    half_logits, half_gradients = logits_and_gradients(half)
    assert half_logits.dtype == jnp.float32
    assert half_gradients.dtype == np.float32
    assert not np.array_equal(logits, half_logits)
    np.testing.assert_allclose(half_logits, logits, atol=0.05 * float(jnp.abs(logits).max()))
    error = np.linalg.norm(half_gradients - gradients) / np.linalg.norm(gradients)
    assert error < 0.05


def test_einsum_float32_sums_in_float32_and_returns_gradients_in_the_operands_dtype():
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    x, y = (jax.random.normal(key, (2, 3, 64)) for key in keys[:2])
    g = jax.random.normal(keys[2], (2, 3, 3))

    def gradients(function, x, y):
        return jax.grad(lambda x, y: jnp.sum(function(x, y) * g), argnums=(0, 1))(x, y)

    ours, plain = (partial(function, "blk,bsk->bls") for function in (einsum_float32, jnp.einsum))
    assert_close(gradients(ours, x, y), gradients(plain, x, y), rtol=1e-5, atol=1e-5)
    x16, y16 = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    assert ours(x16, y16).dtype == jnp.float32
    exact = plain(x16.astype(jnp.float32), y16.astype(jnp.float32))
    np.testing.assert_allclose(ours(x16, y16), exact, rtol=1e-5, atol=1e-5)
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients(ours, x16, y16))


@pytest.fixture(scope="module")
def dropping(make_tiny):
    return make_tiny("lm", dropout_rate=0.5)


def test_dropout_is_a_function_of_its_key(dropping, batch):
    params = {"params": dropping.params}

    @jax.jit
    def logits(key):
        return dropping.model.apply(params, batch, deterministic=False, rngs={"dropout": key})

    first = logits(jax.random.PRNGKey(0))
    np.testing.assert_array_equal(first, logits(jax.random.PRNGKey(0)))
    assert not np.allclose(first, logits(jax.random.PRNGKey(1)), atol=1e-3)
    assert not np.allclose(first, dropping.apply(batch), atol=1e-3)


def test_dropout_is_off_when_deterministic(dropping, make_tiny, batch):
    without = make_tiny("lm", dropout_rate=0.0)
    # With a rate of 0 no key is needed.
    expected = without.apply(batch, dropping.params, deterministic=False)
    np.testing.assert_array_equal(dropping.apply(batch), expected)


@pytest.mark.usefixtures("compiled_as_users_do")
@pytest.mark.parametrize("broadcast_length", [True, False])
def test_dropout_is_that_of_flax_and_keeps_its_draws_only(broadcast_length):
    ours = Shared(4, 8, "float32", 0.3, StandardParametrisation()).dropout(broadcast_length)
    flax = nn.Dropout(0.3, broadcast_dims=(-2,) if broadcast_length else ())
    key = {"dropout": jax.random.PRNGKey(3)}
    x, gradient = jax.random.normal(jax.random.PRNGKey(0), (2, 3, 16, 64))

    def dropped(dropout, x):
        return jax.vjp(lambda x: dropout.apply({}, x, deterministic=False, rngs=key), x)

    @partial(compiled, static_argnums=0)
    def both(dropout):
        out, backward = dropped(dropout, x)
        return out, *backward(gradient)

    np.testing.assert_array_equal(both(ours), both(flax))
    _, backward = jax.eval_shape(partial(dropped, ours), x)
    (kept,) = jax.tree.leaves(backward)
    assert kept.shape == ((3, 1, 64) if broadcast_length else (3, 16, 64))
    assert kept.dtype == bool
