"""Every tiny Primer preset: visibility, packed rows, initial parameters, training."""

import dataclasses
import types
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config.from_flags import build_config
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.program import Program
from trainer.model.spec import model_spec
from trainer.model.transformer import RoutedLogits, build_model, init_params, run_model

L, V = 6, 40
# Models whose parts all occur in others here.
ALIKE = [f"tiny_transformer_{name}" for name in ("gelu", "swish", "squared_relu", "mdha")]
ALIKE += ["tiny_transformer_reglu", "tiny_transformer_swiglu", "tiny_switch_transformer"]
ALIKE += ["tiny_synthesizer_squared_relu", "tiny_transformer_plusplus", "tiny_primer_as_released"]
PRESETS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE))
    for name in MODEL_PRESETS
    if name.startswith("tiny_")
]
QUICK = ("tiny_primer",)
SEGMENTS = [1, 1, 1, 2, 2, 0]


def random_params(spec):
    """Without compiling the initialisers."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    shapes = jax.eval_shape(lambda key: init_params(spec, key), key)
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * random.normal(size=leaf.shape), jnp.float32), shapes
    )


@cache
def small(name):
    """(spec, parameters random in every tensor, jitted logits and their gradients by tokens)."""
    preset = model_preset(name)
    changes = {"switch_every": 1} if preset.num_experts else {}
    config = dataclasses.replace(
        preset, vocab_size=V, tied_logits=False, num_decoder_layers=1, **changes
    )
    spec = model_spec(config)
    model = build_model(spec)
    params = random_params(spec)

    def logits_and_influence(params, batch):
        def logits(table_VD):
            decoder = params["decoder"]
            changed = decoder | {"token_embedder": {"embedding": table_VD}}
            output = run_model(model, {"decoder": changed}, batch)
            logits_BLV = output.logits_BLV if isinstance(output, RoutedLogits) else output
            # A random mix, since some effects might cancel in the sum of logits.
            return logits_BLV[0] @ jax.random.normal(jax.random.key(1), (V,)), logits_BLV[0]

        table_VD = params["decoder"]["token_embedder"]["embedding"]
        influence_LVD, logits_LV = jax.jacrev(logits, has_aux=True)(table_VD)
        return logits_LV, influence_LVD

    return spec, params, jax.jit(logits_and_influence)


def row(inputs, segments):
    pad = L - len(inputs)
    inputs, segments = ([*part, *[0] * pad] for part in (inputs, segments))
    return {
        "decoder_input_tokens": jnp.asarray([inputs]),
        "decoder_target_tokens": jnp.asarray([[int(segment > 0) for segment in segments]]),
        "decoder_segment_ids": jnp.asarray([segments]),
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_position_sees_those_before_it_in_its_example(name):
    _, params, run = small(name)
    inputs = [11, 12, 13, 14, 15, 16]
    influence_LVD = np.asarray(run(params, row(inputs, SEGMENTS))[1])
    for query, query_segment in enumerate(SEGMENTS[:-1]):
        for key, key_segment in enumerate(SEGMENTS):
            seen = bool(np.any(influence_LVD[query, inputs[key]] != 0))
            assert seen == (query_segment == key_segment and key <= query), (query, key)


@pytest.mark.parametrize("name", PRESETS)
def test_packed_rows_equal_rows_of_their_own(name):
    _, params, run = small(name)
    # No more tokens than the capacity of one expert.
    first, second = [0, 12], [0, 15]
    packed = run(params, row(first + second, [1, 1, 2, 2]))[0]
    alone = [run(params, row(example, [1, 1]))[0] for example in (first, second)]
    np.testing.assert_allclose(packed[:2], alone[0][:2], atol=2e-6)
    np.testing.assert_allclose(packed[2:4], alone[1][:2], atol=2e-6)


@pytest.mark.parametrize("name", ["tiny_primer_ez", "tiny_evolved_transformer", "tiny_synthesizer"])
def test_upstream_lets_packed_examples_see_one_another(name):
    _, params, run = small(name)
    packed = row([0, 12, 13, 0, 15], [1, 1, 1, 2, 2])
    config = dataclasses.replace(
        model_preset(name), vocab_size=V, tied_logits=False, num_decoder_layers=1,
        upstream_compat=True,
    )  # fmt: skip
    theirs = run_model(build_model(model_spec(config)), params, packed)[0]
    ours = run(params, packed)[0]
    np.testing.assert_allclose(theirs[:3], ours[:3], atol=1e-6)
    assert np.abs(np.asarray(theirs - ours))[3:5].max() > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(param.values[0], marks=[pytest.mark.slow] * (param.values[0] not in QUICK))
        for param in PRESETS
    ],
)
def test_a_bfloat16_model_learns_a_repeated_batch(name):
    flags = [
        *("--model.dtype=bfloat16", f"--model.vocab_size={V}", "--model.num_decoder_layers=1"),
        *("--batch_size=4", "--optimizer.schedule=constant", "--optimizer.learning_rate=0.05"),
    ]
    if "switch" in name:
        flags.append("--model.switch_every=1")
    program = Program(types.SimpleNamespace(config=build_config(name, flags)[0]))
    state, losses = program.initial_state(), []
    batch = jax.tree.map(
        lambda array: jnp.repeat(array, 4, axis=0), row([0, 5, 9, 0, 7, 0], SEGMENTS)
    )
    batch |= {"decoder_target_tokens": jnp.asarray([[5, 9, 6, 7, 8, 0]] * 4)}
    batch |= {"decoder_loss_weights": jnp.asarray([[1, 1, 1, 1, 1, 0]] * 4)}
    for _ in range(10):
        state = program.train_step(state.replace(metrics=program.zero_metrics()), batch)
        total, weight = state.metrics["loss"]
        losses.append(float(total / weight))
    assert losses[-1] < 0.5 * losses[0]


def test_initial_parameters():
    """Compares the spread of every kind of tensor with the specification of the released code."""
    config = dataclasses.replace(
        model_preset("mini_switch_primer"), vocab_size=512, num_decoder_layers=2
    )
    params = init_params(model_spec(config), jax.random.key(0))["decoder"]
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

    config = dataclasses.replace(model_preset("mini_primer"), vocab_size=512, num_decoder_layers=1)
    params = init_params(model_spec(config), jax.random.key(0))["decoder"]
    turn = params["layers_0"]["self_attention"]["query_from_key"]["kernel"]
    assert abs(float(jnp.std(turn)) / (cut * (h * k) ** -0.5) - 1) < 4 / (2 * turn.size) ** 0.5
    assert params["layers_0"].keys() == {
        "pre_self_attention_layer_norm", "self_attention", "post_mlp_layer_norm", "mlp",
    }  # fmt: skip


def test_an_encoder_decoder_with_pieces_of_primer():
    config = dataclasses.replace(
        model_preset("t5_1_1_tiny_primer_ez"), vocab_size=V, num_experts=2, switch_every=2
    )
    spec = model_spec(config)
    params = random_params(spec)
    assert "query_convolution" in params["encoder"]["layers_0"]["attention"]
    assert "query_convolution" in params["decoder"]["layers_0"]["self_attention"]
    assert "query_convolution" not in params["decoder"]["layers_0"]["encoder_decoder_attention"]
    batch = {
        name: jnp.full((2, 4), 3)
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    }
    output = jax.jit(lambda params: run_model(build_model(spec), params, batch))(params)
    assert isinstance(output, RoutedLogits)
    assert output.logits_BLV.shape == (2, 4, V)
    # One layer of each stack routes its 8 tokens.
    assert int(output.routing.routed) == 16
