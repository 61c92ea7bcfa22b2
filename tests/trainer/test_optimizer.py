"""Adafactor and its schedules, where no T5X array is needed to know the answer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.config import OptimizerConfig
from trainer.optimizer import learning_rate_schedule, make_optimizer

PARAMS = {"large": jnp.full((4, 8), 2.0), "small": jnp.full((3,), 1e-6)}
GRADIENTS = {"large": jnp.linspace(-1, 1, 32).reshape(4, 8), "small": jnp.array([1.0, -2, 3])}


def test_the_default_schedule_has_no_ramp():
    schedule = learning_rate_schedule(OptimizerConfig())
    rates = schedule(jnp.array([0, 1, 10_000, 40_000, 1_000_000]))
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.01, 0.005, 0.001], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 5, 0.5),
        ("constant*linear_warmup", 25, 0.125),
        ("linear_warmup * rsqrt_normalized_decay", 400, 0.5),
        ("constant * decay_every", 250, 0.5 * 0.5**2),
        ("constant * cosine_decay", 100 + 500, 0.25),
        ("constant * cosine_decay", 100 + 1000, 0.5),
        ("linear_decay", 101, 0.25),
        ("linear_decay", 200, 1e-8),
    ],
)
def test_factors(schedule, step, expected):
    config = OptimizerConfig(
        learning_rate=0.5,
        schedule=schedule,
        warmup_steps=100,
        steps_per_decay=100,
        steps_per_cycle=1000,
    )
    np.testing.assert_allclose(learning_rate_schedule(config)(step), expected, rtol=1e-5)


def test_the_first_update_moves_each_element_by_the_rate_times_its_tensors_size():
    optimizer = make_optimizer(OptimizerConfig())
    updates, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    # The decay of step 1 is 0, so a gradient is divided by itself; sizes below 1e-3 count as that.
    for name, size in (("large", 2.0), ("small", 1e-3)):
        expected = -0.01 * size * np.sign(GRADIENTS[name])
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5)


def test_the_size_of_gradients_does_not_matter():
    optimizer = make_optimizer(OptimizerConfig())
    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update(GRADIENTS, state, PARAMS)
    scaled = jax.tree.map(lambda gradient: gradient * 1000, GRADIENTS)
    scaled_updates, _ = optimizer.update(scaled, state, PARAMS)
    for name in PARAMS:
        np.testing.assert_allclose(updates[name], scaled_updates[name], rtol=1e-5)


def test_only_tensors_with_two_large_dimensions_are_factored():
    params = {"kernel": jnp.ones((16, 24)), "thin": jnp.ones((15, 24)), "scale": jnp.ones((40,))}
    state = make_optimizer(OptimizerConfig(min_dim_size_to_factor=16)).init(params)
    moments = next(part for part in state if hasattr(part, "v_row"))
    assert sorted([moments.v_row["kernel"].shape, moments.v_col["kernel"].shape]) == [(16,), (24,)]
    assert moments.v["kernel"].shape == (1,)
    for name in ("thin", "scale"):
        assert moments.v[name].shape == params[name].shape
        assert moments.v_row[name].shape == (1,)


def test_the_state_is_a_plain_pytree_that_jits_and_counts():
    optimizer = make_optimizer(OptimizerConfig())
    state = optimizer.init(PARAMS)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(GRADIENTS, state, PARAMS)
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert counts
    assert all(int(count) == 2 for count in counts)
    assert jax.tree.structure(optax.apply_updates(PARAMS, updates)) == jax.tree.structure(PARAMS)


def test_an_unknown_factor_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown factor 'rsqrt_deacy'.*known are.*rsqrt_decay"):
        OptimizerConfig(schedule="constant * rsqrt_deacy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "adam"),
        ("warmup_steps", 0),
        ("steps_per_decay", 0),
        ("steps_per_cycle", -1),
        ("clipping_threshold", 0.5),
    ],
)
def test_a_configuration_names_the_field_it_refuses(field, value):
    with pytest.raises(ValueError, match=rf"OptimizerConfig\.{field} is "):
        OptimizerConfig(**{field: value})
