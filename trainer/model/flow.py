"""The states between two layers of a stack, and the row positions that remain.

Dimensions: B batch, L length of a stack's rows, M remaining positions, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.positions import Positions


class Flow(NamedTuple):
    """The states between two layers; `index_BL` are the remaining positions, None if all."""

    x_BLD: jax.Array
    index_BL: jax.Array | None = None

    def keep(self, index_BM: jax.Array) -> Flow:
        kept_BM = index_BM if self.index_BL is None else take(self.index_BL, index_BM)
        return Flow(take(self.x_BLD, index_BM), kept_BM)


def take(x_BLD: jax.Array, index_BM: jax.Array) -> jax.Array:
    """Returns positions `index_BM` of [B, L, ...]; a batch of 1 stands for all rows."""
    x_BLD = jnp.broadcast_to(x_BLD, (len(index_BM), *x_BLD.shape[1:]))
    return jax.vmap(lambda x_LD, index_M: x_LD[index_M])(x_BLD, index_BM)


def take_rows(rows: Rows, index_BM: jax.Array) -> Rows:
    """Returns facts about the remaining positions, which keep their position numbers."""
    position_BL = rows.position_BL
    if position_BL is None:
        position_BL = jnp.arange(rows.segment_BL.shape[1])[None]
    whole = rows._replace(position_BL=position_BL)
    return jax.tree.map(lambda each_BL: take(each_BL, index_BM), whole)


def take_view(view: View, index_BM: jax.Array) -> View:
    """Returns the remaining positions' view of one another."""
    length = view.rows.segment_BL.shape[1]
    mask_BLL = jnp.broadcast_to(view.mask_BLS, (len(view.mask_BLS), length, length))
    mask_BMM = jax.vmap(_both)(
        jnp.broadcast_to(mask_BLL, (len(index_BM), length, length)), index_BM
    )
    left = take_rows(view.rows, index_BM)
    positions = _take_positions(view.positions, index_BM)
    return View(mask_BMM, positions, left, left, watched=view.watched)


def _take_positions(positions: Positions, index_BM: jax.Array) -> Positions:
    bias_BHMM, angle_BMC = None, None
    if positions.bias_HLS is not None:
        bias_HLS = positions.bias_HLS
        bias_BHMM = jax.vmap(lambda index_M: _both(bias_HLS, index_M))(index_BM)
    if positions.angle_BLC is not None:
        angle_BMC = take(positions.angle_BLC, index_BM)
    return Positions(angle_BLC=angle_BMC, bias_BHLS=bias_BHMM)


def _both(x_LL: jax.Array, index_M: jax.Array) -> jax.Array:
    return x_LL[..., index_M[:, None], index_M[None, :]]
