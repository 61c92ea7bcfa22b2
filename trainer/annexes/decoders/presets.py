"""The family of GPT-2, and presets of GPT-2, Qwen 2 and 3, Mistral and OLMo 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.presets import decoder
from trainer.model.config import ModelConfig
from trainer.model.part_facts import DECODER, FamilyFacts

# Source: Radford et al. 2019.
GPT2 = FamilyFacts(
    DECODER,
    position="absolute",
    norm="layer_norm:epsilon=1e-5",
    mlp_activations=("gelu",),
    mlp_bias=True,
    attention_bias=True,
    parametrisation="normal:scale_residual=true",
)
# Columns: emb_dim, heads, head_dim, mlp_dim, layers.
# Source: Radford et al. 2019, table 2, with the released code's dropout.
_GPT2 = {
    "small": (768, 12, 64, 3072, 12),
    "medium": (1024, 16, 64, 4096, 24),
    "large": (1280, 20, 64, 5120, 36),
    "xl": (1600, 25, 64, 6400, 48),
}
# Columns: emb_dim, heads, heads of keys and values, head_dim, mlp_dim, layers; then what differs.
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


def decoder_presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), each with the vocabulary size of its own tokenizer."""
    for size, (emb_dim, heads, *rest) in _GPT2.items():
        model = decoder("gpt2", 50_257, emb_dim, heads, heads, *rest)
        yield f"gpt2_{size}", replace(model, max_positions=1024, dropout_rate=0.1)
    for size, (*sizes, vocabulary, tied) in _QWEN2.items():
        yield (
            f"qwen2_{size}",
            replace(
                decoder("llama", vocabulary, *sizes),
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
                decoder("llama", 151_936, *sizes),
                query_key_norm=True,
                position="rotary:base=1000000",
                tied_logits=tied,
            ),
        )
    # Source: config.json of mistralai/Mistral-7B-v0.1; later versions see everything.
    yield (
        "mistral_7b",
        replace(
            decoder("llama", 32_000, 4096, 32, 8, 128, 14_336, 32),
            norm="rms_norm:epsilon=1e-5",
            attention_window="sliding:window=4096",
        ),
    )
    for size, widths in _OLMO2.items():
        yield (
            f"olmo2_{size}",
            replace(
                decoder("llama", 100_352, *widths),
                norm_placement="branch",
                query_key_norm=True,
                query_key_norm_over="joined",
                position="rotary:base=500000",
            ),
        )
