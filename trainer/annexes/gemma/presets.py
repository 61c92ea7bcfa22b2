"""Presets of Gemma 1 to 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.presets import decoder
from trainer.model.config import ModelConfig

# Columns: emb_dim, heads, heads of keys and values, head_dim, mlp_dim, layers; then what differs.
# Source: the Gemma team 2024 (arXiv:2403.08295), table 1; mlp_dim is half of the paper's.
_GEMMA = {
    "2b": (2048, 8, 1, 256, 16_384, 18),
    "7b": (3072, 16, 16, 256, 24_576, 28),
}
# Source: config.json of google/gemma-2-*; Gemma 2 (arXiv:2408.00118), table 1. The last column is
# the number whose square root divides attention logits.
_GEMMA2 = {
    "2b": (2304, 8, 4, 256, 9216, 26, 256),
    "9b": (3584, 16, 8, 256, 14_336, 42, 256),
    "27b": (4608, 32, 16, 128, 36_864, 46, 144),
}
# Source: config.json of google/gemma-3-*, text_config of the larger ones; Gemma 3
# (arXiv:2503.19786), table 1. The last columns: vocab_size, that number, window.
_GEMMA3 = {
    "270m": (640, 4, 1, 256, 2048, 18, 262_144, 256, 512),
    "1b": (1152, 4, 1, 256, 6912, 26, 262_144, 256, 512),
    "4b": (2560, 8, 4, 256, 10_240, 34, 262_208, 256, 1024),
    "12b": (3840, 16, 8, 256, 15_360, 48, 262_208, 256, 1024),
    "27b": (5376, 32, 16, 128, 21_504, 62, 262_208, 168, 1024),
}
# Positions of these sizes are eight times as slow in global layers, for rows of 128 k tokens.
_GEMMA3_SHORT = ("270m", "1b")


def presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), each with the vocabulary size of its own tokenizer."""
    for size, widths in _GEMMA.items():
        yield f"gemma_{size}", decoder("gemma", 256_000, *widths)
    for size, (*sizes, scalar) in _GEMMA2.items():
        yield (
            f"gemma2_{size}",
            replace(
                decoder("gemma", 256_000, *sizes),
                norm_placement="sandwich",
                attention_scale=scalar**-0.5,
                attention_softcap=50.0,
                logits_softcap=30.0,
                attention_window="sliding:window=4096,layers=lg",
            ),
        )
    for size, (*sizes, vocabulary, scalar, window) in _GEMMA3.items():
        scaling = "" if size in _GEMMA3_SHORT else ",scaling=linear,factor=8"
        yield (
            f"gemma3_{size}",
            replace(
                decoder("gemma", vocabulary, *sizes),
                norm_placement="sandwich",
                query_key_norm=True,
                attention_scale=scalar**-0.5,
                position=f"rotary:base=1000000{scaling}",
                attention_window=f"sliding:window={window},layers=lllllg,base=10000",
            ),
        )
