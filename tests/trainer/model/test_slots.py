"""The data of a model: specs, masks, positions, and the values that a configuration refuses."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model import parts
from trainer.model.attention import DotProductAttention
from trainer.model.config import ModelConfig
from trainer.model.dense import Shared
from trainer.model.device import Device
from trainer.model.embedding import DenseLogits, TiedLogits
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.masks import Mask, Rows
from trainer.model.mixers import WEIGHTS
from trainer.model.norms import POST_NORM, PRE_NORM, LayerNorm, NoNorm
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.positions import (
    LearnedPosition,
    RotaryPosition,
    T5RelativePosition,
    rotate,
    rotate_joined,
)
from trainer.model.spec import model_spec

SHARED = Shared(4, 8, "float32", 0.0, StandardParametrisation())


def test_equal_configurations_are_one_program(make_config):
    config = make_config("t5_1_1")
    assert model_spec(config) == model_spec(replace(config))
    assert hash(model_spec(config)) == hash(model_spec(replace(config)))
    assert model_spec(config) != model_spec(replace(config, dropout_rate=0.1))


def test_equal_configurations_with_parts_of_stacks_are_one_program(make_config):
    changes = {"memory_tokens": 2, "database_entries": 3, "token_dropping": 1}
    one, other = (model_spec(make_config("t5_1_1", **changes)) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))
    for slot, known in parts.SLOTS.items():
        for name in known:
            beside = {"num_heads": 4, "max_positions": 8} | {slot: name}
            family = BESIDE.get(name, {}).get("family", "lm")
            assert model_spec(make_config(family, **beside)) == model_spec(
                make_config(family, **beside)
            )


def test_families_fill_the_slots(make_config):
    t5_1_0, t5_1_1, lm = (model_spec(make_config(name)) for name in ("t5_1_0", "t5_1_1", "lm"))
    assert t5_1_0.decoder.layers[0].feed_forward.activations == ("relu",)
    assert t5_1_1.decoder.layers[0].feed_forward.activations == ("gelu", "linear")
    assert [type(spec.decoder.logits) for spec in (t5_1_0, t5_1_1, lm)] == [
        TiedLogits,
        DenseLogits,
        TiedLogits,
    ]
    llama = model_spec(make_config("llama", head_dim=4))
    assert llama.decoder.layers[0].feed_forward.activations == ("silu", "linear")
    assert llama.decoder.position == RotaryPosition(channels=4)
    assert isinstance(llama.decoder.logits, DenseLogits)
    for decoder_only in (lm, llama):
        assert decoder_only.encoder is None
        assert decoder_only.decoder.layers[0].cross_mixer is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", "t5_1_2"),
        ("dtype", "float16"),
        ("vocab_size", 0),
        ("num_encoder_layers", 0),
        ("num_decoder_layers", 0),
        ("dropout_rate", 1.0),
        ("remat", "some"),
        ("attention", "flash"),
        ("mlp_activations", ("gleu",)),
        ("mlp_activations", ()),
    ],
)
def test_a_configuration_names_the_field_it_refuses(make_config, field, value):
    with pytest.raises(ValueError, match=rf"^{field} is .*must be"):
        replace(make_config("t5_1_1"), **{field: value})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention": "dot_product", "dropout_rate": 0.1}, "dropout_rate"),
        ({"attention": "cudnn"}, "dtype"),
        ({"attention": "pallas", "head_dim": 80}, "head_dim"),
        ({"attention": "pallas", "mixer": "random_synthesizer"}, "mixer"),
    ],
)
def test_an_attention_that_does_not_fit_is_refused(make_config, changes, field):
    with pytest.raises(ValueError, match=rf"^{field} .*with attention"):
        make_config("t5_1_1", **changes)


def test_kernels_cannot_drop_other_weights_for_each_query(make_config):
    make_config("t5_1_1", attention="pallas", dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"^dropout_rate .*with attention 'pallas'"):
        make_config("bert", attention="pallas", dropout_rate=0.1)


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "attention", "softmax"),
    [
        ("TPU v5 lite", "bfloat16", 64, "pallas", "bfloat16"),
        ("TPU v5 lite", "bfloat16", 80, "einsum", "bfloat16"),
        ("TPU v6 lite", "float32", 64, "einsum", "float32"),
        ("TPU v3", "bfloat16", 64, "einsum", "bfloat16"),
        ("cpu", "bfloat16", 64, "einsum", "float32"),
        ("NVIDIA H100", "bfloat16", 64, "einsum", "float32"),
    ],
)
def test_auto_is_the_fused_kernel_on_tpus_where_it_applies(
    kind, dtype, head_dim, attention, softmax
):
    assert Device(kind).attention("auto", dtype, head_dim) == attention
    assert Device(kind).attention("cudnn", dtype, head_dim) == "cudnn"
    assert Device(kind).softmax_dtype("auto", dtype) == softmax
    assert Device(kind).softmax_dtype("float32", dtype) == "float32"


@pytest.mark.parametrize("channels", [8, 4])
def test_joined_heads_rotate_like_separate_ones(channels):
    random = np.random.default_rng(0)
    x_BLHK = jnp.asarray(random.normal(size=(2, 5, 3, 8)), jnp.float32)
    angle_BLC = jnp.asarray(random.normal(size=(2, 5, channels // 2)), jnp.float32)
    joined_BLJ = rotate_joined(x_BLHK.reshape(2, 5, -1), angle_BLC, 8)
    np.testing.assert_allclose(joined_BLJ.reshape(x_BLHK.shape), rotate(x_BLHK, angle_BLC), 1e-6)


def test_auto_leaves_out_what_kernels_cannot_compute(make_config):
    def chosen(family, **changes):
        config = make_config(family, dtype="bfloat16", head_dim=64, **changes)
        return config.attention_on("TPU v5 lite")

    assert chosen("t5_1_1", dropout_rate=0.1) == "pallas"
    assert chosen("t5_1_1", attention="einsum") == "einsum"
    assert (chosen("bert"), chosen("bert", dropout_rate=0.1)) == ("pallas", "einsum")
    assert chosen("primer", mixer="random_synthesizer") == "einsum"


def test_the_families_of_bert_differ_in_two_slots(make_config):
    bert, pre_ln = (model_spec(make_config(name)) for name in ("bert", "bert_pre_ln"))
    assert bert.encoder.layers[0].placements.sublayers == POST_NORM
    assert pre_ln.encoder.layers[0].placements.sublayers == PRE_NORM
    assert isinstance(bert.encoder.norm, NoNorm)
    assert isinstance(pre_ln.encoder.norm, LayerNorm)
    assert isinstance(bert.encoder.position, LearnedPosition)
    rotary = model_spec(make_config("bert", position="rotary", head_dim=64))
    assert rotary.encoder.position == RotaryPosition(channels=16)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"num_decoder_layers": 1}),
        ("bert", {"num_encoder_layers": 0}),
        ("bert", {"position": "sinuous"}),
        ("bert", {"max_positions": 0}),
        ("bert", {"position": "rotary", "head_dim": 12}),
        ("evolved_transformer", {"position": "rotary"}),
        ("lm", {"position": "rotary", "head_dim": 3}),
        ("llama", {"head_dim": 3}),
    ],
)
def test_a_configuration_names_a_field_that_does_not_fit_its_family(make_config, family, changes):
    field = "head_dim" if "head_dim" in changes else next(iter(changes))
    with pytest.raises(ValueError, match=rf"^{field} is .*must be"):
        make_config(family, **changes)


def test_names_that_need_no_jax_are_those_of_the_functions():
    assert {*parts.ACTIVATION_NAMES} == {*ACTIVATIONS}
    assert {*parts.WEIGHT_NAMES} == {*WEIGHTS}


# Parts that go with a family or with other fields.
BESIDE = {
    "cdq": {"family": "t5_1_1"},
    "encoder_keys": {"family": "t5_1_1"},
    "layerwise": {"family": "t5_1_1"},
    "merged": {"family": "t5_1_1"},
}


@pytest.mark.parametrize(
    ("slot", "name"), [(slot, name) for slot, known in parts.SLOTS.items() for name in known]
)
def test_every_part_can_be_built(make_config, slot, name):
    beside = {"family": "lm", "num_heads": 4, "max_positions": 8} | BESIDE.get(name, {})
    model_spec(make_config(**beside, **{slot: name}))


@pytest.mark.parametrize("name", parts.FAMILIES)
def test_facts_about_families_are_those_of_their_specs(make_config, name):
    config = make_config(name, head_dim=8)
    spec = model_spec(config)
    stacks = {"encoder_decoder": ["encoder", "decoder"]}
    assert [*spec.stacks] == stacks.get(config.architecture, [config.architecture])
    for role, stack in spec.stacks.items():
        assert stack.position == config.build("position", role == "encoder")
        assert (len(set(stack.layers)) == 1) == (parts.FAMILIES[name].layers is None)
        assert {type(layer.mixer) for layer in stack.layers} == {DotProductAttention}


@pytest.mark.parametrize(
    ("family", "position"),
    [("t5_1_1", "relative"), ("lm", "relative"), ("llama", "rotary"), ("bert", "absolute")],
)
def test_the_default_positions_of_a_family_may_be_named(make_config, family, position):
    assert model_spec(make_config(family, position=position)) == model_spec(make_config(family))


def test_rotation_of_heads(make_config):
    assert model_spec(make_config("lm", position="rotary")).decoder.position.channels == 4
    both = model_spec(make_config("t5_1_1", position="rotary"))
    assert both.encoder.position == both.decoder.position == RotaryPosition(channels=4)


def test_max_positions_has_an_effect_with_a_table_or_a_synthesizer(make_config):
    for changes in ({"position": "absolute"}, {"mixer": "random_synthesizer"}):
        assert make_config("lm", max_positions=600, **changes).counts_positions


def test_every_field_has_its_words():
    for each in fields(ModelConfig):
        assert len(each.metadata["words"]) > 20, each.name


def test_a_decoder_only_model_has_no_encoder_layers(make_config):
    with pytest.raises(ValueError, match="num_encoder_layers is 1; it must be 0"):
        make_config("lm", num_encoder_layers=1)


segments = st.lists(st.integers(0, 3), min_size=4, max_size=4)
prefixes = st.lists(st.integers(0, 1), min_size=4, max_size=4)


@settings(max_examples=20, deadline=None)
@given(segments, prefixes)
def test_masks_are_their_predicates_pair_by_pair(segment, prefix):
    rows = Rows(jnp.asarray([segment]), jnp.asarray([prefix]))
    predicates = {
        Mask(): lambda q, k: segment[q] == segment[k] != 0,
        Mask(causal=True): lambda q, k: segment[q] == segment[k] != 0 and k <= q,
        Mask(causal=True, prefix=True): lambda q, k: (
            segment[q] == segment[k] != 0 and (k <= q or prefix[q] == prefix[k] == 1)
        ),
    }
    for mask, sees in predicates.items():
        expected = [[[bool(sees(q, k)) for k in range(4)] for q in range(4)]]
        np.testing.assert_array_equal(np.broadcast_to(mask(rows, rows), (1, 4, 4)), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("query_length", "key_length"), [(1, 1), (5, 5), (3, 200), (200, 3)])
def test_the_bias_is_the_table_at_the_bucket_of_each_pair(bidirectional, query_length, key_length):
    position = T5RelativePosition(bidirectional)
    module = position.build(SHARED, num_heads=2, name="relpos_bias")
    table = jax.random.normal(jax.random.PRNGKey(0), (2, 32))
    params = {"params": {"rel_embedding": table}}
    bias = module.apply(params, query_length, key_length, None).bias_HLS
    distance = np.arange(key_length)[None, :] - np.arange(query_length)[:, None]
    np.testing.assert_array_equal(bias, table[:, position.bucket(distance)])


def test_buckets_of_distances():
    # Exact up to half of the buckets, then logarithmic; borders as in the Mesh TensorFlow T5.
    causal = T5RelativePosition(bidirectional=False)
    distances = -np.array([0, 1, 15, 16, 19, 21, 31, 52, 99, 112, 113, 5000])
    expected = [0, 1, 15, 16, 17, 18, 21, 25, 30, 30, 31, 31]
    np.testing.assert_array_equal(causal.bucket(distances), expected)
    np.testing.assert_array_equal(causal.bucket(np.array([1, 50])), [0, 0])
    both = T5RelativePosition(bidirectional=True)
    np.testing.assert_array_equal(both.bucket(np.array([-7, 0, 7, 5000])), [7, 0, 23, 31])
