"""Totals of the Primer paper's models."""

from dataclasses import replace

import pytest

from tests.support.totals import parameter_total
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step

# Built from the released gin files with Mesh TensorFlow 0.1.21.
PRIMER = {
    "small_transformer_vanilla": 35_352_832, "small_transformer_gelu": 35_352_832,
    "small_transformer_plusplus": 35_337_968, "small_primer": 35_371_264,
    "small_primer_ez": 35_380_480, "medium_transformer_vanilla": 109_693_824,
    "medium_transformer_gelu": 109_693_824, "medium_transformer_swish": 109_693_824,
    "medium_transformer_squared_relu": 109_693_824, "medium_transformer_reglu": 109_706_112,
    "medium_transformer_swiglu": 109_706_112, "medium_transformer_plusplus": 109_686_912,
    "medium_primer": 109_749_120, "medium_primer_ez": 109_776_768,
    "large_transformer_vanilla": 536_537_600, "large_transformer_plusplus": 536_602_144,
    "large_primer": 536_685_056, "switch_transformer": 548_585_088, "switch_primer": 548_668_032,
    "synthesizer": 144_296_704, "synthesizer_squared_relu": 144_296_704,
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in PRIMER if name in MODEL_PRESETS])
def test_totals_of_primer(name):
    assert parameter_total(model_preset(name)) == PRIMER[name]


def test_parts_of_primer():
    for size in ("small", "medium", "large"):
        released = model_preset(f"{size}_primer_as_released")
        assert released.norm_placement is None
        assert parameter_total(released) == PRIMER[f"{size}_primer"]
    assert model_preset("small_primer").norm_placement == "primer_alternating"
    base = model_preset("t5_1_1_base")
    primer_ez = model_preset("t5_1_1_base_primer_ez")
    # As many kernel elements, and three taps a channel for queries, keys and values.
    taps = (12 + 12) * 9 * 768
    assert parameter_total(primer_ez) - parameter_total(base) == taps


@pytest.mark.processes
def test_flops_of_parts_of_primer_beside_the_vanilla_model():
    batch, length = 4, 64

    def more(name, changes=(), base="medium_transformer_vanilla"):
        config = replace(model_preset(name), **dict(changes))
        vanilla = flops_per_step(model_preset(base), batch, 0, length)
        return (flops_per_step(config, batch, 0, length) - vanilla) / (6 * batch * length)

    # Three taps for each channel of queries, keys and values.
    assert more("medium_primer_ez") == 12 * 9 * 768
    assert more("medium_primer") == 12 * 6 * 768
    # A token goes through one expert, and past a router of 32.
    if "switch_transformer" in MODEL_PRESETS:
        assert more("switch_transformer") == 3 * 32 * 768
    # 1024 channels for 768, in four kernels, in logits and in the mix.
    wider = 12 * (4 * 768 + 2 * length) * (1024 - 768)
    assert more("synthesizer") == wider
    # The logits of a dense one are a product with a kernel for 512 positions instead of keys.
    dense = more("synthesizer_dense") - wider
    assert dense == 12 * (1024 * 512 - 768 * 1024 - length * 1024)
    # A block has two attentions of the same width.
    d, ff = 768, 3072
    convolutions = 11 * d + 7 * d + 7 * 2 * d + d * 2 * d + d * d // 2 + 2 * d * d
    block = 8 * d * d + 2 * d * ff + convolutions + 4 * length * d
    vanilla = 12 * (4 * d * d + 2 * d * ff + 2 * length * d)
    assert more("medium_evolved_transformer") == 7 * block - vanilla
