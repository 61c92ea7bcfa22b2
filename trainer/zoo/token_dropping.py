"""Token dropping: encoder layers remove the positions that receive least attention.

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
    """Each layer of a stack drops `count` positions per row, after its mixer.

    A position's score is the sum of its attention weights over all heads and queries. Padding is
    dropped first, and among equals the last. A layer that would drop more than half of a row drops
    nothing. Order is kept. Packed examples compete for the places of their row.

    Source: "FCABS" of MARCH (2023). Differences: queries that are padding give no weights.
    """

    count: int
    watches = ("weights_BHLS",)

    def length_after(self, length: int) -> int:
        return length if 2 * self.count > length else length - self.count

    def kept(self, watched: Watched, rows: Rows) -> jax.Array | None:
        """Returns the kept indices; None if the row is too short to drop any."""
        kept_BM = self.most_watched(watched["weights_BHLS"], rows.segment_BL > 0)
        return None if kept_BM.shape == rows.segment_BL.shape else kept_BM

    def most_watched(self, weights_BHLL: jax.Array, token_BL: jax.Array) -> jax.Array:
        """Returns the kept indices, int [B, M], ascending; `token_BL` is True at tokens."""
        mask_BL = token_BL.astype(jnp.float32)
        received_BL = jnp.einsum("bhls,bl->bs", weights_BHLL.astype(jnp.float32), mask_BL)
        worth_BL = jax.lax.stop_gradient(jnp.where(token_BL, received_BL, -1.0))
        _, index_BM = jax.lax.top_k(worth_BL, self.length_after(token_BL.shape[1]))
        return jnp.sort(index_BM, axis=1)


def dropping(config: Any, count: int) -> StackPart:
    """Returns the part that drops `count` positions in each encoder layer."""
    return StackPart("token_dropping", TokenDropping(count), encoder_only=True)
