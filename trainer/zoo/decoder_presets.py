"""Presets of decoders that people continue from: Gemma 2 and 3, Qwen 2 and 3, Mistral, OLMo 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.model.config import ModelConfig


def _decoder(
    family: str,
    vocab_size: int,
    emb_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_dim: int,
    layers: int,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_encoder_layers=0,
        num_decoder_layers=layers,
    )


# Columns: emb_dim, heads, heads of keys and values, head_dim, mlp_dim, layers; then what differs.
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
# Source: config.json of Qwen/Qwen2.5-*, whose shapes are Qwen 2's. The last columns: vocab_size,
# tied logits.
_QWEN2 = {
    "0.5b": (896, 14, 2, 64, 4864, 24, 151_936, True),
    "1.5b": (1536, 12, 2, 128, 8960, 28, 151_936, True),
    "7b": (3584, 28, 4, 128, 18_944, 28, 152_064, False),
}
# Source: config.json of Qwen/Qwen3-*-Base. The last column: tied logits.
_QWEN3 = {
    "0.6b": (1024, 16, 8, 128, 3072, 28, True),
    "1.7b": (2048, 16, 8, 128, 6144, 28, True),
    "4b": (2560, 32, 8, 128, 9728, 36, True),
    "8b": (4096, 32, 8, 128, 12_288, 36, False),
}
# Source: config.json of allenai/OLMo-2-*.
_OLMO2 = {
    "1b": (2048, 16, 16, 128, 8192, 16),
    "7b": (4096, 32, 32, 128, 11_008, 32),
}


def decoder_presets(vocab_size: int) -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), each with the vocabulary size of its own tokenizer."""
    for size, (*sizes, scalar) in _GEMMA2.items():
        yield (
            f"gemma2_{size}",
            replace(
                _decoder("gemma", 256_000, *sizes),
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
                _decoder("gemma", vocabulary, *sizes),
                norm_placement="sandwich",
                query_key_norm=True,
                attention_scale=scalar**-0.5,
                position=f"rotary:base=1000000{scaling}",
                attention_window=f"sliding:window={window},layers=lllllg,base=10000",
            ),
        )
    for size, (*sizes, vocabulary, tied) in _QWEN2.items():
        yield (
            f"qwen2_{size}",
            replace(
                _decoder("llama", vocabulary, *sizes),
                attention_bias=True,
                attention_out_bias=False,
                position="rotary:base=1000000",
                tied_logits=tied,
            ),
        )
    for size, (*sizes, tied) in _QWEN3.items():
        yield (
            f"qwen3_{size}",
            replace(
                _decoder("llama", 151_936, *sizes),
                query_key_norm=True,
                position="rotary:base=1000000",
                tied_logits=tied,
            ),
        )
    # Source: config.json of mistralai/Mistral-7B-v0.1; later versions see everything.
    yield (
        "mistral_7b",
        replace(
            _decoder("llama", 32_000, 4096, 32, 8, 128, 14_336, 32),
            norm="rms_norm:epsilon=1e-5",
            attention_window="sliding:window=4096",
        ),
    )
    for size, widths in _OLMO2.items():
        yield (
            f"olmo2_{size}",
            replace(
                _decoder("llama", 100_352, *widths),
                norm_placement="branch",
                query_key_norm=True,
                query_key_norm_over="joined",
                position="rotary:base=500000",
            ),
        )
