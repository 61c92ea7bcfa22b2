"""Dropout and initial values of MARCH's parts, which whole models do not show."""

import jax
import jax.numpy as jnp
import numpy as np

from trainer.model.attention import DotProductAttention
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.positions import Positions
from trainer.zoo.march_parts import MixedMlp, SummedHeads, ValuesRelu

SHARED = Shared(64, 40, "float32", 0.0, StandardParametrisation())
DROPS = Shared(64, 40, "float32", 0.25, StandardParametrisation())


def values(params):
    return jax.tree.map(lambda box: box.value, params, is_leaf=lambda node: hasattr(node, "names"))


def test_dropout_of_sigmoids_spares_the_other_arm():
    module = MixedMlp(64, sigmoid_dropout=0.25).build(SHARED, "mlp")
    x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    params = values(module.init(jax.random.key(0), x, None, True)["params"])
    params["wo"]["kernel"] = jnp.eye(64)
    rngs = {"dropout": jax.random.key(1)}
    output = module.apply({"params": params}, x, None, False, rngs=rngs)
    sigmoid, relu = jax.nn.sigmoid(x @ params["wi_0"]["kernel"]), x @ params["wi_1"]["kernel"]
    kept = (2 * output - jnp.maximum(relu, 0)) / sigmoid
    dropped = np.isclose(kept, 0, atol=1e-4)
    np.testing.assert_allclose(np.where(dropped, 4 / 3, kept), 4 / 3, rtol=1e-4)
    assert 0.1 < dropped.mean() < 0.4


def test_dropout_of_values_is_before_one_square_product():
    module = ValuesRelu(None).build(DROPS, "values")
    params = {"wi": {"kernel": jnp.eye(64)}}
    ones, rngs = jnp.ones((3, 5, 64)), {"dropout": jax.random.key(1)}
    output = np.asarray(module.apply({"params": params}, ones, False, rngs=rngs))
    assert set(np.unique(output.round(4)).tolist()) == {0.0, np.float32(1.3333).item()}


def test_values_of_summed_heads_start_narrower():
    rows = Rows(jnp.ones((1, 2), int))
    view, x = View(jnp.ones((1, 1, 1), bool), Positions(), rows, rows), jnp.ones((1, 2, 64))
    module = DotProductAttention(8, 16, mixed_part=SummedHeads(4)).build(SHARED, "it")
    params = values(module.init(jax.random.key(0), x, x, view, True)["params"])
    assert params["out"]["kernel"].shape == (8 // 4 * 16, 64)
    for name, expected in (("key", 64**-0.5), ("value", (64 * 4) ** -0.5)):
        np.testing.assert_allclose(np.std(params[name]["kernel"]), expected, rtol=0.05)
