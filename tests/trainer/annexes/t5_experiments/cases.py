"""Rows that t5_experiments adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"mixer": "cdq"}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq:conditional_heads=3", "num_heads": 4}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq:conditional_heads=0"}, "mixer is .*must be"),
    ("t5_1_0", {"mixer": "cdq", "query_key_norm": True}, "query_key_norm is .*must be"),
    ("t5_1_0", {"mixer": "cdq", "num_kv_heads": 1}, "num_kv_heads is .*must be"),
    (
        "t5_1_0",
        {"attention": "dot_product"} | {"mixer": "cdq", "head_dim": 64},
        "mixer is .*must be",
    ),
    ("bert", {"stack_parts": "memory_tokens"}, "stack_parts is .*without both stacks"),
    ("lm", {"stack_parts": "memory_tokens"}, "stack_parts is .*without both stacks"),
    ("t5_1_0", {"stack_parts": "memory_tokens:count=0"}, "stack_parts is .*above 0"),
]

UNSUPPORTED_FIELDS = [
    ("t5_1_1", {"encoder_self_attention_layer": "cdQ"}, "self_attention_layer is cdQ, not")
]

OPTIMIZER_SEEDS = {
    # yurakuratov/t5-experiments, README's commands; betas and epsilon: torch.optim.AdamW.
    "t5_experiments_t5": {
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 5e-5, "optimizer.beta1": 0.9},
        **{"optimizer.beta2": 0.999, "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 1e-5},
        **{"optimizer.clip_norm": None, "loss.normalizer": "num_real_target_tokens"},
        **{"optimizer.no_weight_decay": (), "loss.z_loss": 0},
    },
    # `run_bert_pretraining.py` and `tests/test_bert_pretrain_train_valid.sh` there.
    "t5_experiments_bert": {
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 3e-4, "optimizer.beta1": 0.9},
        **{"optimizer.beta2": 0.999, "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0},
        **{"optimizer.clip_norm": None, "loss.normalizer": "num_real_target_tokens"},
        "loss.z_loss": 0,
    },
}
OPTIMIZER_RATES = {
    "t5_experiments_t5": {0: 5e-5, 1_099_999: 5e-5},
    "t5_experiments_bert": {0: 3e-4, 999_999: 3e-4},
}

SHARDED = {
    "t5_1_0_tiny": ("--model.mixer=cdq",),
    "t5_1_1_tiny": (
        "--model.mixer=cdq:conditional_heads=2",
        "--model.stack_parts=memory_tokens:count=3",
    ),
}

IN_BFLOAT16 = [
    {"model": "t5_1_0"}
    | {"mixer": "cdq:conditional_heads=1", "stack_parts": "memory_tokens:count=2"}
]
