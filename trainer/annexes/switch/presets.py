"""Presets of Switch Transformers: T5 with experts in every second layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.presets import model_preset
from trainer.model.config import ModelConfig

# Size of T5 1.0 -> numbers of experts.
# Source: Fedus et al. 2021 (arXiv:2101.03961), table 9; config.json of google/switch-*.
_EXPERTS = {"base": (8, 16, 32, 64, 128, 256), "large": (128,)}


def switch_transformers() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model)."""
    for size, counts in _EXPERTS.items():
        t5 = model_preset(f"t5_1_0_{size}")
        for count in counts:
            experts = f"switch:experts={count},every=2,capacity=64"
            yield f"switch_{size}_{count}", replace(t5, feed_forward=experts)
