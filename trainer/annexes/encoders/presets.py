"""Presets of encoders that people continue from: RoBERTa and ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.model.config import ModelConfig


def _encoder(
    family: str,
    vocab_size: int,
    emb_dim: int,
    num_heads: int,
    mlp_dim: int,
    layers: int,
    **parts: Any,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=emb_dim // num_heads,
        mlp_dim=mlp_dim,
        num_encoder_layers=layers,
        num_decoder_layers=0,
        **parts,
    )


# Columns: emb_dim, heads, mlp_dim, layers.
# Source: config.json of FacebookAI/roberta-*; RoBERTa (arXiv:1907.11692), section 3.1 and table 9.
_ROBERTA = {
    "base": (768, 12, 3072, 12),
    "large": (1024, 16, 4096, 24),
}
# Source: config.json of answerdotai/ModernBERT-*; ModernBERT (arXiv:2412.13663), table 4.
_MODERNBERT = {
    "base": (768, 12, 1152, 22),
    "large": (1024, 16, 2624, 28),
}


def encoder_presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), each with the vocabulary size of its own tokenizer."""
    for size, sizes in _ROBERTA.items():
        yield (
            f"roberta_{size}",
            _encoder(
                "bert",
                50_265,
                *sizes,
                token_types=1,
                norm="layer_norm:epsilon=1e-5",
                dropout_rate=0.1,
            ),
        )
    for size, sizes in _MODERNBERT.items():
        yield (
            f"modernbert_{size}",
            _encoder(
                "bert_pre_ln",
                50_368,
                *sizes,
                token_types=0,
                norm="layer_norm:epsilon=1e-5,bias=false",
                norm_placement="pre_but_first",
                position="rotary:base=160000,fraction=1",
                attention_window="sliding:window=128,layers=gll,base=10000",
                mlp_activations=("gelu_erf", "linear"),
                mlp_bias=False,
                attention_bias=False,
                head_bias=False,
            ),
        )
