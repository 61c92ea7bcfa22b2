"""Rows that switch adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import THEIR_T5

REFUSED = [
    ("lm", {"num_experts": 4, "scan_layers": True}, "scan_layers is True; it must be"),
    ("lm", {"expert_capacity": 4}, "expert_capacity is 4; it must be unset without num_experts"),
    ("lm", {"num_experts": 4, "expert_capacity": 0}, "expert_capacity is 0; it must be above 0"),
    ("bert", {"num_experts": 4}, "num_experts is 4; it must be 0 in an encoder-only"),
    ("t5_1_0", {"feed_forward": "none", "num_experts": 2}, "num_experts is 2"),
]

TOTALS = [
    ("switch_base_8", {}, 222_903_552 + 12 * (7 * 2 * 768 * 3072 + 768 * 8), None),
]

SWITCH = THEIR_T5 | {"num_experts": 4, "expert_capacity": 7, "router_jitter_noise": 0.0}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
SHAPES = {
    "switch": ("SwitchTransformers", SWITCH),
    "switch, everywhere": (
        "SwitchTransformers",
        SWITCH
        | {"num_layers": 3, "num_sparse_encoder_layers": 3}
        | {"num_sparse_decoder_layers": 2, "dense_act_fn": "silu"},
    ),
}
ARCHITECTURES = {"SwitchTransformers": "SwitchTransformersForConditionalGeneration"}

# Shapes whose fields get values of other types.
OTHER_TYPES = ["switch"]

SCANNED_WINDOWS = {
    "lm": {"num_decoder_layers": 5, "num_experts": 2, "switch_every": 1},
}

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["switch_base_", "switch_large_"]
