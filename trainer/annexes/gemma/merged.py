"""Self-attention that also sees the encoder, without a separate sublayer.

Dimensions: B batch, L query length, S key length, D model.

Source: T5Gemma 2 (arXiv:2512.14856); "unified_attention" of MARCH (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.positions import Positions
from trainer.model.stack_parts import CrossAttention, LayerHook


@dataclass(frozen=True)
class MergesMemory(LayerHook):
    """Lets self-attention see the encoder's last states, followed by the decoder's own states."""

    reads_memory = True

    def view(self, view: View, cross_view: View | None) -> View:
        assert cross_view is not None
        return _merged(view, cross_view)

    def looked_at(self, y_BLD: Array, source: Array, view: View) -> Array:
        fills = view.cache is None or view.cache.filling
        return jnp.concatenate([source, y_BLD], axis=1) if fills else y_BLD


def merged(config: Any, options: Any) -> CrossAttention:
    """Returns self-attention that also sees the encoder, without a separate sublayer."""
    return CrossAttention(None, decoder=MergesMemory())


def _merged(own: View, cross: View) -> View:
    """Returns a view of the encoder's positions, without biases, followed by the decoder's own.

    The encoder's keys are rotated only if its positions have angles in cross-attention.
    """
    length = own.rows.segment_BL.shape[1]
    keys, sources = (view.source_rows.segment_BL.shape[1] for view in (own, cross))
    batch = max(len(own.mask_BLS), len(cross.mask_BLS))

    def spread(mask_BLS: Array, size: int) -> Array:
        return jnp.broadcast_to(mask_BLS, (batch, length, size))

    masks = [spread(cross.mask_BLS, sources), spread(own.mask_BLS, keys)]
    mask_BLS = jnp.concatenate(masks, axis=-1)
    bias_HLS = own.positions.bias_HLS
    if bias_HLS is not None:
        bias_HLS = jnp.pad(bias_HLS, ((0, 0), (0, 0), (sources, 0)))
    angle_BLC, source_angle_BSC = own.positions.angle_BLC, cross.positions.source_angle_BSC
    cache = None if own.cache is None else own.cache.behind(sources)
    if cache is not None and not cache.filling:
        source_angle_BSC = None  # only the next token's key is missing
    elif angle_BLC is not None and source_angle_BSC is None:
        source_angle_BSC = jnp.zeros((1, sources, angle_BLC.shape[-1]), angle_BLC.dtype)
    if angle_BLC is not None and source_angle_BSC is not None:
        rows = max(len(angle_BLC), len(source_angle_BSC))
        angles = [
            jnp.broadcast_to(each, (rows, *each.shape[1:]))
            for each in (source_angle_BSC, angle_BLC)
        ]
        source_angle_BSC = jnp.concatenate(angles, axis=1)
    positions = Positions(
        bias_HLS=bias_HLS,
        angle_BLC=angle_BLC,
        source_angle_BSC=source_angle_BSC,
        amplitude=own.positions.amplitude,
    )
    segments = [cross.source_rows.segment_BL, own.source_rows.segment_BL]
    source_rows = Rows(jnp.concatenate(segments, axis=1))
    return View(mask_BLS, positions, own.rows, source_rows, watched=own.watched, cache=cache)
