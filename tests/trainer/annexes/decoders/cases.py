"""Rows that decoders adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import (
    DECODER,
    DEFAULT,
    LINEAR,
    ORIGINAL,
    SCALED,
    THEIR_DECODER,
    YARN,
)
from trainer.model.config import ModelConfig

ON_THE_HUB = {
    "qwen2_0.5b": 494_032_768, "qwen2_1.5b": 1_543_714_304, "qwen2_7b": 7_615_616_512,
    "qwen3_0.6b": 596_049_920, "qwen3_8b": 8_190_735_360, "mistral_7b": 7_241_732_096,
    "olmo2_1b": 1_484_916_736,
}  # fmt: skip

WITHOUT_TRANSFORMERS = [("gpt2_small", {"num_heads": 7}, "emb_dim 768 is not divisible by 7 heads")]

LOADED = ["gpt2"]

FLAX_READ = ["gpt2"]


def _without_beginning(tensors):
    return {name.removeprefix("transformer."): each for name, each in tensors.items()}


OTHER_NAMES = [("gpt2", _without_beginning)]

UNSUPPORTED_FIELDS = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True; our")
]

FIELDS_ON_THE_HUB = {
    "gpt2": {"n_ctx": 1024, "summary_type": "cls_index", "_num_labels": 1, "id2label": {"0": "A"}}
}

CONFIGS_ON_THE_HUB = {
    "qwen2_0.5b": {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936},
}  # fmt: skip

EXPORTED = {"gpt2": ModelConfig(family="gpt2", max_positions=64, **DECODER | {"head_dim": 8})}

SHAPES = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 384}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)),
    "qwen2": ("Qwen2", THEIR_DECODER),
    "qwen2, windows": ("Qwen2", THEIR_DECODER
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", THEIR_DECODER | {"head_dim": 12, "attention_bias": True}),
    "mistral": ("Mistral", THEIR_DECODER | {"head_dim": 12, "sliding_window": 5}),
    "olmo2": ("Olmo2", THEIR_DECODER | {"rms_norm_eps": 1e-5}),
    "qwen3, yarn": ("Qwen3", THEIR_DECODER | {"head_dim": 12, "rope_parameters": YARN}),
    "qwen2, yarn": ("Qwen2", THEIR_DECODER
        | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.7, "truncate": False}}),
}  # fmt: skip
ARCHITECTURES = {"GPT2": "GPT2LMHeadModel"}

NAMES_IN_TRANSFORMERS = ["gpt2"]

SPELLINGS = [
    ("qwen3", {"rope_scaling": SCALED, "rope_parameters": DEFAULT}),
    ("qwen3", {"rope_scaling": {**LINEAR, "rope_theta": 500.0}, "rope_parameters": None}),
    ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": DEFAULT}),
    ("qwen2", {"rope_scaling": DEFAULT, "rope_parameters": YARN}),
    ("qwen3, yarn", {"rope_parameters": {**YARN, ORIGINAL: None}, ORIGINAL: None}),
    ("qwen3, yarn", {"rope_parameters": {**YARN, ORIGINAL: None}, ORIGINAL: 8}),
    ("mistral", {"rope_scaling": None, "attention_bias": False}),
]

CONTRADICTIONS = [
    ("qwen3", {"rope_scaling": SCALED, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
     "rope_scaling replaces rope_parameters, so the base is 10000 and not 1e\\+06: move"),
    ("qwen3", {"rope_parameters": {**DEFAULT, "factor": 4.0}}, "of kind default with factor"),
    ("qwen3", {"rope_scaling": {**LINEAR, "type": "yarn"}}, "rope_type linear and type yarn"),
    ("qwen3, yarn", {ORIGINAL: 7}, f"{ORIGINAL} is 7 beside rotary positions with 16"),
    ("qwen3", {ORIGINAL: 7}, f"{ORIGINAL} is 7: this field is unknown"),
    ("mistral", {"attention_bias": True}, "attention_bias is True; our models have False"),
]  # fmt: skip

# Shapes whose fields get values of other types.
OTHER_TYPES = ["qwen3, yarn"]

# Shapes of tests that are not slow.
FEW_SHAPES = ["qwen2, windows", "olmo2"]

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["qwen", "mistral_", "olmo2_"]
