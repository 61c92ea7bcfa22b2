"""Presets of T5Gemma: encoder-decoders with the layers of Gemma 2 or 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.annexes.gemma.presets import presets
from trainer.model.config import ModelConfig, encoder_sizes

# Columns: emb_dim, heads, heads of keys and values, head_dim, mlp_dim, layers of each stack, and
# the number whose square root divides attention logits.
# Source: Zhang et al. 2025 (arXiv:2504.06225), table 1, and config.json of google/t5gemma-*.
_SIZES = {
    "small": (512, 8, 8, 64, 1024, 8, 64),
    "base": (768, 12, 12, 64, 2048, 12, 64),
    "large": (1024, 16, 16, 64, 2816, 24, 64),
    "xl": (2048, 32, 32, 64, 5120, 24, 64),
    "2b_2b": (2304, 8, 4, 256, 9216, 26, 256),
    "9b_9b": (3584, 16, 8, 256, 14_336, 42, 256),
}


def t5gemma() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model), with Gemma's vocabulary size."""
    yield from _of_gemma3()
    yield from _of_gemma2()


def _of_gemma2() -> Iterator[tuple[str, ModelConfig]]:
    """Yields T5Gemma's models."""
    made = dict(_of_equal_stacks())
    yield from made.items()
    name, encoder, decoder = _UNEQUAL
    sizes, layers = encoder_sizes(made[encoder], made[decoder]), made[encoder].num_encoder_layers
    yield name, replace(made[decoder], encoder_sizes=sizes, num_encoder_layers=layers)


def _of_equal_stacks() -> Iterator[tuple[str, ModelConfig]]:
    for size, (emb_dim, heads, kv_heads, head_dim, mlp_dim, layers, scalar) in _SIZES.items():
        yield (
            f"t5gemma_{size}",
            ModelConfig(
                family="t5gemma",
                vocab_size=256_000,
                emb_dim=emb_dim,
                num_heads=heads,
                num_kv_heads=None if kv_heads == heads else kv_heads,
                head_dim=head_dim,
                mlp_dim=mlp_dim,
                num_encoder_layers=layers,
                num_decoder_layers=layers,
                shared_embedding=False,
                attention_scale=scalar**-0.5,
                attention_softcap=50.0,
                logits_softcap=30.0,
                attention_window="sliding:window=4096,layers=lg,reach=4096",
            ),
        )


# Source: T5Gemma (arXiv:2504.06225), table 1: the encoder of 9b_9b, the decoder of 2b_2b.
_UNEQUAL = ("t5gemma_9b_2b", "t5gemma_9b_9b", "t5gemma_2b_2b")
# Source: T5Gemma 2 (arXiv:2512.14856), table 1: the layers of Gemma 3 in both stacks.
_OF_GEMMA3 = ("270m", "1b", "4b")


def _of_gemma3() -> Iterator[tuple[str, ModelConfig]]:
    """Yields T5Gemma 2's models, with Gemma 3's vocabulary size."""
    decoders = dict(presets())
    for size in _OF_GEMMA3:
        decoder = decoders[f"gemma3_{size}"]
        window = decoder.part("attention_window")
        reach, ahead = (window.options.window - 1) // 2, window.options.window // 2
        yield (
            f"t5gemma2_{size}_{size}",
            replace(
                decoder,
                family="t5gemma",
                num_encoder_layers=decoder.num_decoder_layers,
                cross_attention="merged",
                attention_window=f"{window},reach={reach},ahead={ahead}",
            ),
        )
