"""Token dropping: an encoder that goes on without the positions that receive little attention.

Dimensions: B batch, L length before a layer, M length after it, S source length, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer.model.masks import Rows
from trainer.model.stack_parts import LayerHook, StackPart, Watched


@dataclass(frozen=True)
class TokenDropping(LayerHook):
    """Each layer of a stack drops `count` positions of every row, after its mixer.

    A position is worth the weights that all heads of all queries give it; padding, which is worth
    less than any token, goes first, and of equals the last. A layer that would drop more than half
    of a row drops nothing. Rows keep their order. Packed examples of a row compete for its places.

    Source: "FCABS" of MARCH (2023). Differences: queries that are padding give no weights.
    """

    count: int
    watches = ("weights_BHLS",)

    def length_after(self, length: int) -> int:
        """Returns the positions that a layer keeps of a row of `length`."""
        return length if 2 * self.count > length else length - self.count

    def kept(self, watched: Watched, rows: Rows) -> jax.Array | None:
        """Returns the indices that are left; None if there is too little to drop."""
        kept_BM = self.most_watched(watched["weights_BHLS"], rows.segment_BL > 0)
        return None if kept_BM.shape == rows.segment_BL.shape else kept_BM

    def most_watched(self, weights_BHLL: jax.Array, token_BL: jax.Array) -> jax.Array:
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


def dropping(config: Any, count: int) -> StackPart:
    """Returns the part that drops `count` positions in each layer of an encoder."""
    return StackPart("token_dropping", TokenDropping(count), encoder_only=True)
