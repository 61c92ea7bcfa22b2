"""Rows that longt5 adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import T5, THEIR_T5
from trainer.model.config import ModelConfig

REFUSED = [
    ("t5_1_1",
     {"attention_window": "transient_global", "attention": "pallas", "num_encoder_layers": 1},
     "attention is 'pallas'"),
    ("lm", {"attention_window": "transient_global"}, "num_encoder_layers is 0; .*above 0 with"),
    ("t5_1_1", {"attention_window": "transient_global", "position": "rotary"},
     "position is 'rotary'; .*'relative' with attention_window 'transient_global'"),
    ("t5_1_1", {"attention_window": "transient_global", "attention": "dot_product"},
     "attention is 'dot_product'; .*'auto' or 'einsum'"),
]  # fmt: skip

TOTALS = [
    ("longt5_local_base", {}, None, 247_577_856),
    ("longt5_tglobal_base", {}, None, 247_577_856 + 12 * 768 + 12 * 32),
]

EXPORTED = {
    "mup_longt5": ModelConfig(family="t5_1_1", parametrisation="mup:base_width=8",
        norm="rms_norm:gain=none", attention_window="transient_global:window=5,block=4", **T5),
}  # fmt: skip

LONGT5 = THEIR_T5 | {
    "local_radius": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
SHAPES = {
    "longt5": ("LongT5", LONGT5),
    "longt5, scaled": ("LongT5", LONGT5
        | {"tie_word_embeddings": True, "local_radius": 0, "num_decoder_layers": 1}),
    "longt5, blocks": ("LongT5", LONGT5
        | {"encoder_attention_type": "transient-global", "global_block_size": 4}),
}  # fmt: skip
ARCHITECTURES = {"LongT5": "LongT5ForConditionalGeneration"}

NAMES_IN_TRANSFORMERS = ["mup_longt5"]

# Shapes of tests that are not slow.
LEARNING_SHAPES = ["longt5, blocks"]

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["longt5_"]
