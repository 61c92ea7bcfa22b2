"""Models by name, and what a configuration costs: parameters and floating-point operations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import jax
import jax.numpy as jnp

from trainer.model.spec import ModelConfig, model_spec
from trainer.model.transformer import init_params

# 32,000 pieces and 100 sentinels, rounded up to a multiple of 128.
T5_VOCAB_SIZE = 32_128
# Source: T5X, `examples/t5/mt5/base.gin`.
MT5_VOCAB_SIZE = 250_112


def _encoder_decoder(
    family: str, emb_dim: int, num_heads: int, head_dim: int, mlp_dim: int, num_layers: int
) -> ModelConfig:
    """As many encoder as decoder layers."""
    return ModelConfig(
        family=family,
        vocab_size=T5_VOCAB_SIZE,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_encoder_layers=num_layers,
        num_decoder_layers=num_layers,
    )


# Columns: emb_dim, num_heads, head_dim, mlp_dim, layers of each stack.
# Source: T5X, `examples/t5/t5_1_0/*.gin` and `examples/t5/t5_1_1/*.gin`; 1.0's tiny is 1.1's.
_T5_1_0 = {
    "tiny": _encoder_decoder("t5_1_0", 8, 4, 3, 16, 2),
    "small": _encoder_decoder("t5_1_0", 512, 8, 64, 2048, 6),
    "base": _encoder_decoder("t5_1_0", 768, 12, 64, 3072, 12),
    "large": _encoder_decoder("t5_1_0", 1024, 16, 64, 4096, 24),
    "3b": _encoder_decoder("t5_1_0", 1024, 32, 128, 16_384, 24),
    "11b": _encoder_decoder("t5_1_0", 1024, 128, 128, 65_536, 24),
}
_T5_1_1 = {
    "tiny": _encoder_decoder("t5_1_1", 8, 4, 3, 16, 2),
    "small": _encoder_decoder("t5_1_1", 512, 6, 64, 1024, 8),
    "base": _encoder_decoder("t5_1_1", 768, 12, 64, 2048, 12),
    "large": _encoder_decoder("t5_1_1", 1024, 16, 64, 2816, 24),
    "xl": _encoder_decoder("t5_1_1", 2048, 32, 64, 5120, 24),
    "xxl": _encoder_decoder("t5_1_1", 4096, 64, 64, 10_240, 24),
}
_MT5 = {
    size: replace(config, vocab_size=MT5_VOCAB_SIZE)
    for size, config in _T5_1_1.items()
    if size != "tiny"
}
# Decoder-only models of T5 1.1's sizes, as T5X's `examples/decoder_only/models/*.gin` have them;
# 1b has the widths of xl.
_LM = {
    size: replace(_T5_1_1[t5_size], family="lm", num_encoder_layers=0)
    for size, t5_size in (
        ("tiny", "tiny"),
        ("small", "small"),
        ("base", "base"),
        ("large", "large"),
        ("1b", "xl"),
    )
}

MODEL_PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        f"{family}_{size}": config
        for family, sizes in (
            ("t5_1_0", _T5_1_0),
            ("t5_1_1", _T5_1_1),
            ("mt5", _MT5),
            ("lm", _LM),
        )
        for size, config in sizes.items()
    }
)


def model_preset(name: str) -> ModelConfig:
    """The model called `name`.

    Raises:
        ValueError: if there is none, naming the nearest one and all there are.
    """
    if name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    near = difflib.get_close_matches(name, MODEL_PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown preset {name!r}; {hint}Known: {', '.join(MODEL_PRESETS)}")


def parameter_count(config: ModelConfig) -> int:
    """The number of trainable parameters. Nothing is allocated."""
    return sum(math.prod(shape) for shape in _parameter_shapes(config).values())


def flops_per_step(
    config: ModelConfig, batch_size: int, encoder_length: int, decoder_length: int
) -> int:
    """Floating-point operations a training step needs, forward and backward, over all devices.

    Counted: 2 for each kernel element and position forward and twice that backward, and 4 (12
    with the backward pass) for each query, key and attention channel, masked or not, padded or
    not. Not counted: embedding look-ups, norms, softmax, the optimizer. `encoder_length` of a
    decoder-only model is ignored. Utilisation is this, by step time, by the device's peak.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    encoder_tokens = batch_size * encoder_length
    decoder_tokens = batch_size * decoder_length
    matmul_elements = 0
    shapes = _parameter_shapes(config)
    for path, shape in shapes.items():
        if path[-1] == "kernel":
            # Keys and values of cross attention are projected from the encoder's positions.
            on_encoder = path[0] == "encoder" or (
                "encoder_decoder_attention" in path and path[-2] in ("key", "value")
            )
            tokens = encoder_tokens if on_encoder else decoder_tokens
            matmul_elements += math.prod(shape) * tokens
    if ("decoder", "logits_dense", "kernel") not in shapes:
        matmul_elements += config.vocab_size * config.emb_dim * decoder_tokens

    pairs = config.num_decoder_layers * decoder_tokens * decoder_length
    if config.num_encoder_layers > 0:
        pairs += config.num_encoder_layers * encoder_tokens * encoder_length
        pairs += config.num_decoder_layers * decoder_tokens * encoder_length
    return 6 * matmul_elements + 12 * pairs * config.num_heads * config.head_dim


@lru_cache
def _parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path to shape, for each parameter."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    params = jax.eval_shape(lambda key: init_params(model_spec(config), key), key)
    return {
        tuple(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
