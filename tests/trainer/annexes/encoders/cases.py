"""Rows that encoders adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import THEIR_ENCODER

CONFIGS_ON_THE_HUB = {
    "roberta_base": {"architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "type_vocab_size": 1, "vocab_size": 50265},
    "modernbert_base": {"architectures": ["ModernBertForMaskedLM"],
        **dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), False),
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768,
        "initializer_cutoff_factor": 2.0, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
        "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
        "mlp_dropout": 0.0, "model_type": "modernbert", "norm_eps": 1e-05,
        "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
        "position_embedding_type": "absolute", "tie_word_embeddings": True, "vocab_size": 50368},
}  # fmt: skip

ENCODERS_LACK = [
    ("roberta_base", {"hidden_act": "relu"}, "hidden_act is relu"),
    ("roberta_base", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("roberta_base", {"is_decoder": True}, "is_decoder"),
    ("roberta_base", {"pad_token_id": None}, "no field pad_token_id"),
    ("modernbert_base", {"decoder_bias": False}, "decoder_bias"),
    ("modernbert_base", {"classifier_activation": "relu"}, "classifier_activation"),
    ("modernbert_base", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
    (
        "modernbert_base",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention have factor",
    ),
    ("modernbert_base", {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
]

ROBERTA = THEIR_ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
ROBERTA |= {"max_position_embeddings": 66, "hidden_dropout_prob": 0.0}
ROBERTA |= {"attention_probs_dropout_prob": 0.0}
MODERNBERT = THEIR_ENCODER | {
    "local_attention": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SHAPES = {
    "roberta": ("Roberta", ROBERTA),
    "roberta, untied": ("Roberta", ROBERTA | {"tie_word_embeddings": False, "pad_token_id": 0}),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert, biases": ("ModernBert", MODERNBERT
        | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
        | {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 3}),
}  # fmt: skip
ARCHITECTURES = {"Roberta": "RobertaForMaskedLM", "ModernBert": "ModernBertForMaskedLM"}

# Shapes whose fields get values of other types.
OTHER_TYPES = ["roberta"]

# Shapes of tests that are not slow.
LEARNING_SHAPES = ["roberta", "modernbert"]

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["roberta", "modernbert"]
