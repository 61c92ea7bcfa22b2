"""Scans, rematerialisation and attention kernels change how layers run, not their results."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.support.parameters import slow_unless
from trainer.config import LossConfig
from trainer.engine.loss import model_loss
from trainer.model.layers import stack_layers, unstack_layers
from trainer.model.mixers import add_bias
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params, logical_axes, rounded_kernels

FAMILIES = ("t5_1_1", "lm", "bert")
LAYERS = {
    "t5_1_1": {"num_encoder_layers": 1, "num_decoder_layers": 3},
    "lm": {"num_decoder_layers": 2},
    "bert": {"num_encoder_layers": 2},
}
# Combinations that do not imply one another: these tests spend their time compiling.
WAYS = [
    ("t5_1_1", True, "none"),
    ("t5_1_1", True, "dots"),
    ("lm", False, "dots"),
    ("lm", True, "full"),
    ("bert", False, "full"),
    ("bert", True, "none"),
]


@pytest.fixture(scope="module")
def packed():
    """Returns two rows on each side, one with two examples and padding, one with one example."""
    random = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    tokens = {
        name: np.where(segments > 0, random.integers(1, 40, segments.shape), 0)
        for name in ("encoder_input_tokens", "encoder_target_tokens", "decoder_target_tokens")
    }
    return {
        **tokens,
        "decoder_input_tokens": np.roll(tokens["decoder_target_tokens"], 1, axis=1),
        "encoder_segment_ids": segments,
        "decoder_segment_ids": segments,
        "encoder_loss_weights": segments > 0,
        "decoder_loss_weights": segments > 0,
    }


@pytest.fixture(scope="module")
def result(make_config, packed):
    """Loss and gradients, under the unscanned names."""

    @cache
    def of(family, scanned, remat, dropout_rate=0.0, **changes):
        ways = {"scan_layers": scanned, "remat": remat, "dropout_rate": dropout_rate}
        config = make_config(family, **LAYERS[family], **ways, **changes)
        spec = model_spec(config)
        model = build_model(spec)

        def loss(params):
            output = model.apply(
                {"params": params},
                packed,
                deterministic=False,
                rngs={"dropout": jax.random.key(5)},
            )
            return model_loss(model).of_batch(output, packed, LossConfig())[0]

        value, gradients = jax.jit(jax.value_and_grad(loss))(init_params(spec, jax.random.key(1)))
        return value, unstack_layers(gradients) if scanned else gradients

    return of


def assert_same(actual, expected):
    """Compares to 1e-5 of each array's largest element; BERT's biases of keys have gradient 0."""
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max() + 1e-9)


@pytest.mark.parametrize(("family", "scanned", "remat"), slow_unless({WAYS[1], *WAYS[3:5]}, WAYS))
def test_losses_and_gradients_are_those_of_the_plain_model(result, family, scanned, remat):
    expected = result(family, False, "none")
    actual = result(family, scanned, remat)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("t5_1_1", {}), ("lm", {}), ("bert", {"position": "relative"})],
)
def test_attention_of_jax_gives_the_same_results(result, family, changes):
    # BERT's biases of keys have gradient 0, up to rounding.
    expected = result(family, False, "none", **changes)
    actual = result(family, False, "none", attention="dot_product", **changes)
    floor = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max() + floor)


@pytest.mark.parametrize(
    ("family", "remat", "dropout_rate"),
    [
        ("lm", "dots", 0.3),
        pytest.param("bert", "none", 0.0, marks=pytest.mark.slow),
        pytest.param("t5_1_1", "none", 0.0, marks=pytest.mark.slow),
        pytest.param("t5_1_1", "dots", 0.0, marks=pytest.mark.slow),
    ],
)
def test_fused_attention_gives_the_same_results_and_drops_the_same_weights(
    result, family, remat, dropout_rate
):
    expected = result(family, False, "none", dropout_rate, head_dim=64)
    actual = result(family, False, remat, dropout_rate, head_dim=64, attention="pallas")
    floor = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max() + floor)


@pytest.mark.parametrize("scanned", slow_unless({True}, [False, True]))
def test_remat_repeats_dropout(result, scanned):
    expected = result("lm", scanned, "none", 0.3)
    assert abs(expected[0] - result("lm", False, "none")[0]) > 1e-3
    assert_same(result("lm", scanned, "full", 0.3), expected)


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
            {"params": params},
            {"encoder_input_tokens": tokens},
            deterministic=False,
            rngs={"dropout": jax.random.key(0)},
            method="encode",
        )

    states = np.round(encode(params, np.ones((1, 64), int))[0], 4)
    # Kept by none, one or both of the layers; never by one if their draws were the same.
    assert max(len(np.unique(row)) for row in states) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_parameters_are_those_of_the_plain_model_stacked(make_config, family):
    plain = model_spec(make_config(family, **LAYERS[family]))
    scanned = model_spec(make_config(family, **LAYERS[family], scan_layers=True, remat="full"))
    key = jax.random.key(3)
    expected, actual = stack_layers(init_params(plain, key)), init_params(scanned, key)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacking_and_unstacking_are_exact_inverses(make_config, family):
    params = init_params(model_spec(make_config(family, **LAYERS[family])), jax.random.key(0))
    again = unstack_layers(stack_layers(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_stacked_names_shapes_and_axes_match_t5x(make_config):
    spec = model_spec(make_config("t5_1_1", **LAYERS["t5_1_1"], scan_layers=True))
    shapes = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    axes = logical_axes(spec)
    for tree in (shapes, axes):
        assert set(tree["encoder"]) == {"encoder", "encoder_norm", "relpos_bias"}
        assert set(tree["decoder"]) == {"decoder", "decoder_norm", "relpos_bias", "logits_dense"}
    assert shapes["decoder"]["decoder"]["mlp"]["wo"]["kernel"].shape == (16, 3, 12)
    assert axes["decoder"]["decoder"]["mlp"]["wo"]["kernel"] == PartitionSpec(
        "mlp", "layers", "embed"
    )
    assert shapes["encoder"]["encoder"]["pre_mlp_layer_norm"]["scale"].shape == (12, 1)
    assert axes["encoder"]["encoder"]["pre_mlp_layer_norm"]["scale"] == PartitionSpec(
        "embed", "layers"
    )
    assert axes["token_embedder"]["embedding"] == PartitionSpec("vocab", "embed")
    for leaf, names in zip(
        jax.tree.leaves(shapes),
        jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, PartitionSpec)),
        strict=True,
    ):
        assert leaf.ndim == len(names)


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


def test_kernels_are_rounded_but_for_those_used_in_float32(make_config):
    changes = {"num_experts": 2, "switch_every": 1, "dtype": "bfloat16"}
    spec = model_spec(make_config("t5_1_1", **changes))
    params = init_params(spec, jax.random.key(0))
    for path, leaf in named(rounded_kernels(spec, params)).items():
        rounded = path.endswith("kernel") and "router" not in path
        assert leaf.dtype == (jnp.bfloat16 if rounded else jnp.float32), path


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
    for actual, expected in zip(
        mixed(add_bias)(logits, bias), mixed(jnp.add)(logits, bias), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


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
        assert axes == PartitionSpec("heads", "layers", "relpos_buckets")
    random = np.random.default_rng(0).integers(1, 40, (2, 7))
    batch = dict.fromkeys(
        ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"), random
    )
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
