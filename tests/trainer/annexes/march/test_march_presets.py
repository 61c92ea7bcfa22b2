"""MARCH's presets have its totals, and what does not fit together is refused."""

import re

import pytest

from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.engine.cost import flops_per_step, parameter_count

pytestmark = pytest.mark.processes

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
FAST = ("v1", "v1_small", "layers18", "dim1024", "swiglu", "v2")


@pytest.mark.parametrize("name", slow_unless(FAST, PUBLISHED))
def test_totals_of_the_records(name):
    total, formula = PUBLISHED[name]
    assert formula == total
    assert parameter_total(model_preset(f"march_{name}")) == total


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


@pytest.mark.parametrize("name", slow_unless(QUICK, DIFFERENCES))
def test_totals_of_other_parts(name):
    assert parameter_count(model_preset(f"march_{name}")) - BASE == DIFFERENCES[name]


def test_families_of_the_second_baseline():
    for pattern, count in (("dim.*_la", 14), ("ff", 15), ("dim.*_ff", 6)):
        names = [name for name in MODEL_PRESETS if re.match(f"march_v2_{pattern}", name)]
        assert len(names) == count
        for model in map(model_preset, names):
            assert model.num_heads * 64 == model.emb_dim
            assert model.mlp_dim % 64 == 0
            total = v2(model.emb_dim, model.num_encoder_layers, model.mlp_dim)
            assert abs(total / 207_737_600 - 1) < 0.1, model


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
