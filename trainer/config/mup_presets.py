"""Presets of mu_transformer's decoders, and of other families' models under muP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.model.config import ModelConfig

# Source: Lingle 2024 (arXiv:2404.05728), section 3.1 and table 1; the vocabulary is T5's tokenizer
# with its sentinels.
_VOCAB_SIZE = 32_100
_BASE_WIDTH = _HEAD_DIM = 128
_LAYERS = 24
_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def mup_presets(others: dict[str, ModelConfig]) -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model): the decoders by width, and each of `others` under muP."""
    for width in _WIDTHS:
        yield (
            f"mup_dm{width}",
            ModelConfig(
                family="llama",
                vocab_size=_VOCAB_SIZE,
                emb_dim=width,
                num_heads=width // _HEAD_DIM,
                head_dim=_HEAD_DIM,
                mlp_dim=4 * width,
                num_encoder_layers=0,
                num_decoder_layers=_LAYERS,
                mlp_activations=("relu",),
                norm="rms_norm:epsilon=1e-5,gain=none",
                parametrisation=f"mup:base_width={_BASE_WIDTH}",
            ),
        )
    for name, model in others.items():
        # At the base width the first logits are as large as in the standard parametrisation.
        mup = f"mup:base_width={_BASE_WIDTH},readout=relative"
        yield f"mup_{name}", replace(model, parametrisation=mup)
