"""Totals of the Primer paper's models."""

from dataclasses import replace

import pytest

from tests.support.totals import parameter_total
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step

# Built from the released gin files with Mesh TensorFlow 0.1.21; layers, d, d_ff, width of the heads
# together, heads, kernels into the mlp, vectors of a norm, taps of each layer's heads.
PRIMER = {
    "small_transformer_vanilla": ((6, 512, 2048, 512, 8, 1, 2, 0), 35_352_832),
    "small_transformer_gelu": ((6, 512, 2048, 512, 8, 1, 2, 0), 35_352_832),
    "small_transformer_plusplus": ((6, 512, 1364, 512, 8, 2, 1, 0), 35_337_968),
    "small_primer": ((6, 512, 2048, 512, 8, 1, 2, 6), 35_371_264),
    "small_primer_ez": ((6, 512, 2048, 512, 8, 1, 2, 9), 35_380_480),
    "medium_transformer_vanilla": ((12, 768, 3072, 768, 12, 1, 2, 0), 109_693_824),
    "medium_transformer_gelu": ((12, 768, 3072, 768, 12, 1, 2, 0), 109_693_824),
    "medium_transformer_swish": ((12, 768, 3072, 768, 12, 1, 2, 0), 109_693_824),
    "medium_transformer_squared_relu": ((12, 768, 3072, 768, 12, 1, 2, 0), 109_693_824),
    "medium_transformer_reglu": ((12, 768, 2048, 768, 12, 2, 2, 0), 109_706_112),
    "medium_transformer_swiglu": ((12, 768, 2048, 768, 12, 2, 2, 0), 109_706_112),
    "medium_transformer_plusplus": ((12, 768, 2048, 768, 12, 2, 1, 0), 109_686_912),
    "medium_primer": ((12, 768, 3072, 768, 12, 1, 2, 6), 109_749_120),
    "medium_primer_ez": ((12, 768, 3072, 768, 12, 1, 2, 9), 109_776_768),
    "large_transformer_vanilla": ((24, 1024, 8192, 1024, 16, 1, 2, 0), 536_537_600),
    "large_transformer_plusplus": ((24, 1024, 5462, 1024, 16, 2, 1, 0), 536_602_144),
    "large_primer": ((24, 1024, 8192, 1024, 16, 1, 2, 6), 536_685_056),
    "switch_transformer": ((12, 768, 3072, 768, 12, 1, 2, 0), 548_585_088),
    "switch_primer": ((12, 768, 3072, 768, 12, 1, 2, 9), 548_668_032),
    "synthesizer": ((12, 768, 3072, 1024, 8, 1, 2, 0), 144_296_704),
    "synthesizer_squared_relu": ((12, 768, 3072, 1024, 8, 1, 2, 0), 144_296_704),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in PRIMER if name in MODEL_PRESETS])
def test_totals_of_primer(name):
    (layers, d, mlp, joined, heads, inputs, vectors, taps), total = PRIMER[name]
    feed_forward = (inputs + 1) * d * mlp + inputs * mlp + d
    layer = 4 * d * joined + feed_forward + 2 * vectors * d + taps * joined
    expected = 32128 * d + heads * 32 + layers * layer + vectors * d
    if name.startswith("switch"):
        expected += 3 * (32 * 2 * d * mlp + 32 * d - feed_forward)
    if name.startswith("synthesizer"):
        expected += 12 * 512 * heads * 512
    assert expected == total
    assert parameter_total(model_preset(name)) == total


def test_parts_of_primer():
    for size in ("small", "medium", "large"):
        released = model_preset(f"{size}_primer_as_released")
        assert released.norm_placement is None
        assert parameter_total(released) == PRIMER[f"{size}_primer"][1]
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
