"""Initial parameters: their spread, their limits, their types, and that a key fixes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.model.spec import model_spec
from trainer.model.transformer import init_params

EMB, HEADS, HEAD_DIM, MLP, VOCAB = 96, 4, 24, 128, 512


@pytest.fixture(scope="module")
def spec(make_config):
    sizes = {"emb_dim": EMB, "num_heads": HEADS, "head_dim": HEAD_DIM, "mlp_dim": MLP}
    return model_spec(make_config("t5_1_1", **sizes, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def params(spec):
    return init_params(spec, jax.random.PRNGKey(3))


def test_standard_deviations(params):
    layer = params["decoder"]["layers_0"]
    attention, mlp = layer["self_attention"], layer["mlp"]
    cross = layer["encoder_decoder_attention"]
    for kernel, expected in (
        (attention["query"]["kernel"], (EMB * HEAD_DIM) ** -0.5),
        (cross["query"]["kernel"], (EMB * HEAD_DIM) ** -0.5),
        (attention["key"]["kernel"], EMB**-0.5),
        (attention["value"]["kernel"], EMB**-0.5),
        (attention["out"]["kernel"], (HEADS * HEAD_DIM) ** -0.5),
        (mlp["wi_0"]["kernel"], EMB**-0.5),
        (mlp["wi_1"]["kernel"], EMB**-0.5),
        (mlp["wo"]["kernel"], MLP**-0.5),
        (params["decoder"]["logits_dense"]["kernel"], EMB**-0.5),
        (params["token_embedder"]["embedding"], 1.0),
    ):
        # At 9,216 draws or more the standard error of a standard deviation is below 0.8 %.
        np.testing.assert_allclose(np.std(kernel), expected, rtol=0.04)
        assert abs(np.mean(kernel)) < 5 * expected / kernel.size**0.5


def test_limits(params):
    # A normal cut at 2 and scaled back to its standard deviation reaches 2.27 of them.
    for name, fan_in in (("wi_0", EMB), ("wo", MLP)):
        kernel = params["encoder"]["layers_0"]["mlp"][name]["kernel"]
        assert 2.1 < np.abs(kernel).max() * fan_in**0.5 < 2.28
    # 3 / (mean of 4 heads and 32 buckets) is the square of a uniform distribution's limit.
    limit = (3 / ((HEADS + 32) / 2)) ** 0.5
    table = params["encoder"]["relpos_bias"]["rel_embedding"]
    assert 0.9 * limit < np.abs(table).max() <= limit
    assert np.all(params["encoder"]["encoder_norm"]["scale"] == 1)


def test_a_key_fixes_them(spec, params):
    again = init_params(spec, jax.random.PRNGKey(3))
    other = init_params(spec, jax.random.PRNGKey(4))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    assert not np.array_equal(
        params["token_embedder"]["embedding"], other["token_embedder"]["embedding"]
    )


def test_they_are_plain_float32_whatever_the_activations(make_config):
    spec = model_spec(make_config("lm", dtype="bfloat16"))
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    assert type(params) is dict
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
