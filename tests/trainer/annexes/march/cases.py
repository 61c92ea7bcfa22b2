"""Rows that march adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"norm": "post"}, "norm is 'post'; it must be one of 'dynamic_tanh'"),
    ("t5_1_0", {"feed_forward": "mixd"}, "feed_forward is 'mixd'; it must be one of"),
    (
        *("t5_1_0", {"feed_forward": "mixed", "mlp_activations": ("silu",)}),
        "mlp_activations is .'silu',.; it must be None with feed_forward 'mixed'",
    ),
    ("t5_1_0", {"feed_forward": "mixed:sigmoid_dropout=0.5"}, "dropout_rate is 0.0"),
    ("lm", {"stack_parts": "token_dropping"}, "stack_parts is .*without token_dropping in fam"),
    ("t5_1_0", {"stack_parts": "token_dropping", "scan_layers": True}, "scan_layers is True"),
    ("t5_1_0", {"stack_parts": "token_dropping", "attention": "dot_product"}, "attention is 'dot"),
    ("t5_1_0", {"stack_parts": "halves+halves"}, "stack_parts is .*joined by ., each once"),
    (
        *("t5_1_0", {"cross_attention": "encoder_keys", "num_encoder_layers": 2}),
        "num_decoder_layers is 1; it must be num_encoder_layers, 2",
    ),
    ("t5_1_0", {"cross_attention": "layerwise", "scan_layers": True}, "scan_layers"),
    ("t5_1_0", {"stack_parts": "halves:first=1.3"}, "stack_parts is .* times 1.3 is"),
    ("t5_1_0", {"stack_parts": "halves", "scan_layers": True}, "scan_layers is True"),
    ("t5_1_0", {"mixer": "summed_heads:group=3"}, "num_heads is 2; it must be a multiple"),
    ("t5_1_0", {"stack_parts": "database_entries:count=-1"}, "stack_parts is .*count is above 0"),
]

WITHOUT_TRANSFORMERS = [
    ("llama_tiny_dynamic_tanh", {}, "no llama model with norm dynamic_tanh$"),
    ("t5_1_0_tiny", {"mixer": "values_relu"}, "mixer values_relu"),
    ("t5_1_0_tiny", {"stack_parts": "token_dropping"}, "stack_parts token_dropping"),
    ("t5_1_0_tiny", {"cross_attention": "layerwise"}, "cross_attention layerwise"),
    ("t5_1_0_tiny", {"stack_parts": "database_entries"}, "stack_parts database_entries"),
    ("t5_1_0_tiny", {"stack_parts": "halves"}, "stack_parts halves"),
    ("t5_1_0_tiny", {"norm_placement": "pre_without_mixer_residual"}, "norm_placement pre_wit"),
]

WRITTEN_OUT = {
    "dynamic tanh": ({"norm": "dynamic_tanh:alpha=0.25"}, {"norm": ("dynamic_tanh", 0.0, "vector")})
}

OPTIMIZER_SEEDS = {
    # bri25yu/march, `config/default_training_arguments.json`; README.
    "march": {
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 1e-4, "optimizer.beta1": 0.9},
        **{"optimizer.beta2": 0.95, "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0.1},
        **{"optimizer.clip_norm": 1.0, "loss.normalizer": "num_real_target_tokens"},
        "loss.z_loss": 0,
    }
}
OPTIMIZER_RATES = {"march": {0: 1e-4, 14_999: 1e-4}}

DECODED_FAST = [("march_unified_attention", False)]
