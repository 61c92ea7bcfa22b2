"""Dynamic tanh, an element-wise function that replaces a norm.

Dimensions: B batch, L length, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Built
from trainer.model.norms import Norm
from trainer.model.parameters import TABLE, parameter


@dataclass(frozen=True)
class DynamicTanh(Norm):
    """gain * tanh(alpha * x) + bias; one learned alpha, initially `alpha`, for all channels.

    Source: Zhu et al. 2025 (arXiv:2503.10622), section 4; 0.5 from section 7.
    """

    alpha: float = 0.5
    gain = "vector"
    has_bias = True

    def run(self, module: Built, axis: str, x_BLD: jax.Array) -> jax.Array:
        ones, zeros, shape = nn.initializers.ones, nn.initializers.zeros, x_BLD.shape[-1:]
        start = nn.initializers.constant(self.alpha)
        alpha = parameter(module, TABLE, "alpha", start, ("unmodeled",), (1,))
        scale_D = parameter(module, TABLE, "scale", ones, (axis,), shape)
        bias_D = parameter(module, TABLE, "bias", zeros, (axis,), shape)
        out_BLD = jnp.tanh(alpha * x_BLD.astype(jnp.float32)) * scale_D + bias_D
        return out_BLD.astype(module.shared.dtype)
