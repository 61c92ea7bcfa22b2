"""Primer's models: initial parameters, upstream's packing, routed rows, parts in T5."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from tests.trainer.model.conftest import TinyModel, initial
from trainer.config.presets import model_preset
from trainer.model.parametrisation import UNCHANGED
from trainer.model.paths import named
from trainer.model.registry import SLOTS
from trainer.model.spec import model_spec
from trainer.model.transformer import decayed, parameter_facts, run_model

L, V = 6, 40


def small(name, **changes):
    sizes = {"vocab_size": V, "tied_logits": False, "num_decoder_layers": 1}
    return TinyModel(replace(model_preset(name), **sizes | changes))


def logits(tiny, inputs, segments, params=None):
    """Returns the logits of one row."""
    inputs, segments = ([[*part, *[0] * (L - len(part))]] for part in (inputs, segments))
    batch = {
        "decoder_input_tokens": jnp.asarray(inputs),
        "decoder_target_tokens": (jnp.asarray(segments) > 0).astype(int),
        "decoder_segment_ids": jnp.asarray(segments),
    }
    output = jax.jit(lambda params: run_model(tiny.model, params, batch))(params or tiny.params)
    return np.asarray(output)[0]


@pytest.mark.parametrize("name", ["tiny_primer_ez", "tiny_evolved_transformer", "tiny_synthesizer"])
def test_upstream_lets_packed_examples_see_one_another(name):
    ours, row = small(name), ([0, 12, 13, 0, 15], [1, 1, 1, 2, 2])
    theirs = logits(small(name, upstream_compat=True), *row, ours.params)
    difference = np.abs(theirs - logits(ours, *row))
    assert difference[:3].max() < 1e-6
    assert difference[3:5].max() > 1e-3


@pytest.mark.skipif("switch" not in SLOTS["feed_forward"], reason="experts are another annex's")
def test_initial_parameters():
    """Compares the spread of every kind of tensor with the specification of the released code."""
    config = replace(model_preset("mini_switch_primer"), vocab_size=512, num_decoder_layers=2)
    params = unflatten_dict(initial(model_spec(config)), sep="/")["decoder"]
    d, h, k, ff = 128, 4, 32, 512
    attention, routed = params["layers_1"]["self_attention"], params["layers_1"]["mlp"]
    dense = params["layers_0"]["mlp"]
    cut = 0.8796  # of a normal distribution at two deviations
    for tensor, deviation in (
        (params["token_embedder"]["embedding"], 1.0),
        (attention["query"]["kernel"], (d * k) ** -0.5),
        (attention["key"]["kernel"], d**-0.5),
        (attention["value"]["kernel"], d**-0.5),
        (attention["out"]["kernel"], (h * k) ** -0.5),
        (dense["wi"]["kernel"], cut * (0.1 / d) ** 0.5),
        (dense["wo"]["kernel"], cut * (0.1 / ff) ** 0.5),
        (routed["router"]["kernel"], cut * (0.1 / d) ** 0.5),
        (routed["experts"]["wi"]["kernel"], cut * (0.1 / d) ** 0.5),
        (routed["experts"]["wo"]["kernel"], cut * (0.1 / ff) ** 0.5),
    ):
        # Four standard errors of a standard deviation.
        tolerance = 4 / (2 * tensor.size) ** 0.5
        assert abs(float(jnp.std(tensor)) / deviation - 1) < tolerance
    experts = routed["experts"]["wi"]["kernel"]
    assert float(jnp.max(jnp.abs(experts))) <= 2 * (0.1 / d) ** 0.5
    assert not np.array_equal(experts[0], experts[1])
    bias = params["relpos_bias"]["rel_embedding"]
    limit = (6 / (h + 32)) ** 0.5
    assert 0.9 * limit < float(jnp.max(jnp.abs(bias))) <= limit
    assert not dense["wi"]["bias"].any()
    assert not dense["wo"]["bias"].any()

    config = replace(model_preset("mini_primer"), vocab_size=512, num_decoder_layers=1)
    turn = initial(model_spec(config), "decoder/layers_0/self_attention/query_from_key/kernel")
    assert abs(float(jnp.std(turn)) / (cut * (h * k) ** -0.5) - 1) < 4 / (2 * turn.size) ** 0.5
    layer = {
        path.split("/")[2] for path in parameter_facts(model_spec(config)) if "layers_0" in path
    }
    norms = {"pre_self_attention_layer_norm", "post_mlp_layer_norm"}
    assert layer == norms | {"self_attention", "mlp"}


def test_an_encoder_decoder_with_pieces_of_primer():
    tiny = TinyModel(replace(model_preset("t5_1_1_tiny_primer_ez"), vocab_size=V))
    encoder, decoder = (tiny.params[role]["layers_0"] for role in ("encoder", "decoder"))
    assert "query_convolution" in encoder["attention"]
    assert "query_convolution" in decoder["self_attention"]
    assert "query_convolution" not in decoder["encoder_decoder_attention"]


@pytest.mark.parametrize("name", ["tiny_primer_ez", "tiny_synthesizer", "tiny_evolved_transformer"])
def test_what_is_no_kernel_is_not_decayed_by_default(name):
    for tensor, decays in named(decayed(model_spec(model_preset(name)))).items():
        assert decays == tensor.endswith("kernel"), tensor


def test_facts_of_its_parts(make_config):
    assert make_config("lm", mixer="random_synthesizer").counts_positions
    config = make_config("primer", mixer="random_synthesizer", dtype="bfloat16", head_dim=64)
    assert config.attention_on("TPU v5 lite") == "einsum"
    rates = parameter_facts(model_spec(make_config("t5_1_1", parametrisation="primer")))
    assert {each.rates for each in rates.values()} == {UNCHANGED}
