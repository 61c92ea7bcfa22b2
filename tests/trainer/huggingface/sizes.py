"""Sizes of small models: ours, and in transformers' fields."""

SIZES = {"emb_dim": 32, "num_heads": 4, "head_dim": 24, "mlp_dim": 64, "vocab_size": 384}
# num_heads * head_dim differs from emb_dim, so no kernel is square. One layer makes tests fast.
T5 = SIZES | {"num_encoder_layers": 1, "num_decoder_layers": 1}
DECODER = SIZES | {"num_encoder_layers": 0, "num_decoder_layers": 1}
THEIR_SIZES = {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
THEIR_DECODER = THEIR_SIZES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
THEIR_ENCODER = {
    name: each for name, each in THEIR_DECODER.items() if name != "num_key_value_heads"
}
THEIR_T5 = THEIR_SIZES | {
    **{"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2},
    **{"num_heads": 4, "dropout_rate": 0.0, "initializer_factor": 0.5, "decoder_start_token_id": 0},
    **{"relative_attention_num_buckets": 16, "relative_attention_max_distance": 30},
}
# Fields of rotary positions.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0},
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ORIGINAL = "original_max_position_embeddings"
SCALED = {name: value for name, value in YARN.items() if name != "rope_theta"}
