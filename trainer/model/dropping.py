"""Token dropping: an encoder that goes on without the positions that receive little attention.

Dimensions: B batch, L length before a layer, M length after it, S source length, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.positions import Positions


@dataclass(frozen=True)
class TokenDropping:
    """Each layer of a stack drops `count` positions of every row, after its mixer.

    A position is worth the weights that all heads of all queries give it; padding, which is worth
    less than any token, goes first, and of equals the last. A layer that would drop more than half
    of a row drops nothing. Rows keep their order. Packed examples of a row compete for its places.

    Source: "FCABS" of MARCH (2023). Differences: queries that are padding give no weights.
    """

    count: int

    def length_after(self, length: int) -> int:
        """Returns the positions that a layer keeps of a row of `length`."""
        return length if 2 * self.count > length else length - self.count

    def kept(self, weights_BHLL: jax.Array, token_BL: jax.Array) -> jax.Array:
        """Returns the indices that are kept, int [B, M], ascending.

        Args:
          weights_BHLL: weights of attention, by queries and keys.
          token_BL: True where there is a token.
        """
        mask_BL = token_BL.astype(jnp.float32)
        received_BL = jnp.einsum("bhls,bl->bs", weights_BHLL.astype(jnp.float32), mask_BL)
        worth_BL = jax.lax.stop_gradient(jnp.where(token_BL, received_BL, -1.0))
        _, index_BM = jax.lax.top_k(worth_BL, self.length_after(token_BL.shape[1]))
        return jnp.sort(index_BM, axis=1)


def take(x_BLD: jax.Array, index_BM: jax.Array) -> jax.Array:
    """Returns the positions `index_BM` of [B, L, ...]; a batch of 1 stands for all rows."""
    x_BLD = jnp.broadcast_to(x_BLD, (len(index_BM), *x_BLD.shape[1:]))
    return jax.vmap(lambda x_LD, index_M: x_LD[index_M])(x_BLD, index_BM)


def take_rows(rows: Rows, index_BM: jax.Array) -> Rows:
    """Returns the facts about the positions that are left; they keep their positions' numbers."""
    position_BL = rows.position_BL
    if position_BL is None:
        position_BL = jnp.arange(rows.segment_BL.shape[1])[None]
    whole = rows._replace(position_BL=position_BL)
    return jax.tree.map(lambda each_BL: take(each_BL, index_BM), whole)


def take_view(view: View, index_BM: jax.Array) -> View:
    """Returns the view of a stack of its positions that are left by one another."""
    rows, length = view.rows, view.rows.segment_BL.shape[1]
    mask_BLL = jnp.broadcast_to(view.mask_BLS, (len(view.mask_BLS), length, length))
    mask_BMM = jax.vmap(_both)(
        jnp.broadcast_to(mask_BLL, (len(index_BM), length, length)), index_BM
    )
    left = take_rows(rows, index_BM)
    positions = take_positions(view.positions, index_BM)
    return View(mask_BMM, positions, left, left, watched=view.watched)


def take_positions(positions: Positions, index_BM: jax.Array) -> Positions:
    """Returns the effects of a stack's positions on those that are left."""
    bias_BHMM, angle_BMC = None, None
    if positions.bias_HLS is not None:
        bias_HLS = positions.bias_HLS
        bias_BHMM = jax.vmap(lambda index_M: _both(bias_HLS, index_M))(index_BM)
    if positions.angle_BLC is not None:
        angle_BMC = take(positions.angle_BLC, index_BM)
    return Positions(angle_BLC=angle_BMC, bias_BHLS=bias_BHMM)


def _both(x_LL: jax.Array, index_M: jax.Array) -> jax.Array:
    """Returns [..., M, M] from [..., L, L]."""
    return x_LL[..., index_M[:, None], index_M[None, :]]
