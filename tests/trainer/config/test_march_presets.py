"""MARCH's presets have its totals, and what does not fit together is refused."""

from dataclasses import replace

import pytest

from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.huggingface import configs
from trainer.t5x.write import unsupported

V = 32_128


def v1(d, layers, scale):
    """A formula of the first baseline: attention, feed-forward and norms, and two bias tables."""
    half, f = layers // 2, scale * d
    return V * d + half * (12 * d * d + 4 * d * f + 5 * d) + 2 * d + 2 * 32 * (d // 64)


def v2(d, layers, f):
    """The second one has no tables, and three kernels in a feed-forward."""
    return V * d + layers * (12 * d * d + 6 * d * f + 5 * d) + 2 * d


# As in MARCH's records of its runs.
PUBLISHED = {
    "v1": (222_903_552, v1(768, 24, 4)),
    "v1_small": (60_506_624, v1(512, 12, 4)),
    "layers18": (173_346_816, v1(768, 18, 4)),
    "layers30": (272_460_288, v1(768, 30, 4)),
    "dim512": (104_562_176, v1(512, 24, 4)),
    "dim1024": (385_285_120, v1(1024, 24, 4)),
    "ff2": (166_280_448, v1(768, 24, 2)),
    "ff8": (336_149_760, v1(768, 24, 8)),
    "dim640_layers30": (192_643_840, v1(640, 30, 4)),
    "reglu": (222_903_552, v1(768, 24, 4)),
    "geglu": (222_903_552, v1(768, 24, 4)),
    "swiglu": (222_903_552, v1(768, 24, 4)),
    "v2": (207_737_600, v2(896, 8, 2368)),
    "v1_large": (737_668_096, v1(1024, 48, 4)),
}
SLOW = ("v1_large", "layers30", "dim640_layers30", "dim512", "ff2", "ff8", "reglu", "geglu")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in PUBLISHED]
)
def test_totals_of_the_records(name):
    total, formula = PUBLISHED[name]
    assert formula == total
    assert parameter_count(model_preset(f"march_{name}")) == total


D, FF, LAYERS = 768, 3072, 24
SQUARE, BASE, TABLES = D * D, 222_903_552, 2 * 12 * 32
# What each variant has more than the first baseline, or less.
DIFFERENCES = {
    "absolute": 2 * 512 * D - TABLES,
    "no_ff": -LAYERS * (2 * D * FF + D),
    "values_relu": -LAYERS * D,
    "values_relu_first_ff": LAYERS * (SQUARE - 2 * D * FF - D),
    "mixed": 0,
    "fcabs": 0,
    "unified_attention": -12 * (4 * SQUARE + D),
    # Nothing reads the encoder's last states.
    "encoder_keys": -12 * 2 * SQUARE - D,
    "layerwise": 0,
    # Queries, outputs and a norm in each layer; keys and values of each stack.
    "database": LAYERS * (2 * SQUARE + D) + 2 * 2 * D * 64,
    # 1.5 and 0.5 times as many heads make 18 and 6, and tables for both.
    "scaling_heads": 2 * (18 + 6) * 32 - TABLES,
    "scaling_heads_inverse": 2 * (18 + 6) * 32 - TABLES,
    "scaling_heads_constant": 2 * (24 + 6) * 32 - TABLES,
    "big_heads": 36 * 4 * SQUARE,
    # Heads are summed in pairs in self-attention.
    "big_heads_summed": 36 * 4 * SQUARE - 24 * SQUARE,
    "tp_weights": LAYERS * SQUARE,
    "tp_embeddings": LAYERS * 2 * 100 * D,
    "sparse_seqlen": 0,
    "decoder": -12 * (4 * SQUARE + D) - D - 12 * 32,
}


QUICK = ("no_ff", "encoder_keys", "database", "unified_attention", "tp_embeddings")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in DIFFERENCES],
)
def test_totals_of_other_parts(name):
    assert parameter_count(model_preset(f"march_{name}")) - BASE == DIFFERENCES[name]


def test_families_of_the_second_baseline():
    families = {
        "dim_layers": [n for n in MODEL_PRESETS if n.startswith("march_v2_dim") and "_la" in n],
        "ff_layers": [n for n in MODEL_PRESETS if n.startswith("march_v2_ff")],
        "dim_ff": [n for n in MODEL_PRESETS if n.startswith("march_v2_dim") and "_ff" in n],
    }
    assert {name: len(presets) for name, presets in families.items()} == {
        "dim_layers": 14,
        "ff_layers": 15,
        "dim_ff": 6,
    }
    for presets in families.values():
        for name in presets:
            model = model_preset(name)
            assert model.num_heads * 64 == model.emb_dim
            assert model.mlp_dim % 64 == 0
            total = v2(model.emb_dim, model.num_encoder_layers, model.mlp_dim)
            assert abs(total / 207_737_600 - 1) < 0.1, name


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("t5_1_0_tiny", {"feed_forward": "mixd"}, "feed_forward is 'mixd'; it must be one of"),
        ("t5_1_0_tiny", {"feed_forward": "none", "num_experts": 2}, "num_experts is 2"),
        ("t5_1_1_tiny", {"feed_forward": "none", "mlp_bias": True}, "mlp_bias is True"),
        (
            "t5_1_0_tiny",
            {"feed_forward": "mixed", "mlp_activations": ("silu",)},
            "mlp_activations is .'silu',.; it must be None with feed_forward 'mixed'",
        ),
        ("t5_1_0_tiny", {"feed_forward": "mixed:sigmoid_dropout=0.5"}, "dropout_rate is 0.0"),
        ("lm_tiny", {"cross_attention": "merged"}, "cross_attention is 'merged'; it must be 'att"),
        ("lm_tiny", {"token_dropping": 2}, "token_dropping is 2; it must be 0 in family lm"),
        ("t5_1_0_tiny", {"token_dropping": 2, "scan_layers": True}, "scan_layers is True"),
        ("t5_1_0_tiny", {"token_dropping": 2, "attention": "dot_product"}, "attention is 'dot"),
        ("t5_1_0_tiny", {"token_dropping": 2, "mixer": "mdha"}, "mixer is 'mdha'; it must be one"),
        (
            "t5_1_0_tiny",
            {"cross_attention": "encoder_keys", "num_decoder_layers": 1},
            "num_decoder_layers is 1; it must be num_encoder_layers, 2",
        ),
        ("t5_1_0_tiny", {"cross_attention": "layerwise", "scan_layers": True}, "scan_layers"),
        (
            "t5_1_0_tiny",
            {"cross_attention": "merged", "position": "rotary", "head_dim": 4},
            "position is 'rotary'; it must be with cross=true",
        ),
        ("t5_1_0_tiny", {"head_scaling": "halves:first=1.3"}, "head_scaling is .* times 1.3 is"),
        ("t5_1_0_tiny", {"head_scaling": "halves", "scan_layers": True}, "scan_layers is True"),
        ("t5_1_0_tiny", {"mixer": "summed_heads:group=3"}, "num_heads is 4; it must be a multiple"),
        ("t5_1_0_tiny", {"database_entries": -1}, "database_entries is -1; it must be 0 or more"),
        ("tiny_evolved_transformer", {"feed_forward": "none"}, "feed_forward is 'none'; it must"),
    ],
)
def test_what_does_not_fit_is_refused(preset, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(model_preset(preset), **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"feed_forward": "none"}, "feed_forward none"),
        ({"mixer": "values_relu"}, "mixer values_relu"),
        ({"token_dropping": 1}, "token_dropping 1"),
        ({"cross_attention": "merged"}, "cross_attention merged"),
        ({"cross_attention": "layerwise"}, "cross_attention layerwise"),
        ({"database_entries": 3}, "database_entries 3"),
        ({"head_scaling": "halves"}, "head_scaling halves"),
        ({"norm_placement": "pre_without_mixer_residual"}, "norm_placement pre_without"),
    ],
)
def test_no_variant_is_exported_as_t5(changes, says):
    model = replace(model_preset("t5_1_0_tiny"), **changes)
    refusal = configs.refusal(model)
    assert refusal is not None
    assert says in refusal
    assert "\n" not in refusal
    (message,) = unsupported(model)
    assert message.startswith(f"--model.{next(iter(changes))}=")


def test_flops_of_the_variants():
    batch, enc, dec = 2, 64, 32
    base = flops_per_step(model_preset("march_v1"), batch, enc, dec)

    def more(name, encoder=enc):
        return (flops_per_step(model_preset(f"march_{name}"), batch, encoder, dec) - base) / (
            6 * batch
        )

    # Keys and values of the encoder are made by self-attention's kernels, and no queries of theirs.
    assert more("unified_attention") == -12 * 2 * SQUARE * dec
    assert more("encoder_keys") == -12 * 2 * SQUARE * enc
    pairs = 2 * D * D
    assert more("database") == 12 * (2 * SQUARE + pairs) * (enc + dec)
    # 18 and 6 heads are as many products as 12 and 12.
    assert more("scaling_heads") == 0
    # Rows lose 8 positions in each layer, after attention, until there are less than 16.
    lengths = [64, 56, 48, 40, 32, 24, 16] + [8] * 6
    fewer = sum(enc - before for before in lengths[:12]) * 4 * SQUARE
    fewer += sum(enc - after for after in lengths[1:]) * 2 * D * FF
    fewer += sum(enc**2 - before**2 for before in lengths[:12]) * 2 * D
    fewer += 12 * (enc - 8) * (2 * SQUARE + 2 * D * dec)
    assert more("fcabs") == -fewer
