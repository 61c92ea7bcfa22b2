"""Parts by name and with options, and the specs of models that they fill."""

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.model.conftest import family_of, tiny_config
from trainer.model import registry
from trainer.model.attention import DotProductAttention
from trainer.model.dense import Shared
from trainer.model.device import Device
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.positions import T5RelativePosition
from trainer.model.slot import Choice
from trainer.model.spec import model_spec

SHARED = Shared(4, 8, "float32", 0.0, StandardParametrisation())
PARTS = [
    (slot, name, part.options)
    for slot, known in registry.SLOTS.items()
    for name, part in known.items()
]


@pytest.mark.parametrize(
    ("slot", "name", "says"),
    [("norms", "x", "slots are .*norm"), ("norm", "a:b", "colon"), ("norm", "rms_norm", "already")],
)  # fmt: skip
def test_a_part_that_cannot_be_registered_is_named(slot, name, says):
    with pytest.raises(ValueError, match=says):
        registry.register(slot, name, registry.SLOTS["norm"]["layer_norm"])


def test_equal_configurations_are_one_program(make_config):
    config = make_config("t5_1_1")
    assert model_spec(config) == model_spec(replace(config))
    assert hash(model_spec(config)) == hash(model_spec(replace(config)))
    assert model_spec(config) != model_spec(replace(config, dropout_rate=0.1))


def test_every_part_can_be_built_and_is_equal_to_itself(make_config):
    for slot, name, _ in PARTS:
        changes = {"num_heads": 4, "max_positions": 8, slot: name}
        one, other = (model_spec(make_config(family_of(slot, name), **changes)) for _ in range(2))
        assert one == other, (slot, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "softmax"),
    [
        ("TPU v5 lite", "bfloat16", "bfloat16"),
        ("TPU v6 lite", "float32", "float32"),
        ("cpu", "bfloat16", "float32"),
        ("NVIDIA H100 80GB HBM3", "bfloat16", "float32"),
    ],
)
def test_softmax_has_the_type_of_activations_on_a_tpu(kind, dtype, softmax):
    assert Device(kind).softmax_dtype("auto", dtype) == softmax
    assert Device(kind).softmax_dtype("float32", dtype) == "float32"


@pytest.mark.parametrize("name", registry.FAMILIES)
def test_facts_about_families_are_those_of_their_specs(make_config, name):
    config = make_config(name, head_dim=8)
    spec = model_spec(config)
    stacks = {"encoder_decoder": ["encoder", "decoder"]}
    assert [*spec.stacks] == stacks.get(config.architecture, [config.architecture])
    for role, stack in spec.stacks.items():
        assert stack.position == config.build("position", role == "encoder")
        assert (len(set(stack.layers)) == 1) == (registry.FAMILIES[name].layers is None)
        assert {type(layer.mixer) for layer in stack.layers} == {DotProductAttention}


@pytest.mark.parametrize(
    ("family", "position"),
    [("t5_1_1", "relative"), ("lm", "relative"), ("llama", "rotary"), ("bert", "absolute")],
)
def test_the_default_positions_of_a_family_may_be_named(make_config, family, position):
    assert model_spec(make_config(family, position=position)) == model_spec(make_config(family))


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


def test_options_are_read():
    part = registry.POSITIONS.parse("rotary:base=5e5,fraction=0.5,cross=true")
    expected = registry.Rotary(base=5e5, fraction=0.5, cross=True)
    assert part == Choice("rotary", expected)
    assert registry.POSITIONS.parse("rotary").options == registry.Rotary()
    assert str(part) == "rotary:base=500000,fraction=0.5,cross=true"


@given(
    st.builds(
        registry.Rotary,
        base=st.floats(2.0, 1e9),
        fraction=st.none() | st.floats(0.01, 1.0),
        cross=st.booleans(),
        scaling=st.just("llama3"),
        factor=st.floats(1.0, 99.0),
        original_positions=st.integers(1, 1 << 20),
    )
)
def test_the_text_of_a_part_is_read_as_this_part(rotary):
    part = Choice("rotary", rotary)
    assert registry.POSITIONS.parse(str(part)) == part


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("position", "rotor", "one of .*'rotary'"),
        ("position", "alibi:slope=3", "'alibi' alone"),
        ("position", "rotary:bass=3", "'rotary' with options base, fraction"),
        ("position", "rotary:base", "'rotary' with options base, fraction"),
        ("position", "rotary:base=ten", "a part whose base is a number"),
        ("position", "rotary:base=0", "a part whose base is above 1"),
        ("position", "rotary:fraction=2", r"a part whose fraction is in \(0, 1\]"),
        ("position", "relative:num_buckets=30", "num_buckets is a multiple of 4"),
        ("position", "relative:max_distance=16", "max_distance is above num_buckets / 2"),
        ("position", "rotary:factor=4", "factor is left out without scaling"),
        ("position", "rotary:scaling=linear,low_frequency=2", "low_frequency is left out"),
        ("position", "rotary:scaling=llama3,truncate=false", "truncate is left out"),
        ("position", "rotary:scaling=yarn,beta_fast=1", "beta_fast is above beta_slow"),
        ("parametrisation", "mup:rule=absolute,base_width=64", "base_width is left out"),
        ("position", "rotary:base=5,base=6", "each option once, and base is there twice"),
        ("position", "rotary:base=inf", "a part whose base is a finite number"),
        ("parametrisation", "mup:base_width=1e-3", "a part whose base_width is a whole number"),
        ("norm", "rms_norm:gain=two", "gain is one of 'none', 'offset', 'scalar', 'vector'"),
        ("norm", "rms_norm:bias=true", "'rms_norm' with options epsilon, gain"),
        ("parametrisation", "mup:rule=mine", "rule is one of 'absolute', 'relative'"),
        ("mixer", "attention:heads=3", "'attention' alone"),
    ],
)
def test_mistakes_name_the_field_and_what_it_must_be(field, text, message):
    with pytest.raises(ValueError, match=rf"^{field} is '{text}'; it must be .*{message}"):
        tiny_config("lm", **{field: text})


def test_every_option_has_its_words_and_a_default():
    for slot, name, kind in PARTS:
        for each in fields(kind):
            assert len(each.metadata["words"]) > 15, (slot, name, each.name)
        assert str(Choice(name, kind())) == name


def test_equal_parts_have_equal_text():
    texts = ("rotary:fraction=0.5,base=5", "rotary:base=5.0,fraction=0.5,cross=false")
    models = [tiny_config("llama", position=text) for text in texts]
    assert models[0] == models[1]
    assert models[0].position == "rotary:base=5,fraction=0.5"


def test_an_explicit_configuration_is_the_same_model():
    config = tiny_config("bert", position="rotary:base=10000", head_dim=8)
    explicit = config.explicit()
    assert explicit.position == "rotary"
    assert (explicit.norm, explicit.norm_placement) == ("layer_norm:epsilon=1e-12", "post")
    assert explicit.explicit() == explicit
