"""Norms, and their places in a layer.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.capabilities import T5X, TRANSFORMERS
from trainer.model.dense import Shared
from trainer.model.parameters import TABLE, parameter

Sublayer = Callable[[jax.Array], jax.Array]


class Norm(Protocol):
    """The norm slot. Its module maps [B, L, D] to [B, L, D].

    Parameters are `scale` unless `gain`, one of `parts.GAINS`, is "none", and `bias` with
    `has_bias`.
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
class ScaledNorm:
    """Base of norms that treat each position separately: `normalised`, then scale and bias."""

    epsilon: float = 1e-6
    gain: str = "vector"

    @property
    def has_bias(self) -> bool:
        return False

    @property
    def exports(self) -> tuple[str, ...]:
        return ()

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        raise NotImplementedError

    def build(self, shared: Shared, name: str, axis: str = "embed") -> nn.Module:
        return _Norm(self, shared, axis, name=name)


@dataclass(frozen=True)
class RMSNorm(ScaledNorm):
    """Division by the root mean square, then a learned scale; no mean or bias.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); epsilon from T5X's `LayerNorm`.
    """

    @property
    def exports(self) -> tuple[str, ...]:
        return (TRANSFORMERS, T5X) if self == RMSNorm() else (TRANSFORMERS,)

    def normalised(self, x_BLD: jax.Array) -> jax.Array:
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(mean_square_BL1 + self.epsilon)


@dataclass(frozen=True)
class LayerNorm(ScaledNorm):
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


class _Norm(nn.Module):
    spec: ScaledNorm
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

        # Recomputing in the backward pass is cheaper than keeping it in float32, as a scan would.
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
    """The identity, for a stack whose last layer has already normalised."""

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
class PostNorm:
    """`norm(x + sublayer(x))`: every sublayer reads normalised states, as in BERT."""

    prefix = "post"

    def __call__(
        self, x_BLD: jax.Array, norm: Sublayer, sublayer: Sublayer, dropout: Sublayer
    ) -> jax.Array:
        return norm(x_BLD + dropout(sublayer(x_BLD)))


class Placements(NamedTuple):
    """Placements of a layer's norms; None means that of its other sublayers."""

    sublayers: NormPlacement
    feed_forward: NormPlacement | None = None
    mixer: NormPlacement | None = None


def rms_norm(config: Any, options: Any) -> Norm:
    """Returns the norm for `NormOptions`."""
    return RMSNorm(options.epsilon, options.gain)


def layer_norm(config: Any, options: Any) -> Norm:
    """Returns the norm for `LayerNormOptions`."""
    return LayerNorm(options.epsilon, options.gain, options.bias)


def before_sublayers(config: Any, options: Any) -> Placements:
    """Returns norms before all sublayers."""
    return Placements(PreNorm())


def after_sums(config: Any, options: Any) -> Placements:
    """Returns norms after all sums."""
    return Placements(PostNorm())
