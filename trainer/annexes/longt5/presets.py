"""Presets of LongT5: T5 1.1 with an encoder for long rows."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.model.config import ModelConfig

# Columns: emb_dim, heads, mlp_dim, layers of each stack: those of T5 1.1.
# Source: Guo et al. 2022 (arXiv:2112.07916), section 4.1; config.json of google/long-t5-*.
_SIZES = {
    "base": (768, 12, 2048, 12),
    "large": (1024, 16, 2816, 24),
    "xl": (2048, 32, 5120, 24),
}
# Kind of encoder -> (sizes that were released, its attention).
_KINDS = {
    "local": (("base", "large"), "sliding:window=255,decoder=false"),
    "tglobal": (("base", "large", "xl"), "transient_global"),
}


def longt5(vocab_size: int) -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model)."""
    for kind, (released, window) in _KINDS.items():
        for size in released:
            emb_dim, heads, mlp_dim, layers = _SIZES[size]
            yield (
                f"longt5_{kind}_{size}",
                ModelConfig(
                    family="t5_1_1",
                    vocab_size=vocab_size,
                    emb_dim=emb_dim,
                    num_heads=heads,
                    head_dim=64,
                    mlp_dim=mlp_dim,
                    num_encoder_layers=layers,
                    num_decoder_layers=layers,
                    attention_window=window,
                ),
            )
