"""Initial parameters have types of their own; their values are compared in tests/golden."""

import jax
import jax.numpy as jnp

from trainer.model.spec import model_spec
from trainer.model.transformer import init_params


def test_they_are_plain_float32_whatever_the_activations(make_config):
    spec = model_spec(make_config("lm", dtype="bfloat16"))
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    assert type(params) is dict
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
