"""Presets of MARCH, a zoo of T5 variants on C4 (2023), under similar names.

Sizes missing from MARCH's records are ours; docs/seeds.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainer.config.presets import T5_VOCAB_SIZE, model_preset
from trainer.model.config import ModelConfig
from trainer.model.registry import SLOTS

_HEAD_DIM = 64


def _v1(emb_dim: int = 768, layers: int = 24, scale: float = 4) -> ModelConfig:
    """Returns the first baseline, T5 1.0; `layers` is the total of both stacks."""
    return ModelConfig(
        family="t5_1_0",
        vocab_size=T5_VOCAB_SIZE,
        emb_dim=emb_dim,
        num_heads=emb_dim // _HEAD_DIM,
        head_dim=_HEAD_DIM,
        mlp_dim=int(emb_dim * scale),
        num_encoder_layers=layers // 2,
        num_decoder_layers=layers // 2,
        dropout_rate=0.1,
    )


def _v2(emb_dim: int = 896, layers: int = 8, scale: float = 8 / 3) -> ModelConfig:
    """Returns the second baseline, with `layers` in each stack."""
    mlp_dim = round(emb_dim * scale / _HEAD_DIM) * _HEAD_DIM
    return replace(
        _v1(emb_dim),
        mlp_dim=mlp_dim,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        dropout_rate=0.0,
        position="rotary:cross=true",
        attention_scale=_HEAD_DIM**-0.5,
        mlp_activations=("silu", "linear"),
    )


# Sizes of the first baseline: emb_dim, total layers of both stacks, mlp_dim / emb_dim.
_SIZES = {
    "v1": (768, 24, 4),
    "v1_small": (512, 12, 4),
    "v1_large": (1024, 48, 4),
    "layers18": (768, 18, 4),
    "layers30": (768, 30, 4),
    "dim512": (512, 24, 4),
    "dim1024": (1024, 24, 4),
    "ff2": (768, 24, 2),
    "ff8": (768, 24, 8),
    "dim640_layers30": (640, 30, 4),
    "dim832_layers18": (832, 18, 4),
    "dim2304_layers2": (2304, 2, 4),
}
_GATED = 8 / 3
# Variants with other parts: mlp_dim / emb_dim, and changes to the first baseline.
_VARIANTS: dict[str, tuple[float, dict[str, Any]]] = {
    "reglu": (_GATED, {"mlp_activations": ("relu", "linear")}),
    "geglu": (_GATED, {"mlp_activations": ("gelu_erf", "linear")}),
    "swiglu": (_GATED, {"mlp_activations": ("silu", "linear")}),
    "absolute": (4, {"position": "absolute"}),
    "no_ff": (4, {"feed_forward": "none"}),
    "no_ff_dim1088": (4, {"feed_forward": "none", "emb_dim": 1088}),
    "values_relu": (4, {"feed_forward": "none", "mixer": "values_relu"}),
    "values_relu_first_ff": (4, {"feed_forward": "none", "mixer": "values_relu:kernels=1"}),
    "mixed": (_GATED, {"feed_forward": "mixed"}),
    "mixed_sum": (_GATED, {"feed_forward": "mixed:mean=false"}),
    "mixed_dropout": (_GATED, {"feed_forward": "mixed:sigmoid_dropout=0.5"}),
    "fcabs": (4, {"stack_parts": "token_dropping:count=8"}),
    "fcabs32": (4, {"stack_parts": "token_dropping:count=32"}),
    "unified_attention": (4, {"cross_attention": "merged"}),
    "encoder_keys": (4, {"cross_attention": "encoder_keys"}),
    "layerwise": (4, {"cross_attention": "layerwise"}),
    "database": (4, {"stack_parts": "database_entries:count=768"}),
    "scaling_heads": (4, {"stack_parts": "halves"}),
    "scaling_heads_inverse": (4, {"stack_parts": "halves:first=0.5,second=1.5"}),
    "scaling_heads_constant": (4, {"stack_parts": "halves:first=2,constant=true"}),
    "big_heads": (4, {"head_dim": 128}),
    "big_heads_summed": (4, {"head_dim": 128, "mixer": "summed_heads"}),
    "tp_weights": (4, {"mixer": "role_attention"}),
    "tp_embeddings": (4, {"mixer": "role_attention:vectors=100"}),
    "sparse_seqlen": (4, {"norm_placement": "pre_without_mixer_residual"}),
}
# The second baseline's families of similar parameter counts: by emb_dim and layers per stack;
_DIMS_AND_LAYERS = (
    *((2304, 1), (1728, 2), (1408, 3), (1216, 4), (1152, 5), (1024, 6), (960, 7), (832, 9)),
    *((832, 10), (768, 11), (768, 12), (704, 13), (704, 14), (640, 15)),
)
# by mlp_dim / emb_dim and layers per stack;
_SCALES_AND_LAYERS = (
    *((38, 1), (18, 2), (11, 3), (8, 4), (6, 5), (4.5, 6), (3.5, 7), (3, 8), (2.5, 9), (2, 10)),
    *((1.5, 11), (1.25, 12), (1, 13), (0.75, 14), (0.5, 15)),
)
# and by emb_dim and mlp_dim / emb_dim.
_DIMS_AND_SCALES = ((1280, 0.25), (1216, 0.5), (1088, 1), (960, 2), (832, 4), (640, 8))
# Models that also have a version for CPUs, such as `mini_march_v1`: a quarter as wide and a third
# as deep. These are ours; they keep the models' proportions and order of parameter counts.
_MINI = (
    *("v1", "v2", "layers18", "layers30", "dim512", "dim1024", "ff2", "ff8"),
    *("dim640_layers30", "dim832_layers18", "dim2304_layers2", "reglu", "geglu", "swiglu"),
)


def march_presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), such as `march_v2_dim2304_layers1`."""
    found = dict(_full_size())
    yield from found.items()
    for name in _MINI:
        yield f"mini_march_{name}", _mini(found[f"march_{name}"])
    # Source: Zhu et al. 2025 (arXiv:2503.10622), section 5: Llama, dynamic tanh in place of norms.
    for size in ("tiny", "7b"):
        llama = model_preset(f"llama_{size}")
        yield f"llama_{size}_dynamic_tanh", replace(llama, norm="dynamic_tanh")


def _mini(model: ModelConfig) -> ModelConfig:
    head_dim = _HEAD_DIM // 4
    return replace(
        model,
        emb_dim=model.emb_dim // 4,
        head_dim=head_dim,
        mlp_dim=model.mlp_dim // 4,
        num_encoder_layers=-(-model.num_encoder_layers // 3),
        num_decoder_layers=-(-model.num_decoder_layers // 3),
        attention_scale=model.attention_scale and head_dim**-0.5,
    )


def _full_size() -> Iterator[tuple[str, ModelConfig]]:
    for name, sizes in _SIZES.items():
        yield f"march_{name}", _v1(*sizes)
    for name, (scale, changes) in _VARIANTS.items():
        if changes.get("cross_attention", "layerwise") not in SLOTS["cross_attention"]:
            continue  # "merged" is another annex's
        emb_dim = changes.get("emb_dim", 768)
        model = _v1(emb_dim, scale=scale)
        yield f"march_{name}", replace(model, **changes)
    both = _v1()
    yield (
        "march_decoder",
        replace(
            both,
            family="lm",
            mlp_activations=("relu",),
            num_encoder_layers=0,
            num_decoder_layers=both.num_encoder_layers + both.num_decoder_layers,
        ),
    )
    yield "march_v2", _v2()
    for emb_dim, layers in _DIMS_AND_LAYERS:
        yield f"march_v2_dim{emb_dim}_layers{layers}", _v2(emb_dim, layers)
    for scale, layers in _SCALES_AND_LAYERS:
        yield f"march_v2_ff{_word(scale)}_layers{layers}", _v2(896, layers, scale)
    for emb_dim, scale in _DIMS_AND_SCALES:
        yield f"march_v2_dim{emb_dim}_ff{_word(scale)}", _v2(emb_dim, 8, scale)


def _word(scale: float) -> str:
    return f"{scale:g}".replace(".", "p")
