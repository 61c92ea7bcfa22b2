"""Rows that t5_experiments adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"mixer": "cdq"}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq:conditional_heads=3", "num_heads": 4}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq:conditional_heads=0"}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq", "query_key_norm": True}, "query_key_norm is .*must be"),
    ("t5_1_0", {"mixer": "cdq", "num_kv_heads": 1}, "num_kv_heads is .*must be"),
    ("t5_1_0", {"attention": "pallas"} | {"mixer": "cdq", "head_dim": 64}, "mixer is .*must be"),
    ("bert", {"memory_tokens": 3}, "memory_tokens is .*must be"),
    ("lm", {"memory_tokens": 3}, "memory_tokens is .*must be"),
    ("t5_1_0", {"memory_tokens": -1}, "memory_tokens is .*must be"),
]

UNSUPPORTED_FIELDS = [
    ("t5_1_1", {"encoder_self_attention_layer": "cdQ"}, "self_attention_layer is cdQ, not"),
]
