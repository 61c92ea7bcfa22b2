"""Primer's norm and its placement, and Mesh TensorFlow's initial values.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.norms import BRANCH_NORM, PRE_NORM, Placements, ScaledNorm, inverse_root
from trainer.model.parametrisation import Initializer, Shape, StandardParametrisation
from trainer.model.part_facts import TRANSFORMERS


@dataclass(frozen=True)
class PrimerNorm(ScaledNorm):
    """LayerNorm with the variance computed as the mean of x (x - mean), clipped at 0.

    It differs from the usual variance only by rounding, which can make it negative far from 0.

    Source: So et al. 2021 (arXiv:2109.08668), appendix A; epsilon from the authors' code.
    """

    has_bias = True
    exports = (TRANSFORMERS,)

    def normalised(self, x_BLD: Array) -> Array:
        centred_BLD = x_BLD - jnp.mean(x_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(x_BLD * centred_BLD, axis=-1, keepdims=True)
        is_zero_BL1 = jnp.logical_not(jnp.any(centred_BLD, axis=-1, keepdims=True))
        return centred_BLD * inverse_root(jnp.maximum(variance_BL1, 0.0), is_zero_BL1, self.epsilon)


# Source: So et al. 2021 (arXiv:2109.08668), appendix A.
ALTERNATING_NORMS = Placements(PRE_NORM, feed_forward=BRANCH_NORM)


@dataclass(frozen=True)
class PrimerParametrisation(StandardParametrisation):
    """T5X's parametrisation, except for kernels in feed-forward, routers, experts and convolutions.

    Those kernels are normal with standard deviation sqrt(`variance` / fan_in), truncated at twice
    that. Truncation lowers the actual deviation to 0.88 of it; flax's `variance_scaling` would
    correct for this. `variance` is 1, or 0.1 in models with experts.

    Source: google-research/primer, `gin/models/*.gin`; Mesh TensorFlow, `layers.dense`.
    """

    variance: float = 1.0

    def feed_forward(self) -> Initializer:
        def initializer(key: Array, shape: Shape, dtype: Any = None) -> Array:
            deviation = (self.variance / shape[-2]) ** 0.5
            return nn.initializers.truncated_normal(deviation)(key, shape, dtype)

        return initializer


def parametrisation(config: Any, options: Any) -> PrimerParametrisation:
    # Source of 0.1: google-research/primer, `gin/models/switch_*.gin`.
    experts = getattr(config.part("feed_forward").options, "experts", 0)
    variance = options.scale or (0.1 if experts else 1.0)
    return PrimerParametrisation(variance=variance)
