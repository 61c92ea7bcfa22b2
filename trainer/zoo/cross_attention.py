"""Other ways for a decoder to attend to an encoder: by layer, to its keys, or merged.

Dimensions: B batch, L query length, S length of the encoder's rows, D model.

Source: MARCH (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer.model.attention import attention
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.positions import Positions
from trainer.model.stack_parts import CrossAttention, LayerHook, Watched
from trainer.zoo.external_attention import KeysAndValues, given_attention


@dataclass(frozen=True)
class LeavesStates(LayerHook):
    """Leaves the states after a layer for the decoder layer of the same number."""

    def left(self, x_BLD: jax.Array, watched: Watched) -> jax.Array:
        return x_BLD

    def finished(self, left: jax.Array, norm: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return norm(left)


@dataclass(frozen=True)
class LeavesKeys(LayerHook):
    """Leaves a layer's keys and values."""

    watches = ("key_BSJ", "value_BSJ")

    def left(self, x_BLD: jax.Array, watched: Watched) -> KeysAndValues:
        return KeysAndValues(*(watched[name] for name in self.watches))


@dataclass(frozen=True)
class MergesMemory(LayerHook):
    """Lets self-attention see the encoder's last states, and after them the decoder's own."""

    reads_memory = True

    def view(self, view: View, cross_view: View | None) -> View:
        assert cross_view is not None
        return _merged(view, cross_view)

    def looked_at(self, y_BLD: jax.Array, source: jax.Array, view: View) -> jax.Array:
        fills = view.cache is None or view.cache.filling
        return jnp.concatenate([source, y_BLD], axis=1) if fills else y_BLD


def layerwise(config: Any, options: Any) -> CrossAttention:
    """Returns attention to the states after the encoder layer of the same number."""
    return CrossAttention(attention(config), encoder=LeavesStates())


def encoder_keys(config: Any, options: Any) -> CrossAttention:
    """Returns attention to the keys and values of the encoder layer of the same number."""
    return CrossAttention(given_attention(config), encoder=LeavesKeys())


def merged(config: Any, options: Any) -> CrossAttention:
    """Returns self-attention that also sees the encoder, without a sublayer for it."""
    return CrossAttention(None, decoder=MergesMemory())


def _merged(own: View, cross: View) -> View:
    """Returns the view of the encoder's positions, without biases, then the decoder's own."""
    length = own.rows.segment_BL.shape[1]
    keys, sources = (view.source_rows.segment_BL.shape[1] for view in (own, cross))
    batch = max(len(own.mask_BLS), len(cross.mask_BLS))

    def spread(mask_BLS: jax.Array, size: int) -> jax.Array:
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
    if angle_BLC is not None and source_angle_BSC is not None:
        rows = max(len(angle_BLC), len(source_angle_BSC))
        angles = [
            jnp.broadcast_to(each, (rows, *each.shape[1:]))
            for each in (source_angle_BSC, angle_BLC)
        ]
        source_angle_BSC = jnp.concatenate(angles, axis=1)
    positions = Positions(bias_HLS=bias_HLS, angle_BLC=angle_BLC, source_angle_BSC=source_angle_BSC)
    segments = [cross.source_rows.segment_BL, own.source_rows.segment_BL]
    source_rows = Rows(jnp.concatenate(segments, axis=1))
    return View(mask_BLS, positions, own.rows, source_rows, watched=own.watched, cache=cache)
