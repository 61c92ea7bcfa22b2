"""Norms, and their places in a layer.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared
from trainer.model.facts import T5X, TRANSFORMERS
from trainer.model.parameters import TABLE, parameter

Sublayer = Callable[[jax.Array], jax.Array]


class Norm(Protocol):
    """The norm slot. Its module maps [B, L, D] to [B, L, D].

    Attributes:
      has_bias: it has a parameter `bias` besides `scale`.
      exports: the formats it can be exported to.
    """

    @property
    def has_bias(self) -> bool: ...
    @property
    def exports(self) -> tuple[str, ...]: ...

    def build(self, shared: Shared, name: str) -> nn.Module: ...


class NormPlacement(Protocol):
    """The norm-placement slot: one residual branch, made of a norm, a sublayer and dropout.

    `prefix` begins the names of a layer's norms: "pre" gives `pre_mlp_layer_norm`.
    """

    @property
    def prefix(self) -> str: ...

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array: ...


@dataclass(frozen=True)
class RMSNorm:
    """Division by the root mean square and a learned scale, without mean or bias.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); epsilon from T5X's `LayerNorm`.
    """

    epsilon: float = 1e-6
    has_bias = False
    exports = (TRANSFORMERS, T5X)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(mean_square_BL1 + self.epsilon)

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _ScaledNorm(self, shared, name=name)


@dataclass(frozen=True)
class LayerNorm:
    """Mean 0 and variance 1 over the channels, then a learned scale and bias.

    Source: Ba et al. 2016 (arXiv:1607.06450); epsilon from google-research/bert.
    """

    epsilon: float = 1e-12
    has_bias = True
    exports = (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        x_BLD -= jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(variance_BL1 + self.epsilon)

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _ScaledNorm(self, shared, name=name)


@dataclass(frozen=True)
class PrimerNorm:
    """LayerNorm whose variance is the mean of x (x - mean).

    The two variances differ only by rounding, which can make this one negative far from 0: it is
    clipped at 0.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A; epsilon from their code.
    """

    epsilon: float = 1e-6
    has_bias = True
    exports = (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        centred_BLD = x_BLD - jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(x_BLD * centred_BLD, axis=-1, keepdims=True)
        return centred_BLD * jax.lax.rsqrt(jnp.maximum(variance_BL1, 0.0) + self.epsilon)

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _ScaledNorm(self, shared, name=name)


class _ScaledNorm(nn.Module):
    """A norm in float32 with a learned scale and, if `has_bias`, a learned bias."""

    spec: RMSNorm | LayerNorm | PrimerNorm
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        axes, shape = ("embed",), x_BLD.shape[-1:]
        scale_D = parameter(self, TABLE, "scale", ones, axes, shape)
        bias_D = parameter(self, TABLE, "bias", zeros, axes, shape) if self.spec.has_bias else None

        # Cheaper to compute again in the backward pass than to keep in float32, as a scan would.
        @partial(jax.checkpoint, prevent_cse=False)
        def normalise(x_BLD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None) -> jax.Array:
            out_BLD = self.spec.normalised(x_BLD.astype(jnp.float32)) * scale_D
            return (out_BLD if bias_D is None else out_BLD + bias_D).astype(self.shared.dtype)

        return normalise(x_BLD, scale_D, bias_D)


@dataclass(frozen=True)
class NoNorm:
    """The identity, for the end of a stack whose last layer has normalised already."""

    has_bias = False
    exports = (TRANSFORMERS,)

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _NoNorm(name=name)


class _NoNorm(nn.Module):
    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD


@dataclass(frozen=True)
class PreNorm:
    """`x + sublayer(norm(x))`: the residual stream itself is never normalised."""

    prefix = "pre"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return x_BLD + dropout(sublayer(norm(x_BLD)))


@dataclass(frozen=True)
class PostNorm:
    """`norm(x + sublayer(x))`: every sublayer reads normalised states, as in BERT."""

    prefix = "post"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return norm(x_BLD + dropout(sublayer(x_BLD)))


@dataclass(frozen=True)
class BranchNorm:
    """`x + norm(sublayer(x))`: the output of the branch is normalised, not the sum.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A: every second norm of Primer.
    """

    prefix = "post"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return x_BLD + dropout(norm(sublayer(x_BLD)))
