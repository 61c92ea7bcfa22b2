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
    """The norm-placement slot: one residual branch, from its norm and its sublayer."""

    def __call__(self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer) -> jax.Array: ...


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
class PreNorm:
    """`x + sublayer(norm(x))`: the residual stream itself is never normalised."""

    def __call__(self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer) -> jax.Array:
        return x_BLD + sublayer(norm(x_BLD))
