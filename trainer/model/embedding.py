"""Token embeddings, additions to them, and logits from the last states.

Dimensions: B batch, L length, D model, V vocabulary, T token types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Dense, Shared, einsum_float32
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.masks import Rows
from trainer.model.norms import Norm
from trainer.model.parameters import ROW_KERNEL, TABLE, parameter


class TokenEmbedder(nn.Module):
    """The embedding table, float32 [V, D]."""

    shared: Shared

    def setup(self) -> None:
        self.embedding = parameter(
            self,
            TABLE,
            "embedding",
            self.shared.parametrisation.embedding(),
            ("vocab", "embed"),
            (self.shared.vocab_size, self.shared.emb_dim),
        )

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Returns rows of the table, [B, L, D] in the model's dtype; unknown ids give NaN.

        Differences: T5X multiplies by one-hot vectors, for older TPUs; values and gradients agree.
        """
        rows_BLD = jnp.take(self.embedding, tokens_BL, axis=0, mode="fill", fill_value=jnp.nan)
        rows_BLD = rows_BLD.astype(self.shared.dtype)
        if self.shared.scale_embeddings:
            # The factor is rounded as in Gemma's code.
            rows_BLD *= jnp.asarray(self.shared.emb_dim**0.5, self.shared.dtype)
        return rows_BLD

    def attend(self, y_BLD: jax.Array) -> jax.Array:
        """Returns inner products with all rows of the table, float32 [B, L, V]."""
        dtype = self.shared.dtype
        table_VD = self.embedding.astype(dtype)
        return einsum_float32("bld,vd->blv", y_BLD.astype(dtype), table_VD)


class Embedding(Protocol):
    """The embedding slot: maps token and position vectors [B, L, D] to a stack's first states."""

    def __call__(self, x_BLD: jax.Array, rows: Rows, shared: Shared) -> jax.Array: ...


@dataclass(frozen=True)
class PlainEmbedding:
    """The sum, normalised if there is a `norm`."""

    norm: Norm | None = None

    def __call__(self, x_BLD: jax.Array, rows: Rows, shared: Shared) -> jax.Array:
        return _normalised(x_BLD, self.norm, shared)


@dataclass(frozen=True)
class TypedEmbedding:
    """Adds a vector per token type and normalises the sum if there is a `norm`.

    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2; google-research/bert for the norm.
    """

    norm: Norm | None
    num_types: int = 2

    def __call__(self, x_BLD: jax.Array, rows: Rows, shared: Shared) -> jax.Array:
        x_BLD += _TypeEmbedder(self.num_types, shared, name="type_embedder")(rows)
        return _normalised(x_BLD, self.norm, shared)


def _normalised(x_BLD: jax.Array, norm: Norm | None, shared: Shared) -> jax.Array:
    return x_BLD if norm is None else norm.build(shared, "embedding_layer_norm")(x_BLD)


class _TypeEmbedder(nn.Module):
    num_types: int
    shared: Shared

    @nn.compact
    def __call__(self, rows: Rows) -> jax.Array:
        table_TD = parameter(
            self,
            TABLE,
            "embedding",
            self.shared.parametrisation.embedding(),
            ("token_types", "embed"),
            (self.num_types, self.shared.emb_dim),
        ).astype(self.shared.dtype)
        if rows.type_BL is None:
            return table_TD[0]
        return jnp.take(table_TD, rows.type_BL, axis=0, mode="fill", fill_value=jnp.nan)


class Logits(Protocol):
    """The logits slot: maps [B, L, D] to float32 [B, L, V] in the caller's scope."""

    @property
    def tied(self) -> bool: ...

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array: ...


@dataclass(frozen=True)
class DenseLogits:
    """Logits with their own kernel, `logits_dense`, times `scale`."""

    scale: float = 1.0
    tied = False

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array:
        dense = Dense(
            shared.vocab_size,
            ("embed", "vocab"),
            shared.parametrisation.logits(),
            shared.dtype,
            float32_output=True,
            name="logits_dense",
        )
        logits_BLV = dense(y_BLD)
        return logits_BLV if self.scale == 1 else logits_BLV * self.scale


@dataclass(frozen=True)
class TiedLogits:
    """Products with the token embedding, times `scale` (None: the parametrisation's multiplier)."""

    scale: float | None = None
    tied = True

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array:
        scale = self.scale
        if scale is None:
            scale = shared.parametrisation.tied_logits_multiplier(shared.emb_dim)
        return embedder.attend(y_BLD) * scale


@dataclass(frozen=True)
class TransformedLogits:
    """`logits` of projected, activated and normalised states, plus a bias.

    Source: google-research/bert, `run_pretraining.py`, `get_masked_lm_output`.
    """

    activation: str
    norm: Norm
    logits: Logits

    @property
    def tied(self) -> bool:
        return self.logits.tied

    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder, shared: Shared) -> jax.Array:
        return _TransformedLogits(self, shared, name="mlm_head")(y_BLD, embedder)


class _TransformedLogits(nn.Module):
    spec: TransformedLogits
    shared: Shared

    @nn.compact
    def __call__(self, y_BLD: jax.Array, embedder: TokenEmbedder) -> jax.Array:
        spec, shared = self.spec, self.shared
        # "mlp" names the output channels: a kernel cannot have one axis twice.
        initializer = shared.parametrisation.feed_forward()
        dense = shared.dense(shared.emb_dim, ("embed", "mlp"), initializer, "dense", bias=True)
        y_BLD = ACTIVATIONS[spec.activation](dense(y_BLD))
        logits_BLV = spec.logits(spec.norm.build(shared, "layer_norm")(y_BLD), embedder, shared)
        bias_V = parameter(
            self, TABLE, "logits_bias", nn.initializers.zeros, ("vocab",), (shared.vocab_size,)
        )
        return logits_BLV + bias_V


class RowClassifier(nn.Module):
    """Computes float32 logits [B, classes] from each row's first state.

    Source: google-research/bert, `modeling.py` (pooler) and `get_next_sentence_output`.
    """

    classes: int
    shared: Shared

    @nn.compact
    def __call__(self, y_BLD: jax.Array) -> jax.Array:
        shared, parametrisation = self.shared, self.shared.parametrisation
        initializer = parametrisation.feed_forward()
        pooler = shared.dense(
            shared.emb_dim, ("embed", "mlp"), initializer, "pooler", bias=True, use=ROW_KERNEL
        )
        pooled_B1D = jnp.tanh(pooler(y_BLD[:, :1]))
        initializer = parametrisation.logits()
        logits = shared.dense(
            self.classes,
            ("embed", "classes"),
            initializer,
            "logits",
            float32_output=True,
            bias=True,
            use=ROW_KERNEL,
        )
        return logits(pooled_B1D)[:, 0]
