"""Scans, rematerialisation and attention kernels change how layers run, not their results."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.cases import rows
from tests.support.parameters import slow_unless
from tests.support.trees import assert_close, assert_equal
from trainer.config import LossConfig
from trainer.engine.loss import model_loss
from trainer.model.layers import stack_layers, unstack_layers
from trainer.model.mixers import add_bias
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params, logical_axes, rounded_kernels

FAMILIES = ("t5_1_1", "lm", "bert")
LAYERS = {
    "t5_1_1": {"num_encoder_layers": 1, "num_decoder_layers": 2},
    "lm": {"num_decoder_layers": 2},
    "bert": {"num_encoder_layers": 2},
}


@pytest.fixture(scope="module")
def result(make_config, packed):
    """Loss and gradients, under the unscanned names."""

    @cache
    def of(family, **changes):
        config = make_config(family, **LAYERS[family], **changes)
        spec = model_spec(config)
        model, dropout = build_model(spec), {"dropout": jax.random.key(5)}

        def loss(params):
            output = model.apply({"params": params}, packed, deterministic=False, rngs=dropout)
            return model_loss(model).of_batch(output, packed, LossConfig())[0]

        value, gradients = jax.jit(jax.value_and_grad(loss))(init_params(spec, jax.random.key(1)))
        return value, unstack_layers(gradients) if config.scan_layers else gradients

    return of


DROPS = {"dropout_rate": 0.3}
SCAN, JAX = {"scan_layers": True}, {"attention": "dot_product"}
# Family, changes of both models, changes of one that do not matter. The first are combinations that
# imply the others: these tests spend their time compiling.
ALIKE = [
    ("t5_1_1", {}, SCAN | {"remat": "dots"}),
    ("t5_1_1", {}, JAX),
    ("lm", SCAN | DROPS, {"remat": "full"}),
    ("bert", {"position": "relative"}, JAX),
    ("bert", {"position": "relative"}, {"remat": "full"}),
    ("t5_1_1", {}, SCAN),
    ("lm", {}, {"remat": "dots"}),
    ("lm", {}, SCAN | {"remat": "full"}),
    ("lm", {}, JAX),
    ("lm", DROPS, {"remat": "full"}),
    ("bert", {}, SCAN),
    *rows("ALIKE"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("family", "both", "one"), slow_unless(ALIKE[:4], ALIKE))
def test_how_layers_run_changes_neither_losses_nor_gradients(result, family, both, one):
    expected, actual = result(family, **both), result(family, **both | one)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    # BERT's biases of keys have gradient 0, up to rounding.
    floor = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert_close(actual, expected, scale=1e-5, atol=floor if "attention" in one else 1e-9)
    if "dropout_rate" in both:
        assert abs(expected[0] - result(family, **both | {"dropout_rate": 0.0})[0]) > 1e-3


def test_each_layer_of_a_scan_drops_units_of_its_own(make_config):
    # Every layer adds only its bias, so that a unit counts the layers that kept it.
    spec = model_spec(
        make_config("bert_pre_ln", num_encoder_layers=2, scan_layers=True, dropout_rate=0.5)
    )
    shapes = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    params["encoder"]["encoder"]["mlp"]["wo"]["bias"] += 1.0
    params["encoder"]["encoder_norm"]["scale"] += 1.0

    @jax.jit
    def encode(params, tokens):
        return build_model(spec).apply(
            {"params": params}, {"encoder_input_tokens": tokens}, deterministic=False,
            rngs={"dropout": jax.random.key(0)}, method="encode",
        )  # fmt: skip

    states = np.round(encode(params, np.ones((1, 64), int))[0], 4)
    # Kept by none, one or both of the layers; never by one if their draws were the same.
    assert max(len(np.unique(row)) for row in states) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_parameters_are_those_of_the_plain_model_stacked(make_config, family):
    plain = model_spec(make_config(family, **LAYERS[family]))
    scanned = model_spec(make_config(family, **LAYERS[family], scan_layers=True, remat="full"))
    apart = init_params(plain, jax.random.key(3))
    stacked = stack_layers(apart)
    assert_equal(init_params(scanned, jax.random.key(3)), stacked)
    assert_equal(unstack_layers(stacked), apart)


def test_stacked_names_shapes_and_axes_match_t5x(make_config):
    spec = model_spec(make_config("t5_1_1", **LAYERS["t5_1_1"], scan_layers=True))
    shapes = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    axes = logical_axes(spec)
    for tree in (shapes, axes):
        assert set(tree["encoder"]) == {"encoder", "encoder_norm", "relpos_bias"}
        assert set(tree["decoder"]) == {"decoder", "decoder_norm", "relpos_bias", "logits_dense"}
    shapes = named(shapes)
    axes = {path: tuple(names) for path, names in named(axes, lambda x: isinstance(x, P)).items()}
    assert shapes["decoder/decoder/mlp/wo/kernel"].shape == (16, 2, 12)
    assert axes["decoder/decoder/mlp/wo/kernel"] == ("mlp", "layers", "embed")
    assert shapes["encoder/encoder/pre_mlp_layer_norm/scale"].shape == (12, 1)
    assert axes["encoder/encoder/pre_mlp_layer_norm/scale"] == ("embed", "layers")
    assert axes["token_embedder/embedding"] == ("vocab", "embed")
    assert {path: leaf.ndim for path, leaf in shapes.items()} == jax.tree.map(
        len, axes, is_leaf=lambda x: isinstance(x, tuple)
    )


def test_layers_that_differ_are_not_stacked(make_config):
    params = init_params(model_spec(make_config("lm", num_decoder_layers=2)), jax.random.key(0))
    del params["decoder"]["layers_1"]["mlp"]
    with pytest.raises(ValueError, match="mlp"):
        stack_layers(params)


def test_remat_keeps_less(make_config, packed):
    def kept(remat):
        spec = model_spec(make_config("lm", num_decoder_layers=3, remat=remat))
        params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
        _, backward = jax.eval_shape(
            lambda params: jax.vjp(
                lambda p: build_model(spec).apply({"params": p}, packed), params
            ),
            params,
        )
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert kept("full") < kept("dots") < kept("none")


def test_a_bfloat16_model_keeps_nothing_in_float32_and_no_activations(make_config):
    config = make_config("t5_1_1", dtype="bfloat16", emb_dim=48, mlp_dim=80, scan_layers=True)
    spec, tokens = model_spec(config), jnp.ones((2, 64), jnp.int32)
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    _, backward = jax.eval_shape(
        lambda params: jax.vjp(
            lambda p: build_model(spec).apply({"params": p}, dict.fromkeys(names, tokens)),
            rounded_kernels(spec, params),
        ),
        params,
    )
    kept = [
        (leaf.dtype.name, leaf.shape[-1])
        for leaf in jax.tree.leaves(backward)
        if leaf.shape[:-1] == (1, *tokens.shape)  # those of the layers, stacked
    ]
    assert ("float32", 48) not in kept
    # The two projections and their product, in either stack.
    assert kept.count(("bfloat16", 80)) == 2 * 3


def test_kernels_are_rounded(make_config):
    spec = model_spec(make_config("t5_1_1", dtype="bfloat16"))
    params = init_params(spec, jax.random.key(0))
    for path, leaf in named(rounded_kernels(spec, params)).items():
        assert leaf.dtype == (jnp.bfloat16 if path.endswith("kernel") else jnp.float32), path


def test_tokens_of_both_sides_are_looked_up_together(make_config, packed):
    spec = model_spec(make_config("t5_1_1"))
    model, params = build_model(spec), init_params(spec, jax.random.key(0))

    def loss(params):
        return jnp.sum(jnp.square(model.apply({"params": params}, packed)))

    program = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert program.count(":f32[40,12] = scatter-add") == 1


def test_the_gradient_of_a_bias_is_the_sum_over_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    logits, weights = (jax.random.normal(key, (3, 2, 5, 4)) for key in keys[:2])
    bias = jax.random.normal(keys[2], (2, 5, 4))

    def mixed(add):
        return jax.grad(lambda x, b: jnp.sum(add(x, b) ** 2 * weights), argnums=(0, 1))

    np.testing.assert_array_equal(add_bias(logits, bias), logits + bias)
    actual, expected = (mixed(add)(logits, bias) for add in (add_bias, jnp.add))
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_equal_tables_of_positions_in_all_layers_are_one_table(make_config, scanned):
    shared = model_spec(make_config("t5_1_1", **LAYERS["t5_1_1"]))
    changes = {"position": "relative_per_layer", "scan_layers": scanned}
    apart = model_spec(make_config("t5_1_1", **LAYERS["t5_1_1"], **changes))
    one = init_params(shared, jax.random.key(0))
    each = {**one}
    for stack in ("encoder", "decoder"):
        rest = dict(one[stack])
        table = rest.pop("relpos_bias")
        each[stack] = {
            name: {**node, "relpos_bias": table} if name.startswith("layers_") else node
            for name, node in rest.items()
        }
    each = stack_layers(each) if scanned else each
    shapes = jax.eval_shape(lambda key: init_params(apart, key), jax.random.key(0))
    assert jax.tree.map(jnp.shape, each) == jax.tree.map(jnp.shape, shapes)
    if scanned:
        axes = logical_axes(apart)["decoder"]["decoder"]["relpos_bias"]["rel_embedding"]
        assert axes == P("heads", "layers", "relpos_buckets")
    sides = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(sides, np.random.default_rng(0).integers(1, 40, (2, 7)))
    expected, found = (
        build_model(spec).apply({"params": params}, batch)
        for spec, params in ((shared, one), (apart, each))
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    # Another table in one layer makes another model.
    other = jax.tree.map(lambda leaf: leaf, each)
    layer = other["decoder"]["decoder" if scanned else "layers_1"]["relpos_bias"]
    layer["rel_embedding"] = layer["rel_embedding"] + np.arange(32)
    assert np.abs(build_model(apart).apply({"params": other}, batch) - found).max() > 1e-3
