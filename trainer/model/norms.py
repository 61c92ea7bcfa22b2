"""Norms, and where in a layer they stand.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared, parameter

Sublayer = Callable[[jax.Array], jax.Array]


class Norm(Protocol):
    """The norm slot."""

    def build(self, shared: Shared, name: str) -> nn.Module: ...


class NormPlacement(Protocol):
    """The norm-placement slot: one residual branch, from its norm, its sublayer and dropout.

    `prefix` begins the names of a layer's norms: "pre" gives `pre_mlp_layer_norm`.
    """

    @property
    def prefix(self) -> str: ...

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array: ...


@dataclass(frozen=True)
class RMSNorm:
    """Division by the root mean square, with a learned scale and neither mean nor bias.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); epsilon from T5X's `LayerNorm`.
    """

    epsilon: float = 1e-6

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _RMSNorm(self, shared, name=name)


class _RMSNorm(nn.Module):
    spec: RMSNorm
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = parameter(self, "scale", nn.initializers.ones, ("embed",), x_BLD.shape[-1:])
        x_BLD = x_BLD.astype(jnp.float32)
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        normalised_BLD = x_BLD * jax.lax.rsqrt(mean_square_BL1 + self.spec.epsilon)
        return (normalised_BLD * scale_D).astype(self.shared.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """Mean 0 and variance 1 over the channels, then a learned scale and bias, in float32.

    Source: Ba et al. 2016 (arXiv:1607.06450); epsilon from google-research/bert.
    """

    epsilon: float = 1e-12

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _LayerNorm(self, shared, name=name)


class _LayerNorm(nn.Module):
    spec: LayerNorm
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = parameter(self, "scale", nn.initializers.ones, ("embed",), x_BLD.shape[-1:])
        bias_D = parameter(self, "bias", nn.initializers.zeros, ("embed",), x_BLD.shape[-1:])
        x_BLD = x_BLD.astype(jnp.float32)
        x_BLD -= jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        normalised_BLD = x_BLD * jax.lax.rsqrt(variance_BL1 + self.spec.epsilon)
        return (normalised_BLD * scale_D + bias_D).astype(self.shared.dtype)


@dataclass(frozen=True)
class PrimerNorm:
    """LayerNorm whose variance is the mean of x (x - mean), in float32.

    Both are the same number but for rounding, which far from 0 can make it negative: it is kept at
    0 or above.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A; epsilon from their code.
    """

    epsilon: float = 1e-6

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _PrimerNorm(self, shared, name=name)


class _PrimerNorm(nn.Module):
    spec: PrimerNorm
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = parameter(self, "scale", nn.initializers.ones, ("embed",), x_BLD.shape[-1:])
        bias_D = parameter(self, "bias", nn.initializers.zeros, ("embed",), x_BLD.shape[-1:])
        normalised_BLD = primer_normalised(x_BLD.astype(jnp.float32), self.spec.epsilon)
        return (normalised_BLD * scale_D + bias_D).astype(self.shared.dtype)


def primer_normalised(x_BLD: jax.Array, epsilon: float) -> jax.Array:
    """`PrimerNorm` before scale and bias, in the dtype of `x_BLD`."""
    centred_BLD = x_BLD - jnp.mean(x_BLD, axis=-1, keepdims=True)
    variance_BL1 = jnp.mean(x_BLD * centred_BLD, axis=-1, keepdims=True)
    return centred_BLD * jax.lax.rsqrt(jnp.maximum(variance_BL1, 0.0) + epsilon)


@dataclass(frozen=True)
class NoNorm:
    """The identity: for the end of a stack whose last layer has normalised already."""

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
    """`norm(x + sublayer(x))`: every sublayer begins with normalised states, as in BERT."""

    prefix = "post"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return norm(x_BLD + dropout(sublayer(x_BLD)))


@dataclass(frozen=True)
class BranchNorm:
    """`x + norm(sublayer(x))`: what a branch puts out is normalised, not the sum.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A: every second norm of Primer.
    """

    prefix = "post"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return x_BLD + dropout(norm(sublayer(x_BLD)))
