"""Presets have the published sizes, or those written out here from the architecture."""

from dataclasses import replace

import pytest

from tests.support.cases import entries, rows
from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step, parameter_count

# Totals as published with the checkpoints (Hugging Face model cards, BERT's as BertForPreTraining;
# T5X's gin headers).
PUBLISHED = {
    "t5_1_0_small": 60_506_624, "t5_1_0_base": 222_903_552, "t5_1_0_large": 737_668_096,
    "t5_1_0_3b": 2_851_598_336, "t5_1_0_11b": 11_307_321_344, "t5_1_1_small": 76_961_152,
    "t5_1_1_base": 247_577_856, "t5_1_1_large": 783_150_080, "t5_1_1_xl": 2_849_757_184,
    "t5_1_1_xxl": 11_135_332_352, "mt5_small": 300_176_768, "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312, "mt5_xl": 3_742_619_648, "mt5_xxl": 12_921_057_280,
    "bert_base": 110_106_428, "bert_large": 336_226_108,
}  # fmt: skip
# Tracing them takes seconds each; what they add to the smaller ones is numbers in a table.
_LONG = ("3b", "11b", "xl", "xxl")


@pytest.mark.parametrize(
    "name", slow_unless([n for n in PUBLISHED if not n.endswith(_LONG)], PUBLISHED)
)
def test_published_totals(name):
    assert parameter_total(model_preset(name)) == PUBLISHED[name]


def decoder_parameters(emb, heads, head_dim, mlp, layers, positions=0, vocab=32_128, tables=1):
    """A decoder with a gated feed-forward."""
    layer = 4 * emb * heads * head_dim + 3 * emb * mlp + 2 * emb
    return tables * vocab * emb + layers * layer + heads * positions + emb


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
    ("t5_1_1_tiny", {}, None, 518_240),
    # A vocabulary as in the Romanian T5.
    ("t5_1_1_base", ROMANIAN, None, 296_533_248),
    ("t5_1_1_large", ROMANIAN, None, 848_423_936),
    *rows("TOTALS"),
]


@pytest.mark.parametrize(("name", "changes", "formula", "total"), TOTALS)
def test_other_totals(name, changes, formula, total):
    assert formula is None or total is None or formula == total
    assert parameter_total(replace(model_preset(name), **changes)) == (total or formula)


# Source: the safetensors of each model on the Hub, whose totals its page shows.
ON_THE_HUB = entries("ON_THE_HUB")


@pytest.mark.parametrize(
    "name", slow_unless({"gemma3_270m", "mistral_7b", "t5gemma_small"} & {*ON_THE_HUB}, ON_THE_HUB)
)
def test_totals_on_the_hub(name):
    assert parameter_total(model_preset(name)) == ON_THE_HUB[name]


def test_pre_norm_and_other_positions_of_bert():
    base = model_preset("bert_base")
    published, table = PUBLISHED["bert_base"], 512 * 768
    for changes, difference in (
        ({"family": "bert_pre_ln"}, 2 * 768),
        ({"position": "relative"}, 12 * 32 - table),
        ({"position": "rotary"}, -table),
        ({"max_positions": 128}, -(512 - 128) * 768),
    ):
        assert parameter_total(replace(base, **changes)) == published + difference


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
