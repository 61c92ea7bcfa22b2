"""Presets of LongT5: T5 1.1 with an encoder for long rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.presets import model_preset
from trainer.model.config import ModelConfig

# Kind of encoder -> (sizes that were released, its attention). The widths are T5 1.1's.
# Source: Guo et al. 2022 (arXiv:2112.07916), section 4.1; config.json of google/long-t5-*.
_KINDS = {
    "local": (("base", "large"), "sliding:window=255,decoder=false"),
    "tglobal": (("base", "large", "xl"), "transient_global"),
}


def longt5() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model)."""
    for kind, (released, window) in _KINDS.items():
        for size in released:
            t5 = model_preset(f"t5_1_1_{size}")
            yield f"longt5_{kind}_{size}", replace(t5, attention_window=window)
