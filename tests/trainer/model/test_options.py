"""Parts with options: how they are read, written, refused and documented."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.model.conftest import tiny_config
from trainer.model import parts
from trainer.model.slots import Choice

CLASSES = [
    (slot, name, part.options)
    for slot, known in parts.SLOTS.items()
    for name, part in known.items()
]


def test_options_are_read():
    part = parts.POSITIONS.parse("rotary:base=5e5,fraction=0.5,cross=true")
    expected = parts.Rotary(base=5e5, fraction=0.5, cross=True)
    assert part == Choice("rotary", expected)
    assert parts.POSITIONS.parse("rotary").options == parts.Rotary()
    assert str(part) == "rotary:base=500000,fraction=0.5,cross=true"


@given(
    st.builds(
        parts.Rotary,
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
    assert parts.POSITIONS.parse(str(part)) == part


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
        ("parametrisation", "mup:rule=absolute,base_width=64", "base_width is left out"),
        ("position", "rotary:base=5,base=6", "each option once, and base is there twice"),
        ("position", "rotary:base=inf", "a part whose base is a finite number"),
        ("parametrisation", "mup:base_width=1e3", "a part whose base_width is a whole number"),
        ("attention_pattern", "variable:windows=a", "windows is numbers joined by"),
        ("norm", "rms_norm:gain=two", "gain is one of 'none', 'offset', 'scalar', 'vector'"),
        ("norm", "rms_norm:bias=true", "'rms_norm' with options epsilon, gain"),
        ("parametrisation", "mup:rule=mine", "rule is one of 'absolute', 'relative'"),
        ("mixer", "attention:heads=3", "'attention' alone"),
    ],
)
def test_mistakes_name_the_field_and_what_it_must_be(field, text, message):
    with pytest.raises(ValueError, match=rf"^{field} is '{text}'; it must be .*{message}"):
        tiny_config("lm", **{field: text})


@pytest.mark.parametrize(("slot", "name", "kind"), CLASSES)
def test_every_option_has_its_words_and_a_default(slot, name, kind):
    for each in fields(kind):
        assert len(each.metadata["words"]) > 15, (slot, name, each.name)
    assert str(Choice(name, kind())) == name


def test_an_explicit_configuration_is_the_same_model():
    config = tiny_config("bert", position="rotary:base=10000", head_dim=8)
    explicit = config.explicit()
    assert explicit.position == "rotary"
    assert (explicit.norm, explicit.norm_placement) == ("layer_norm:epsilon=1e-12", "post")
    assert explicit.explicit() == explicit
