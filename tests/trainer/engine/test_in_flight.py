"""The host runs one update ahead of the device, and no further."""

import types

import jax
import jax.numpy as jnp

from trainer.engine.in_flight import InFlight


@jax.jit
def update(matrix, step):
    matrix = jax.lax.fori_loop(0, 100, lambda _, each: jnp.tanh(each @ each), matrix)
    return matrix, step + 1 + (matrix[0, 0] * 0).astype(jnp.int32)


def test_all_updates_but_the_newest_are_finished():
    matrix, step = jax.block_until_ready(update(jnp.ones((256, 256)), jnp.int32(0)))
    in_flight, steps = InFlight(), []
    for _ in range(5):
        matrix, step = update(matrix, step)
        steps.append(step)
        in_flight.add(types.SimpleNamespace(step=step))
        assert all(each.is_ready() for each in steps[:-1])
    assert not step.is_ready()
