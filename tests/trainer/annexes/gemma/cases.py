"""Rows that gemma adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import DECODER, LINEAR, SCALED, THEIR_DECODER
from trainer.model.config import ModelConfig

REFUSED = [
    ("lm", {"cross_attention": "merged"}, "cross_attention is 'merged'; it must be 'att"),
    (
        *("t5_1_0", {"cross_attention": "merged", "position": "rotary:scaling=yarn"}),
        "position .*with cross=true",
    ),
]

ON_THE_HUB = {
    "gemma2_2b": 2_614_341_888, "gemma2_9b": 9_241_705_984, "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176, "gemma3_1b": 999_885_952, "t5gemma_small": 312_517_632,
    "t5gemma_base": 591_490_560, "t5gemma_2b_2b": 5_596_853_760, "t5gemma_9b_2b": 12_292_375_296,
}  # fmt: skip

WITHOUT_TRANSFORMERS = [("t5_1_0_tiny", {"cross_attention": "merged"}, "cross_attention merged")]

NAMES_IN_TRANSFORMERS = ["gemma"]

LOADED = ["gemma"]

UNSUPPORTED_FIELDS = [
    ("gemma", {"head_dim": None}, "has no field head_dim"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma", {"hidden_activation": "silu"}, "hidden_activation is silu"),
]

FIELDS_ON_THE_HUB = {"gemma": {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}}

CONFIGS_ON_THE_HUB = {
    "gemma2_2b": {"architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000},
}  # fmt: skip

FOLDED = {
    "gemma": {"family": "gemma", "num_encoder_layers": 0, "num_decoder_layers": 2,
        "num_kv_heads": 2},
}  # fmt: skip

EXPORTED = {"gemma": ModelConfig(family="gemma", num_kv_heads=1, **DECODER)}

GEMMA = THEIR_DECODER | {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20}
T5GEMMA = {
    stack: {
        **{**GEMMA, "num_hidden_layers": layers},
        **{"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    }
    for stack, layers in (("encoder", 2), ("decoder", 3))
} | {"vocab_size": 384}
GEMMA3 = GEMMA | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
T5GEMMA2 = {
    "encoder": {"text_config": GEMMA3 | {"sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model",
        **dict.fromkeys(("hidden_size", "intermediate_size"), 4),
        **dict.fromkeys(("image_size", "patch_size", "num_attention_heads"), 2),
        "num_hidden_layers": 1}, "mm_tokens_per_image": 1},
    "decoder": GEMMA3 | {"sliding_window": 8},
    "vocab_size": 384,
}  # fmt: skip
UNEQUAL = {
    "encoder": T5GEMMA["encoder"]
    | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    | {"intermediate_size": 40, "head_dim": 10},
    "decoder": T5GEMMA["decoder"],
    "vocab_size": 384,
}
SHAPES = {
    "gemma": ("Gemma", THEIR_DECODER | {"head_dim": 12}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "t5gemma": ("T5Gemma", T5GEMMA | {"tie_word_embeddings": False}),
    "t5gemma, tied, no windows": ("T5Gemma", T5GEMMA
        | {stack: T5GEMMA[stack] | {"layer_types": ["full_attention"] * layers} for stack,
        layers in (("encoder", 2), ("decoder", 3))}),
    "t5gemma, stacks of other sizes": ("T5Gemma", UNEQUAL),
    "t5gemma2": ("T5Gemma2", T5GEMMA2),
    "t5gemma2, untied": ("T5Gemma2", T5GEMMA2 | {"tie_word_embeddings": False}),
}  # fmt: skip
ARCHITECTURES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "T5Gemma": "T5GemmaForConditionalGeneration",
    "T5Gemma2": "T5Gemma2ForConditionalGeneration",
}

SPELLINGS = [
    ("gemma2", {"rope_scaling": LINEAR}),
    ("gemma2", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma3_text", {"rope_scaling": LINEAR}),
    ("gemma3_text", {"hidden_act": "relu", "hidden_activation": None}),
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    ("gemma3_text", {"_sliding_window_pattern": 2}),
    ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 6}),
]

CONTRADICTIONS = [
    ("gemma3_text", {"rope_scaling": {"type": "yarn", "factor": 2.0}},
     "rope_type linear and type yarn"),
    ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters has factor beside full_att"),
    ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
     "rope_type default and type linear"),
    ("gemma3_text", {"rope_parameters": None, "rope_scaling": {**SCALED, "truncate": False}},
     "truncate False, which transformers ignores"),
    ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 2},
     "_sliding_window_pattern is 2; our models have 6"),
]  # fmt: skip

# Shapes whose fields get values of other types.
OTHER_TYPES = ["gemma3_text", "t5gemma2"]

# Shapes of tests that are not slow.
FEW_SHAPES = ["gemma3_text", "t5gemma", "t5gemma2"]

SCANNED_WINDOWS = {"gemma": {"num_decoder_layers": 7, "position": "rotary", "remat": "full"}}

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["gemma2_", "gemma3_", "t5gemma"]
