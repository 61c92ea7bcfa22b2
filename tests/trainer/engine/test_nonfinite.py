"""The first tensor that is no number is named."""

import jax
import jax.numpy as jnp
import pytest

from trainer.engine.nonfinite import first_nonfinite, leaf_name

TREE = {
    "decoder": {"layers_0": {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(2)}},
    "encoder": {"kernel": jnp.ones((2, 2), jnp.bfloat16)},
    "step": jnp.int32(7),
}


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({}, None),
        ({"encoder": {"kernel": jnp.array([1, jnp.nan])}}, "encoder/kernel"),
        ({"encoder": {"kernel": jnp.array([-jnp.inf])}, "z": jnp.nan}, "encoder/kernel"),
        ({"decoder": {"layers_0": {"scale": jnp.array(jnp.nan)}}}, "decoder/layers_0/scale"),
    ],
)
def test_the_first_bad_leaf(bad, name):
    tree = {**TREE, **bad}
    index = jax.jit(first_nonfinite)(tree)
    assert index.dtype == jnp.int32
    assert leaf_name(tree, int(index)) == name


def test_a_tree_without_leaves_is_finite():
    assert int(first_nonfinite({})) == -1
