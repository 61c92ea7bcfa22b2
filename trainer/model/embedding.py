"""Token embeddings, additions to them, and logits from the last states.

Dimensions: B batch, L length, D model, V vocabulary, T token types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.dense import Buildable, Built, Shared, einsum_float32, softcapped
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.masks import Rows
from trainer.model.norms import Norm
from trainer.model.parameters import ROW_KERNEL, TABLE, parameter


class TokenEmbedder(nn.Module):
    """The embedding table, float32 [V, D]."""

    shared: Shared

    def setup(self) -> None:
        start, axes = self.shared.parametrisation.embedding(), ("vocab", "embed")
        shape = (self.shared.vocab_size, self.shared.emb_dim)
        self.embedding = parameter(self, TABLE, "embedding", start, axes, shape)

    def __call__(self, tokens_BL: Array) -> Array:
        """Returns rows of the table, [B, L, D] in the model's dtype; unknown ids give NaN.

        Differences: T5X multiplies by one-hot vectors, for older TPUs; values and gradients agree.
        """
        rows_BLD = jnp.take(self.embedding, tokens_BL, axis=0, mode="fill", fill_value=jnp.nan)
        rows_BLD = rows_BLD.astype(self.shared.dtype)
        if self.shared.scale_embeddings:
            # The factor is rounded, as in Gemma's code.
            rows_BLD *= jnp.asarray(self.shared.emb_dim**0.5, self.shared.dtype)
        return rows_BLD

    def attend(self, y_BLD: Array) -> Array:
        """Returns inner products with all rows of the table, float32 [B, L, V]."""
        dtype = self.shared.dtype
        table_VD = self.embedding.astype(dtype)
        return einsum_float32("bld,vd->blv", y_BLD.astype(dtype), table_VD)


@dataclass(frozen=True)
class Embedding:
    """The embedding slot: maps token and position vectors [B, L, D] to a stack's first states.

    Adds the vector of the token's type if `num_types` is set, whatever the type if it is 1, and
    normalises if `norm` is set.

    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2; google-research/bert for the norm.
    """

    norm: Norm | None = None
    num_types: int = 0

    def __call__(self, x_BLD: Array, rows: Rows, shared: Shared) -> Array:
        if self.num_types:
            x_BLD += _TypeEmbedder(self.num_types).build(shared, "type_embedder")(rows)
        norm = self.norm and self.norm.build(shared, "embedding_layer_norm")
        return norm(x_BLD) if norm else x_BLD


@dataclass(frozen=True)
class _TypeEmbedder(Buildable):
    num_types: int

    def run(self, module: Built, rows: Rows) -> Array:
        shared, axes = module.shared, ("token_types", "embed")
        start, shape = shared.parametrisation.embedding(), (self.num_types, shared.emb_dim)
        table_TD = parameter(module, TABLE, "embedding", start, axes, shape).astype(shared.dtype)
        if rows.type_BL is None or self.num_types == 1:
            return table_TD[0]
        return jnp.take(table_TD, rows.type_BL, axis=0, mode="fill", fill_value=jnp.nan)


class Logits(Buildable):
    """The logits slot: maps [B, L, D] to float32 [B, L, V] in the caller's scope."""

    tied: bool = False

    def __call__(self, y_BLD: Array, embedder: TokenEmbedder, shared: Shared) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class DenseLogits(Logits):
    """Logits from a kernel of their own, `logits_dense`, times `scale`, then soft-capped."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, y_BLD: Array, embedder: TokenEmbedder, shared: Shared) -> Array:
        axes, start = ("embed", "vocab"), shared.parametrisation.logits()
        dense = shared.dense(shared.vocab_size, axes, start, "logits_dense", True, bias=False)
        logits_BLV = dense(y_BLD)
        return softcapped(logits_BLV if self.scale == 1 else logits_BLV * self.scale, self.softcap)


@dataclass(frozen=True)
class TiedLogits(Logits):
    """Products with the token embedding, times `scale`, then soft-capped.

    A scale of None is the parametrisation's multiplier.
    """

    scale: float | None = None
    softcap: float | None = None
    tied = True

    def __call__(self, y_BLD: Array, embedder: TokenEmbedder, shared: Shared) -> Array:
        scale = self.scale
        if scale is None:
            scale = shared.parametrisation.tied_logits_multiplier(shared.emb_dim)
        return softcapped(embedder.attend(y_BLD) * scale, self.softcap)


@dataclass(frozen=True)
class TransformedLogits(Logits):
    """Applies `logits` to projected, activated and normalised states, and adds a bias.

    `bias` adds one to the projection, too.

    Source: google-research/bert, `run_pretraining.py`, `get_masked_lm_output`.
    """

    activation: str
    norm: Norm
    logits: Logits
    bias: bool = True

    @property
    def tied(self) -> bool:  # type: ignore[override]
        return self.logits.tied

    def __call__(self, y_BLD: Array, embedder: TokenEmbedder, shared: Shared) -> Array:
        return self.build(shared, "mlm_head")(y_BLD, embedder)

    def run(self, module: Built, y_BLD: Array, embedder: TokenEmbedder) -> Array:
        shared, zeros = module.shared, nn.initializers.zeros
        # "mlp" names the output channels because a kernel cannot have the same axis twice.
        axes, start = ("embed", "mlp"), shared.parametrisation.feed_forward()
        dense = shared.dense(shared.emb_dim, axes, start, "dense", bias=self.bias)
        y_BLD = ACTIVATIONS[self.activation](dense(y_BLD))
        logits_BLV = self.logits(self.norm.build(shared, "layer_norm")(y_BLD), embedder, shared)
        shape = (shared.vocab_size,)
        return logits_BLV + parameter(module, TABLE, "logits_bias", zeros, ("vocab",), shape)


class RowClassifier(nn.Module):
    """Computes float32 logits [B, 2] from each row's first state.

    Source: google-research/bert, `modeling.py` (pooler) and `get_next_sentence_output`.
    """

    shared: Shared

    @nn.compact
    def __call__(self, y_BLD: Array) -> Array:
        shared, parametrisation = self.shared, self.shared.parametrisation
        dense = partial(shared.dense, bias=True, use=ROW_KERNEL)
        axes, start = ("embed", "mlp"), parametrisation.feed_forward()
        pooled_B1D = jnp.tanh(dense(shared.emb_dim, axes, start, "pooler")(y_BLD[:, :1]))
        axes, start = ("embed", "classes"), parametrisation.logits()
        logits = dense(2, axes, start, "logits", float32_output=True)
        return logits(pooled_B1D)[:, 0]
