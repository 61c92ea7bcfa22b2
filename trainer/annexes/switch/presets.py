"""Presets of Switch Transformers: T5 with experts in every second layer."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.model.config import ModelConfig

# Columns: emb_dim, heads, mlp_dim, layers of each stack: those of T5 1.0; numbers of experts.
# Source: Fedus et al. 2021 (arXiv:2101.03961), table 9; config.json of google/switch-*.
_SIZES = {
    "base": (768, 12, 3072, 12, (8, 16, 32, 64, 128, 256)),
    "large": (1024, 16, 4096, 24, (128,)),
}


def switch_transformers(vocab_size: int) -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model)."""
    for size, (emb_dim, heads, mlp_dim, layers, experts) in _SIZES.items():
        for count in experts:
            yield (
                f"switch_{size}_{count}",
                ModelConfig(
                    family="t5_1_0",
                    vocab_size=vocab_size,
                    emb_dim=emb_dim,
                    num_heads=heads,
                    head_dim=64,
                    mlp_dim=mlp_dim,
                    num_encoder_layers=layers,
                    num_decoder_layers=layers,
                    feed_forward=f"switch:experts={count},every=2,capacity=64",
                ),
            )
