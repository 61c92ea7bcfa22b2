"""The token embedding, and how logits are read off the last layer.

Dimensions: B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Dense, Shared, einsum_float32, parameter


class TokenEmbedder(nn.Module):
    """The embedding table float32 [V, D]."""

    shared: Shared

    def setup(self) -> None:
        self.embedding = parameter(
            self,
            "embedding",
            self.shared.parametrisation.embedding(),
            ("vocab", "embed"),
            (self.shared.vocab_size, self.shared.emb_dim),
        )

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Rows of the table, [B, L, D] in the model's dtype.

        Differences: T5X multiplies one-hot vectors, for the TPUs of its day; values and gradients
        are the same. An id outside the vocabulary gives NaN, not silently some other token.
        """
        rows_BLD = jnp.take(self.embedding, tokens_BL, axis=0, mode="fill", fill_value=jnp.nan)
        return rows_BLD.astype(self.shared.dtype)

    def attend(self, y_BLD: jax.Array) -> jax.Array:
        """Inner products with every row of the table, float32 [B, L, V]."""
        dtype = self.shared.dtype
        table_VD = self.embedding.astype(dtype)
        return einsum_float32("bld,vd->blv", y_BLD.astype(dtype), table_VD)


class Logits(Protocol):
    """The logits slot: [B, L, D] to float32 [B, L, V], inside the decoder's scope."""

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array: ...


@dataclass(frozen=True)
class DenseLogits:
    """A kernel of its own, `logits_dense`."""

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array:
        dense = Dense(
            shared.vocab_size,
            ("embed", "vocab"),
            shared.parametrisation.logits(),
            shared.dtype,
            float32_output=True,
            name="logits_dense",
        )
        return dense(y_BLD)


@dataclass(frozen=True)
class TiedLogits:
    """The token embedding again, times the parametrisation's multiplier."""

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array:
        multiplier = shared.parametrisation.tied_logits_multiplier(shared.emb_dim)
        return embedder.attend(y_BLD) * multiplier
