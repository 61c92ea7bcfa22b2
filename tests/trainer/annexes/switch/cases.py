"""Rows that switch adds to tables of the core's tests."""

from tests.trainer.huggingface.sizes import THEIR_T5

REFUSED = [
    ("lm", {"feed_forward": "switch", "scan_layers": True}, "scan_layers is True; it must be"),
    ("lm", {"feed_forward": "switch:capacity=0"}, "feed_forward is .*capacity is above 0"),
    ("lm", {"feed_forward": "switch:experts=0"}, "feed_forward is .*experts is above 0"),
    (
        "bert",
        {"feed_forward": "switch"},
        "feed_forward is .*one without experts in an encoder-only",
    ),
    ("lm", {"feed_forward": "switch:every=1", "mlp_bias": True}, "mlp_bias is True; .*no bias"),
]

TOTALS = [("switch_base_8", {}, 222_903_552 + 12 * (7 * 2 * 768 * 3072 + 768 * 8), None)]

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

SCANNED_WINDOWS = {"lm": {"num_decoder_layers": 5, "feed_forward": "switch:experts=2,every=1"}}

# Presets that transformers has, too.
BEGINNINGS_OF_PRESETS = ["switch_base_", "switch_large_"]

SCANNED = {"lm": {"num_decoder_layers": 3, "feed_forward": "switch:experts=2,every=1"}}

WITHOUT_CUSTOM_CODE = [
    (
        *("lm_tiny", {"feed_forward": "switch:experts=4,every=2"}),
        "no lm model with feed_forward switch:experts=4,every=2$",
    )
]

SHARDED = {"lm_tiny": ("--model.feed_forward=switch:experts=4,every=1",)}
