"""Rows that primer adds to tables of the core's tests."""

from dataclasses import replace

from tests.trainer.huggingface.sizes import DECODER
from trainer.config.presets import model_preset
from trainer.model.config import ModelConfig

REFUSED = [
    ("evolved_transformer", {"position": "rotary"}, "position is .*must be"),
    (
        "t5_1_1",
        {"attention": "dot_product"} | {"mixer": "random_synthesizer"},
        "mixer .*with attention",
    ),
    ("lm", {"num_kv_heads": 2, "mixer": "mdha_shared_qk"}, "num_kv_heads is 2; .*mdha_shared_qk"),
    ("evolved_transformer", {"num_kv_heads": 1}, "num_kv_heads is 1; .*None in fam"),
    ("lm", {"query_key_norm": True, "mixer": "dense_synthesizer"}, "query_key_norm is True"),
    ("evolved_transformer", {"norm": "rms_norm"}, "norm is .*None in family evolved_transformer"),
    ("evolved_transformer", {"scan_layers": True}, "scan_layers is True; it must be"),
    ("lm", {"attention_pattern": "local", "mixer": "dense_synthesizer"}, "attention_pattern is"),
    ("lm", {"attention_pattern": "local", "mixer": "random_synthesizer"}, "attention_pattern is"),
    ("evolved_transformer", {"attention_pattern": "local"}, "attention_pattern is"),
    ("evolved_transformer", {"feed_forward": "none"}, "feed_forward is 'none'; it must"),
]

TOTALS = [
    ("small_evolved_transformer", {}, None, 38_062_848),
    ("medium_evolved_transformer", {}, None, 109_620_480),
]

WITHOUT_TRANSFORMERS = [("tiny_primer", {}, "family primer .* --custom_code")]

WITHOUT_CUSTOM_CODE = [
    ("tiny_synthesizer", {}, "no primer model with .*mixer random_synthesizer"),
    ("tiny_primer_ez", {"upstream_compat": True}, "no primer model with upstream_compat True$"),
    ("tiny_evolved_transformer", {}, "no model of family evolved_transformer"),
]

CUSTOM_CODE = ["lm_of_pieces", "vanilla", "primer_ez", "primer", "plusplus"]

FOLDED = {
    "shared": {"family": "primer", "num_encoder_layers": 0, "num_decoder_layers": 2,
        "mixer": "mdha_shared_qk"},
}  # fmt: skip

EXPORTED = {
    "lm_of_pieces": ModelConfig(
        family="lm", mixer="mdha", norm="layer_norm", mlp_activations=("squared_relu",), **DECODER
    ),
    "vanilla": ModelConfig(family="primer", **DECODER),
    "primer_ez": replace(model_preset("mini_primer_ez"), **DECODER | {"num_decoder_layers": 2}),
    "primer": replace(model_preset("mini_primer"), **DECODER | {"num_decoder_layers": 2}),
    "primer_as_released": replace(model_preset("mini_primer_as_released"), **DECODER),
    "plusplus": replace(model_preset("mini_transformer_plusplus"), **DECODER),
}

SHARDED = dict.fromkeys(
    (
        *("tiny_primer", "tiny_primer_ez", "tiny_transformer_plusplus"),
        *("tiny_evolved_transformer", "tiny_synthesizer", "tiny_synthesizer_dense"),
    ),
    (),
)

# Of one kind of cache each; and a prefix that sees itself.
DECODED_FAST = [
    *(("tiny_primer", prefix) for prefix in (False, True)),
    *(("tiny_evolved_transformer", False), ("tiny_synthesizer", False)),
    ("tiny_synthesizer_dense", True),
]
DECODED_PIECES = {
    "upstream_synthesizer": ("tiny_synthesizer", {"upstream_compat": True}),
    "upstream_dense": ("tiny_synthesizer_dense", {"upstream_compat": True}),
    "upstream_evolved": ("tiny_evolved_transformer", {"upstream_compat": True}),
}

MICROBATCHES = [
    ("tiny_primer", "sum"),
    *((f"tiny_{name}", "total") for name in ("evolved_transformer", "primer_ez", "synthesizer")),
    *((f"tiny_{name}", "total") for name in ("synthesizer_dense", "transformer_plusplus")),
]

PRESETS_OF_CUSTOM_CODE = ["tiny_primer"]
