"""Presets have the published sizes, each written out here from the architecture."""

from dataclasses import replace

import pytest

from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step, parameter_count


def t5_parameters(vocab, emb, heads, head_dim, mlp, layers, mlp_inputs, embeddings) -> int:
    """An encoder and a decoder of `layers` each, from the definition of T5."""
    attention = 4 * emb * heads * head_dim
    feed_forward = (mlp_inputs + 1) * emb * mlp
    encoder_layer = attention + feed_forward + 2 * emb
    decoder_layer = 2 * attention + feed_forward + 3 * emb
    each_stack = heads * 32 + emb  # relative-position table, final norm
    return embeddings * vocab * emb + layers * (encoder_layer + decoder_layer) + 2 * each_stack


# vocab, emb, heads, head_dim, mlp, layers, kernels into the mlp, embedding-sized tables; total.
# Totals as published with the checkpoints (Hugging Face model cards; T5X's gin headers).
PUBLISHED = {
    "t5_1_0_small": ((32128, 512, 8, 64, 2048, 6, 1, 1), 60_506_624),
    "t5_1_0_base": ((32128, 768, 12, 64, 3072, 12, 1, 1), 222_903_552),
    "t5_1_0_large": ((32128, 1024, 16, 64, 4096, 24, 1, 1), 737_668_096),
    "t5_1_0_3b": ((32128, 1024, 32, 128, 16384, 24, 1, 1), 2_851_598_336),
    "t5_1_0_11b": ((32128, 1024, 128, 128, 65536, 24, 1, 1), 11_307_321_344),
    "t5_1_1_small": ((32128, 512, 6, 64, 1024, 8, 2, 2), 76_961_152),
    "t5_1_1_base": ((32128, 768, 12, 64, 2048, 12, 2, 2), 247_577_856),
    "t5_1_1_large": ((32128, 1024, 16, 64, 2816, 24, 2, 2), 783_150_080),
    "t5_1_1_xl": ((32128, 2048, 32, 64, 5120, 24, 2, 2), 2_849_757_184),
    "t5_1_1_xxl": ((32128, 4096, 64, 64, 10240, 24, 2, 2), 11_135_332_352),
    "mt5_small": ((250112, 512, 6, 64, 1024, 8, 2, 2), 300_176_768),
    "mt5_base": ((250112, 768, 12, 64, 2048, 12, 2, 2), 582_401_280),
    "mt5_large": ((250112, 1024, 16, 64, 2816, 24, 2, 2), 1_229_581_312),
    "mt5_xl": ((250112, 2048, 32, 64, 5120, 24, 2, 2), 3_742_619_648),
    "mt5_xxl": ((250112, 4096, 64, 64, 10240, 24, 2, 2), 12_921_057_280),
}


# Tracing them takes seconds each; what they add to the smaller ones is numbers in a table.
_LONG = ("3b", "11b", "xl", "xxl")


@pytest.mark.parametrize(
    "name", slow_unless([n for n in PUBLISHED if not n.endswith(_LONG)], PUBLISHED)
)
def test_published_totals(name):
    dimensions, total = PUBLISHED[name]
    assert t5_parameters(*dimensions) == total
    assert parameter_total(model_preset(name)) == total


def decoder_parameters(emb, heads, head_dim, mlp, layers, positions=0, vocab=32_128, tables=1):
    """A decoder with a gated feed-forward."""
    layer = 4 * emb * heads * head_dim + 3 * emb * mlp + 2 * emb
    return tables * vocab * emb + layers * layer + heads * positions + emb


T5_TINY = t5_parameters(32128, 8, 4, 3, 16, 2, mlp_inputs=2, embeddings=2)
ROMANIAN = {"vocab_size": 64_000}
# Preset, changes, its formula, and its total where one is published.
TOTALS = [
    ("lm_tiny", {}, decoder_parameters(8, 4, 3, 16, 2, 32), None),
    ("lm_small", {}, decoder_parameters(512, 6, 64, 1024, 8, 32), None),
    ("lm_base", {}, decoder_parameters(768, 12, 64, 2048, 12, 32), None),
    ("lm_large", {}, decoder_parameters(1024, 16, 64, 2816, 24, 32), None),
    ("lm_1b", {}, decoder_parameters(2048, 32, 64, 5120, 24, 32), None),
    # As the checkpoints' model cards have them.
    ("llama_1b", {}, decoder_parameters(2048, 16, 128, 5504, 24, 0, 32_000, 2), 1_345_423_360),
    ("llama_7b", {}, decoder_parameters(4096, 32, 128, 11_008, 32, 0, 32_000, 2), 6_738_415_616),
    # T5X's tiny.gin: 0.52 million parameters in 52 arrays.
    ("t5_1_1_tiny", {}, T5_TINY, None),
    # T5 1.1, and in each encoder layer a norm of blocks, with a table of biases for all.
    ("longt5_local_base", {}, None, 247_577_856),
    ("longt5_tglobal_base", {}, None, 247_577_856 + 12 * 768 + 12 * 32),
    # T5 1.0 with 7 more experts and a router in every second layer: 0.6 B in all.
    ("switch_base_8", {}, 222_903_552 + 12 * (7 * 2 * 768 * 3072 + 768 * 8), None),
    # A vocabulary as in the Romanian T5.
    ("t5_1_1_base", ROMANIAN, None, 296_533_248),
    ("t5_1_1_large", ROMANIAN, None, 848_423_936),
    ("small_evolved_transformer", {}, None, 38_062_848),
    ("medium_evolved_transformer", {}, None, 109_620_480),
]


@pytest.mark.parametrize(("name", "changes", "formula", "total"), TOTALS)
def test_other_totals(name, changes, formula, total):
    assert formula is None or total is None or formula == total
    assert parameter_total(replace(model_preset(name), **changes)) == (total or formula)


# Source: the safetensors of each model on the Hub, whose totals its page shows.
ON_THE_HUB = {
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "olmo2_1b": 1_484_916_736,
    # T5Gemma (arXiv:2504.06225), table 1: 312.5 M, 591.5 M, 1.24 B, 3.77 B, 5.60 B, 20.33 B.
    "t5gemma_small": 312_517_632,
    "t5gemma_base": 591_490_560,
    "t5gemma_2b_2b": 5_596_853_760,
    # 12.29 B there.
    "t5gemma_9b_2b": 12_292_375_296,
}


@pytest.mark.parametrize(
    "name", slow_unless(["gemma3_270m", "mistral_7b", "t5gemma_small"], ON_THE_HUB)
)
def test_totals_on_the_hub(name):
    assert parameter_total(model_preset(name)) == ON_THE_HUB[name]


# vocab, emb, mlp, layers; total. Google's checkpoints, as Hugging Face's BertForPreTraining.
BERT_PUBLISHED = {
    "bert_base": ((30522, 768, 3072, 12), 110_106_428),
    "bert_large": ((30522, 1024, 4096, 24), 336_226_108),
}


@pytest.mark.parametrize("name", BERT_PUBLISHED)
def test_published_totals_of_bert(name):
    (vocab, emb, mlp, layers), total = BERT_PUBLISHED[name]
    norm, square = 2 * emb, emb * emb + emb
    embeddings = (vocab + 512 + 2) * emb + norm
    layer = 4 * square + (emb * mlp + mlp) + (mlp * emb + emb) + 2 * norm
    heads = (square + norm + vocab) + square + (2 * emb + 2)
    assert embeddings + layers * layer + heads == total
    assert parameter_total(model_preset(name)) == total


# vocab, emb, mlp, layers; total. Source: the number of parameters of `RobertaForMaskedLM` and
# `ModernBertForMaskedLM` with the checkpoints' config.json, which the Hub's pages show.
ROBERTA_PUBLISHED = {
    "roberta_base": ((50_265, 768, 3072, 12), 124_697_433),
    "roberta_large": ((50_265, 1024, 4096, 24), 355_412_057),
}
MODERNBERT_PUBLISHED = {
    "modernbert_base": ((50_368, 768, 1152, 22), 149_655_232),
    "modernbert_large": ((50_368, 1024, 2624, 28), 395_881_664),
}


def order_head(emb: int) -> int:
    """Our encoders' second head, which those models lack."""
    return emb * emb + emb + 2 * emb + 2


@pytest.mark.parametrize("name", ROBERTA_PUBLISHED)
def test_published_totals_of_roberta(name):
    (vocab, emb, mlp, layers), total = ROBERTA_PUBLISHED[name]
    norm, square = 2 * emb, emb * emb + emb
    layer = 4 * square + (emb * mlp + mlp) + (mlp * emb + emb) + 2 * norm
    unused = 2 * emb  # positions of the padding id and the id below it
    embeddings, head = (vocab + 512 + 1) * emb + norm, square + norm + vocab
    assert embeddings + unused + layers * layer + head == total
    assert parameter_total(model_preset(name)) == total - unused + order_head(emb)


@pytest.mark.parametrize("name", MODERNBERT_PUBLISHED)
def test_published_totals_of_modernbert(name):
    (vocab, emb, mlp, layers), total = MODERNBERT_PUBLISHED[name]
    # Norms: two in each layer but the first, of the embeddings, of the last states, in the head.
    norms, head = (2 * layers - 1 + 3) * emb, emb * emb + vocab
    assert vocab * emb + layers * (4 * emb * emb + 3 * emb * mlp) + norms + head == total
    assert parameter_total(model_preset(name)) == total + order_head(emb)


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
@pytest.mark.parametrize("name", PRIMER)
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


def test_pre_norm_and_other_positions_of_bert():
    base = model_preset("bert_base")
    published, table = BERT_PUBLISHED["bert_base"][1], 512 * 768
    for changes, difference in (
        ({"family": "bert_pre_ln"}, 2 * 768),
        ({"position": "relative"}, 12 * 32 - table),
        ({"position": "rotary"}, -table),
        ({"max_positions": 128}, -(512 - 128) * 768),
    ):
        assert parameter_total(replace(base, **changes)) == published + difference


def test_the_berts_of_t5_experiments():
    base = BERT_PUBLISHED["bert_base"][1]
    layer = 12 * 768**2 + (5 * 768 + 3072) + 2 * 2 * 768  # kernels, biases, norms
    small, last_norm, table = base - 8 * layer, 2 * 768, 512 * 768
    for name, total in (
        ("bert_base_pre_ln", base + last_norm),
        ("bert_base_4l", small),
        ("bert_base_4l_pre_ln_relative", small + last_norm - table + 12 * 32),
        ("bert_base_4l_pre_ln_rotary", small + last_norm - table),
    ):
        assert parameter_total(model_preset(name)) == total, name
    assert model_preset("bert_base_4l_pre_ln_rotary").rotated_channels == 16


@pytest.mark.processes
@pytest.mark.parametrize(
    ("preset", "position", "difference"),
    [
        # A table in each stack instead of biases for 12 heads and 32 buckets, or nothing.
        ("t5_1_1_base", "absolute", 2 * (512 * 768 - 12 * 32)),
        ("t5_1_1_base", "rotary", -2 * 12 * 32),
        ("t5_1_1_base", "relative_per_layer", 2 * 11 * 12 * 32),
        ("lm_base", "absolute", 512 * 768 - 12 * 32),
        ("lm_base", "rotary", -12 * 32),
        ("llama_mini", "relative", 4 * 32),
        ("llama_mini", "absolute", 512 * 128),
        # Biases for each of its two numbers of heads.
        ("mini_evolved_transformer", "absolute", 512 * 128 - (4 + 8) * 32),
    ],
)
def test_totals_with_other_positions(preset, position, difference):
    base = model_preset(preset)
    changed = replace(base, position=position)
    assert parameter_total(changed) - parameter_total(base) == difference


def test_every_preset_has_the_stacks_of_its_family():
    for name, config in MODEL_PRESETS.items():
        decodes_alone = config.family not in ("t5_1_0", "t5_1_1", "t5gemma", "bert", "bert_pre_ln")
        assert (config.num_encoder_layers == 0) == decodes_alone, name
        assert (config.num_decoder_layers == 0) == config.family.startswith("bert")
    tiny = replace(model_preset("bert_tiny"), vocab_size=128, max_positions=64)
    assert parameter_count(tiny) < 10_000


def test_flops_of_a_decoder_only_step_by_hand():
    config = model_preset("lm_base")
    batch, length = 4, 1024
    # Attention and gated mlp kernels of 12 layers, then the tied logits.
    elements = 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 32128 * 768
    # Forward: 2 for the logits of attention and 2 for the mix, for each pair and channel.
    attention = 3 * (2 + 2) * 12 * batch * length * length * 768
    expected = 6 * elements * batch * length + attention
    assert flops_per_step(config, batch, 0, length) == expected
    untied = replace(config, tied_logits=False)
    assert flops_per_step(untied, batch, 512, length) == expected


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


def test_flops_of_an_encoder_decoder_step_by_hand():
    config = model_preset("t5_1_1_small")
    batch, enc, dec, layers, inner = 8, 512, 114, 8, 6 * 64
    projection, mlp = 512 * inner, 3 * 512 * 1024
    on_encoder = layers * (4 * projection + mlp) + layers * 2 * projection
    on_decoder = layers * (4 * projection + mlp) + layers * 2 * projection + 512 * 32128
    pairs = layers * batch * (enc * enc + dec * dec + dec * enc)
    expected = 6 * batch * (on_encoder * enc + on_decoder * dec) + 12 * pairs * inner
    assert flops_per_step(config, batch, enc, dec) == expected


def test_flops_of_an_encoder_only_step_by_hand():
    config = model_preset("bert_base")
    batch, length = 8, 128
    # Layers and the head's projection, then the tied logits, at every position; pooler and the two
    # classes at one a row.
    elements = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 768 + 30522 * 768
    row_elements = 768 * 768 + 768 * 2
    pairs = 12 * batch * length * length
    expected = 6 * batch * (elements * length + row_elements) + 12 * pairs * 768
    assert flops_per_step(config, batch, length, 0) == expected
    assert flops_per_step(replace(config, tied_logits=False), batch, length, 99) == expected
