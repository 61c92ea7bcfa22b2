"""Presets of the models that the Primer paper compares, under the paper's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config.presets import T5_VOCAB_SIZE, decoder, model_preset
from trainer.model.config import ModelConfig
from trainer.model.registry import SLOTS


class _Size(NamedTuple):
    """Sizes of a model; `gated_mlp_dim` is the `mlp_dim` used with gated activations."""

    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    gated_mlp_dim: int
    layers: int
    evolved_blocks: int | None


# Source: google-research/primer, `gin/models/*.gin`; tiny and mini are our own, for tests and CPUs.
_SIZES = {
    "tiny": _Size(16, 2, 8, 32, 20, 2, 1),
    "mini": _Size(128, 4, 32, 512, 340, 4, 3),
    "small": _Size(512, 8, 64, 2048, 1364, 6, 4),
    "medium": _Size(768, 12, 64, 3072, 2048, 12, 7),
    "large": _Size(1024, 16, 64, 8192, 5462, 24, None),
}
_PRIMER = {
    "mlp_activations": ("squared_relu",),
    "mixer": "mdha_shared_qk",
    "norm": "primer_norm",
}
# Unlike the paper, the released code does not alternate norms: an argument in Mesh TensorFlow
# overrides the gin binding.
_VARIANTS: dict[str, dict[str, Any]] = {
    "transformer_vanilla": {"mlp_activations": ("relu",)},
    "transformer_gelu": {"mlp_activations": ("gelu",)},
    "transformer_swish": {"mlp_activations": ("silu",)},
    "transformer_squared_relu": {"mlp_activations": ("squared_relu",)},
    "transformer_reglu": {"mlp_activations": ("relu", "linear")},
    "transformer_swiglu": {"mlp_activations": ("silu", "linear")},
    "transformer_plusplus": {"mlp_activations": ("silu", "linear"), "norm": "rms_norm"},
    "transformer_mdha": {"mlp_activations": ("relu",), "mixer": "mdha"},
    "primer_ez": {"mlp_activations": ("squared_relu",), "mixer": "mdha"},
    "primer": {**_PRIMER, "norm_placement": "primer_alternating"},
    "primer_as_released": _PRIMER,
}
# Models of size "medium", under upstream's names: 32 experts in every fourth layer; 8 heads of 128.
_EXPERTS = {"feed_forward": "switch:experts=32"}
_SYNTHESIZER = {"num_heads": 8, "head_dim": 128, "mixer": "random_synthesizer"}
_OTHERS: dict[str, dict[str, Any]] = {
    "switch_transformer": {"mlp_activations": ("relu",), **_EXPERTS},
    "switch_primer": {"mlp_activations": ("squared_relu",), "mixer": "mdha", **_EXPERTS},
    "synthesizer": {"mlp_activations": ("relu",), **_SYNTHESIZER},
    "synthesizer_squared_relu": {"mlp_activations": ("squared_relu",), **_SYNTHESIZER},
    "synthesizer_dense": {
        "mlp_activations": ("relu",),
        **_SYNTHESIZER,
        "mixer": "dense_synthesizer",
    },
}


def primer_presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), such as `small_primer_ez`; sizes tiny and mini are our own."""
    yield from _of_t5()
    for size_name, size in _SIZES.items():
        heads = size.num_heads, size.num_heads, size.head_dim
        vanilla = decoder("primer", T5_VOCAB_SIZE, size.emb_dim, *heads, size.mlp_dim, size.layers)
        for name, changes in _VARIANTS.items():
            gated = len(changes["mlp_activations"]) > 1
            mlp_dim = size.gated_mlp_dim if gated else size.mlp_dim
            yield f"{size_name}_{name}", replace(vanilla, mlp_dim=mlp_dim, **changes)
        if size.evolved_blocks:
            yield (
                f"{size_name}_evolved_transformer",
                replace(
                    vanilla, family="evolved_transformer", num_decoder_layers=size.evolved_blocks
                ),
            )
        for name, changes in _OTHERS.items():
            if "feed_forward" in changes and "switch" not in SLOTS["feed_forward"]:
                continue  # experts are another annex's
            if size_name == "medium":
                yield name, replace(vanilla, **changes)
            elif size_name in ("tiny", "mini"):
                own = {**changes, "num_heads": size.num_heads, "head_dim": size.head_dim}
                if "feed_forward" in changes:
                    own["feed_forward"] = "switch:experts=4,every=2"
                yield f"{size_name}_{name}", replace(vanilla, **own)


def _of_t5() -> Iterator[tuple[str, ModelConfig]]:
    """Yields T5 1.1 with Primer-EZ's two changes.

    The MLP is 3/2 as wide, for as many parameters as if gated.
    """
    for size in ("tiny", "mini", "small", "base"):
        t5 = model_preset(f"t5_1_1_{size}")
        width = t5.mlp_dim * 3 // 2
        model = replace(t5, mlp_activations=("squared_relu",), mixer="mdha", mlp_dim=width)
        yield f"t5_1_1_{size}_primer_ez", model
