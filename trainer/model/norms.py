"""Norms and where a layer applies them.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.dense import Built, Shared
from trainer.model.parameters import TABLE, parameter
from trainer.model.part_facts import T5X, TRANSFORMERS

Function = Callable[[Array], Array]


class Norm:
    """The norm slot: its module maps [B, L, D] to [B, L, D]; `run` is as in `Buildable`.

    Parameters are `scale` unless `gain`, one of `registry.GAINS`, is "none", and `bias` with
    `has_bias`.
    """

    gain: str = "none"

    @property
    def has_bias(self) -> bool:
        return False

    @property
    def exports(self) -> tuple[str, ...]:
        return ()

    def build(self, shared: Shared, name: str, axis: str = "embed") -> nn.Module:
        """Returns the module; `axis` is T5X's name for the axis that it normalises."""
        return Built(self, shared, (axis,), name=name)


@dataclass(frozen=True)
class ScaledNorm(Norm):
    """Base of norms that treat each position separately: `normalised`, then scale and bias."""

    epsilon: float = 1e-6
    gain: str = "vector"

    def normalised(self, x_BLD: Array) -> Array:
        raise NotImplementedError

    def run(self, module: Built, axis: str, x_BLD: Array) -> Array:
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        axes, shape, scale_D = (axis,), x_BLD.shape[-1:], None
        if self.gain == "scalar":
            one = parameter(module, TABLE, "scale", ones, ("unmodeled",), (1,))
            scale_D = jnp.broadcast_to(one, shape)
        elif self.gain == "offset":
            scale_D = 1.0 + parameter(module, TABLE, "scale", zeros, axes, shape)
        elif self.gain == "vector":
            scale_D = parameter(module, TABLE, "scale", ones, axes, shape)
        bias_D = parameter(module, TABLE, "bias", zeros, axes, shape) if self.has_bias else None

        # Recomputing in the backward pass is cheaper than keeping this in float32, as a scan would.
        @partial(jax.checkpoint, prevent_cse=False)
        def normalise(x_BLD: Array, scale_D: Array | None, bias_D: Array | None) -> Array:
            out_BLD = self.normalised(x_BLD.astype(jnp.float32))
            if scale_D is not None:
                out_BLD *= scale_D
            return (out_BLD if bias_D is None else out_BLD + bias_D).astype(module.shared.dtype)

        return normalise(x_BLD, scale_D, bias_D)


def inverse_root(mean_square_BL1: Array, is_zero_BL1: Array, epsilon: float) -> Array:
    """Returns 1 / sqrt(mean_square + epsilon), and 1 at positions that are all zero.

    These stay zero either way, but their gradient would grow by 1 / sqrt(epsilon), 1,000, in every
    layer: where a stream begins with zeros, as at the padding row that transformers initialises so,
    it would overflow and make every other gradient NaN.
    """
    return jnp.where(is_zero_BL1, 1.0, jax.lax.rsqrt(mean_square_BL1 + epsilon))


@dataclass(frozen=True)
class RMSNorm(ScaledNorm):
    """Division by the root mean square, then a learned scale; no mean or bias.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); epsilon from T5X's `LayerNorm`.
    """

    @property
    def exports(self) -> tuple[str, ...]:
        return (TRANSFORMERS, T5X) if self == RMSNorm() else (TRANSFORMERS,)

    def normalised(self, x_BLD: Array) -> Array:
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * inverse_root(mean_square_BL1, mean_square_BL1 == 0, self.epsilon)


@dataclass(frozen=True)
class LayerNorm(ScaledNorm):
    """Mean 0 and variance 1 over the channels, then a learned scale and bias.

    Source: Ba et al. 2016 (arXiv:1607.06450); epsilon from Mesh TensorFlow;
    google-research/bert uses 1e-12.
    """

    bias: bool = True
    exports = (TRANSFORMERS,)

    @property
    def has_bias(self) -> bool:
        return self.bias

    def normalised(self, x_BLD: Array) -> Array:
        x_BLD -= jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * inverse_root(variance_BL1, variance_BL1 == 0, self.epsilon)


@dataclass(frozen=True)
class NoNorm(Norm):
    """The identity, for a stack whose last layer has already normalised its output."""

    exports = (TRANSFORMERS,)

    def run(self, module: Built, axis: str, x_BLD: Array) -> Array:
        return x_BLD


class NormPlacement(NamedTuple):
    """The norm-placement slot: one residual branch, made of a norm, a sublayer and dropout.

    `prefix` begins the names of a layer's norms: "pre" gives `pre_mlp_layer_norm`. `branch` maps
    (x_BLD, norm, sublayer, dropout) to [B, L, D]. With `output`, which begins its name, a second
    norm follows the sublayer.
    """

    prefix: str
    branch: Callable[[Array, Function, Function, Function], Array]
    output: str | None = None


def _pre(x: Array, norm: Function, sublayer: Function, dropout: Function) -> Array:
    return x + dropout(sublayer(norm(x)))


def _without_norm(x: Array, norm: Function, sublayer: Function, dropout: Function) -> Array:
    return x + dropout(sublayer(x))


def _post(x: Array, norm: Function, sublayer: Function, dropout: Function) -> Array:
    return norm(x + dropout(sublayer(x)))


def _on_branch(x: Array, norm: Function, sublayer: Function, dropout: Function) -> Array:
    return x + dropout(norm(sublayer(x)))


# The residual stream itself is never normalised.
PRE_NORM = NormPlacement("pre", _pre)
# The sublayer reads the residual stream itself.
WITHOUT_NORM = NormPlacement("pre", _without_norm)
# Normalises the output of the branch, not the sum.
BRANCH_NORM = NormPlacement("post", _on_branch)
# Every sublayer reads normalised states, as in BERT.
POST_NORM = NormPlacement("post", _post)


class Placements(NamedTuple):
    """Placements of a layer's norms; a sublayer that is None has the other sublayers' placement.

    `first_mixer` is the placement in a stack's first layer if it is another one.
    """

    sublayers: NormPlacement
    feed_forward: NormPlacement | None = None
    mixer: NormPlacement | None = None
    first_mixer: NormPlacement | None = None

    def of_first(self) -> Placements:
        """Returns the placements in a stack's first layer."""
        return self._replace(mixer=self.first_mixer or self.mixer)


BEFORE_SUBLAYERS, AFTER_SUMS = Placements(PRE_NORM), Placements(POST_NORM)
# The first mixer reads embeddings that have a norm of their own.
# Source: Warner et al. 2024 (arXiv:2412.13663), section 2.1.1.
BEFORE_ALL_BUT_FIRST = Placements(PRE_NORM, first_mixer=WITHOUT_NORM)
# Source: OLMo 2 (arXiv:2501.00656), section 3.2.
ON_BRANCHES = Placements(BRANCH_NORM)
# Source: Ding et al. 2021 (arXiv:2105.13290), section 2.4; Gemma 2 (arXiv:2408.00118).
SANDWICH = Placements(PRE_NORM._replace(output="post"))
