"""States that a decoder can look at: an encoder's last ones, and those its layers leave.

Dimensions: B batch, L query length, S length of the encoder's rows, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.model.dropping import TokenDropping
from trainer.model.given_attention import KeysAndValues
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.positions import Positions


class Memory(NamedTuple):
    """The output of an encoder.

    Attributes:
      states_BSD: its last states, normalised.
      rows: facts about their positions.
      layers: what each layer leaves, if the decoder's layers look at it: states [B, S, D],
        normalised, or `KeysAndValues`.
    """

    states_BSD: jax.Array
    rows: Rows
    layers: tuple[Any, ...] = ()


# What attention leaves for `KeysAndValues`.
_OF_KEYS = ("key_BSJ", "value_BSJ")


def watched_names(leaves: str | None, dropping: TokenDropping | None) -> tuple[str, ...]:
    """Returns the names in `View.watched` that a layer reads which leaves and drops these."""
    keys = _OF_KEYS if leaves == "encoder_keys" else ()
    return keys if dropping is None else (*keys, "weights_BHLS")


def left_by(leaves: str | None, x_BLD: jax.Array, watched: dict[str, Any]) -> Any:
    """Returns what a layer leaves for the decoder.

    Args:
      leaves: "layerwise" for its states, "encoder_keys" for its keys and values, or None.
      x_BLD: the states after it.
      watched: what its attention has left.
    """
    if leaves == "encoder_keys":
        return KeysAndValues(*(watched[name] for name in _OF_KEYS))
    return x_BLD if leaves == "layerwise" else None


def normalised(layers: tuple[Any, ...], norm: Callable[[jax.Array], jax.Array]) -> tuple[Any, ...]:
    """Returns what layers leave, with states normalised as the last ones are."""
    return tuple(each if isinstance(each, KeysAndValues) else norm(each) for each in layers)


def merged_view(own: View, cross: View) -> View:
    """Returns the view of the encoder's positions and, after them, of the decoder's own.

    Biases by distance are those of the decoder's own; there is none to the encoder.
    """
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
        source_angle_BSC = None  # only the key of the next token is not there yet
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
