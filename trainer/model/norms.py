"""Norms, and their places in a layer.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

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
      gain: one of `options.GAINS`; "none": it has no parameter `scale`.
      has_bias: it has a parameter `bias`.
      exports: the formats it can be exported to.
    """

    @property
    def gain(self) -> str: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def exports(self) -> tuple[str, ...]: ...

    def build(self, shared: Shared, name: str, axis: str = "embed") -> nn.Module:
        """Returns the module; `axis` is T5X's name of the axis that it normalises."""
        ...


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
class _Gained:
    """The fields that norms have in common; `gain` is one of `options.GAINS`."""

    epsilon: float = 1e-6
    gain: str = "vector"

    def build(self, shared: Shared, name: str, axis: str = "embed") -> nn.Module:
        return _ScaledNorm(cast(Any, self), shared, axis, name=name)


@dataclass(frozen=True)
class RMSNorm(_Gained):
    """Division by the root mean square and a learned scale, without mean or bias.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); epsilon from T5X's `LayerNorm`.
    """

    has_bias = False

    @property
    def exports(self) -> tuple[str, ...]:
        return (TRANSFORMERS, T5X) if self == RMSNorm() else (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(mean_square_BL1 + self.epsilon)


@dataclass(frozen=True)
class LayerNorm(_Gained):
    """Mean 0 and variance 1 over the channels, then a learned scale and bias.

    Source: Ba et al. 2016 (arXiv:1607.06450); epsilon from Mesh TensorFlow, where
    google-research/bert has 1e-12.
    """

    has_bias: bool = True
    exports = (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        x_BLD -= jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(variance_BL1 + self.epsilon)


@dataclass(frozen=True)
class PrimerNorm(_Gained):
    """LayerNorm whose variance is the mean of x (x - mean).

    The two variances differ only by rounding, which can make this one negative far from 0: it is
    clipped at 0.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A; epsilon from their code.
    """

    has_bias = True
    exports = (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        centred_BLD = x_BLD - jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(x_BLD * centred_BLD, axis=-1, keepdims=True)
        return centred_BLD * jax.lax.rsqrt(jnp.maximum(variance_BL1, 0.0) + self.epsilon)


class _ScaledNorm(nn.Module):
    """A norm in float32 with its learned scale and, if `has_bias`, a learned bias."""

    spec: RMSNorm | LayerNorm | PrimerNorm
    shared: Shared
    axis: str

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        spec, zeros = self.spec, nn.initializers.zeros
        axes, shape = (self.axis,), x_BLD.shape[-1:]
        scale_D = None
        if spec.gain == "scalar":
            one = parameter(self, TABLE, "scale", nn.initializers.ones, ("unmodeled",), (1,))
            scale_D = jnp.broadcast_to(one, shape)
        elif spec.gain == "offset":
            scale_D = 1.0 + parameter(self, TABLE, "scale", zeros, axes, shape)
        elif spec.gain == "vector":
            scale_D = parameter(self, TABLE, "scale", nn.initializers.ones, axes, shape)
        bias_D = parameter(self, TABLE, "bias", zeros, axes, shape) if spec.has_bias else None

        # Cheaper to compute again in the backward pass than to keep in float32, as a scan would.
        @partial(jax.checkpoint, prevent_cse=False)
        def normalise(
            x_BLD: jax.Array, scale_D: jax.Array | None, bias_D: jax.Array | None
        ) -> jax.Array:
            out_BLD = spec.normalised(x_BLD.astype(jnp.float32))
            if scale_D is not None:
                out_BLD *= scale_D
            return (out_BLD if bias_D is None else out_BLD + bias_D).astype(self.shared.dtype)

        return normalise(x_BLD, scale_D, bias_D)


@dataclass(frozen=True)
class NoNorm:
    """The identity, for the end of a stack whose last layer has normalised already."""

    gain = "none"
    has_bias = False
    exports = (TRANSFORMERS,)

    def build(self, shared: Shared, name: str, axis: str = "embed") -> nn.Module:
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
class PreNormWithoutResidual:
    """`sublayer(norm(x))`: what the sublayer does not pass on is lost.

    Source: "sparse_seqlen" of MARCH (2023).
    """

    prefix = "pre"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return dropout(sublayer(norm(x_BLD)))


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
