"""Converters: one per architecture, and the features that they make."""

import numpy as np
import pytest

from tasks import registry
from tasks.objectives import Lengths
from trainer.config.from_flags import build_config
from trainer.config.presets import model_preset
from trainer.data.features import (
    EncoderConverter,
    FeatureConverter,
    converter,
    convertible,
    longest_row,
    target_side,
)

LENGTHS = Lengths(8, 8)


def example(columns, order):
    """Returns an example of masked LM from (input, target, weight, segment) of each position."""
    names = ("inputs", "targets", "weights", "segments")
    rows = {
        name: (np.array([values], np.int32), np.array([len(values)]))
        for name, values in zip(names, zip(*columns, strict=True), strict=True)
    }
    return {**rows, "order": (np.array([[order]], np.int32), np.ones(1, np.int64))}


# Token 9 classifies, 1 ends a segment, 8 masks; the first segment is [20, 21], the second [30].
STRAIGHT = [(9, 9, 0, 1), (20, 20, 0, 1), (8, 21, 1, 1), (1, 1, 0, 1), (8, 30, 1, 2), (1, 1, 0, 2)]
SWAPPED = [(9, 9, 0, 1), (8, 30, 1, 1), (1, 1, 0, 1), (20, 20, 0, 2), (8, 21, 1, 2), (1, 1, 0, 2)]


@pytest.mark.parametrize(
    ("columns", "order", "types"),
    [(STRAIGHT, 0, [0, 0, 0, 0, 1, 1, 0, 0]), (SWAPPED, 1, [0, 0, 0, 1, 1, 1, 0, 0])],
    ids=["straight", "swapped"],
)
def test_a_masked_lm_example_becomes_features_of_an_encoder(columns, order, types):
    batch = EncoderConverter(LENGTHS)(example(columns, order))
    expected = {
        "encoder_input_tokens": [[column[0] for column in columns] + [0, 0]],
        "encoder_target_tokens": [[column[1] for column in columns] + [0, 0]],
        "encoder_loss_weights": [[column[2] for column in columns] + [0, 0]],
        "encoder_token_types": [types],
        "sentence_order": [order],
    }
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], values)
    assert target_side(batch) == "encoder"


def test_an_empty_segment_has_an_eos():
    # One word in all: the first segment holds it, the other nothing but its end.
    columns = [(9, 9, 0, 1), (1, 1, 0, 1), (20, 20, 0, 2), (1, 1, 0, 2)]
    batch = EncoderConverter(LENGTHS)(example(columns, 1))
    np.testing.assert_array_equal(batch["encoder_token_types"], [[0, 0, 1, 1, 0, 0, 0, 0]])


def test_the_architecture_chooses_the_converter():
    bert, t5, lm = (
        converter(model_preset(name), LENGTHS) for name in ("bert_tiny", "t5_1_1_tiny", "lm_tiny")
    )
    assert bert == EncoderConverter(LENGTHS)
    assert t5 == FeatureConverter(LENGTHS, encoder_decoder=True)
    assert lm == FeatureConverter(LENGTHS, encoder_decoder=False)
    assert [(each.encoder_length, each.decoder_length) for each in (bert, t5, lm)] == [
        (8, 0),
        (8, 8),
        (0, 16),
    ]
    bert, t5, lm = (model_preset(name) for name in ("bert_tiny", "t5_1_1_tiny", "lm_tiny"))
    for name in ("span_corruption", "prefix_lm", "autoregressive_lm", "masked_lm"):
        objective = registry.get(f"rlm_{name}").objective
        encoder_alone = name == "masked_lm"
        assert convertible(bert, objective) == encoder_alone
        # A language model has nothing for an encoder to read.
        assert convertible(t5, objective) == (name in ("span_corruption", "prefix_lm"))
        assert convertible(lm, objective) == (not encoder_alone)


@pytest.mark.parametrize(
    ("preset", "flags", "positions"),
    [
        ("llama_mini", ("--lengths.inputs=512", "--lengths.targets=500"), 1012),
        ("llama_mini", ("--lengths.targets=512", "--length_schedule=8000: targets=4096"), 4096),
        ("t5_1_1_tiny", ("--lengths.inputs=512", "--lengths.targets=114"), 512),
        ("t5_1_1_tiny", (), 0),
    ],
)
def test_the_longest_row_is_of_all_phases_and_sides(preset, flags, positions):
    assert longest_row(build_config(preset, [*flags])[0]) == positions
