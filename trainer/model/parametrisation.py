"""Parametrisations: how parameters are initialised and outputs scaled as widths change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import linen as nn

Initializer = Callable[..., jax.Array]


class Parametrisation(Protocol):
    """The parametrisation slot: the source of every initialiser and multiplier."""

    def embedding(self) -> Initializer: ...
    def query(self, head_dim: int) -> Initializer: ...
    def attention(self) -> Initializer: ...
    def attention_out(self) -> Initializer: ...
    def attention_scale(self, head_dim: int) -> float: ...
    def feed_forward(self) -> Initializer: ...
    def feed_forward_out(self) -> Initializer: ...
    def logits(self) -> Initializer: ...
    def relative_bias(self) -> Initializer: ...
    def tied_logits_multiplier(self, emb_dim: int) -> float: ...


@dataclass(frozen=True)
class StandardParametrisation:
    """T5X's parametrisation: kernels N(0, 1 / fan_in), token embedding N(0, 1).

    Attention logits are not scaled at run time: 1 / sqrt(head_dim) is folded into the initial
    query kernel.

    Source: google-research/t5x, `t5x/examples/t5/layers.py` and `network.py`.
    """

    def embedding(self) -> Initializer:
        return nn.initializers.normal(1.0)

    def query(self, head_dim: int) -> Initializer:
        return nn.initializers.variance_scaling(1.0 / head_dim, "fan_in", "normal")

    def attention(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal")

    def attention_out(self) -> Initializer:
        return self.attention()

    def attention_scale(self, head_dim: int) -> float:
        """Returns the factor of attention logits."""
        return 1.0

    def feed_forward(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    def feed_forward_out(self) -> Initializer:
        return self.feed_forward()

    def logits(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    def relative_bias(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")

    def tied_logits_multiplier(self, emb_dim: int) -> float:
        """Returns the factor of logits tied to an N(0, 1) embedding, which start near unit size."""
        return emb_dim**-0.5


@dataclass(frozen=True)
class PrimerParametrisation(StandardParametrisation):
    """T5X's, except for kernels of feed-forward sublayers, routers, experts and convolutions.

    Those are normal with standard deviation sqrt(`scale` / fan_in), cut at two deviations. The cut
    lowers the actual deviation to 0.88 of that; flax's `variance_scaling` would correct for it.
    `scale` is 1, or 0.1 in models with experts.

    Source: google-research/primer, `gin/models/*.gin`; Mesh TensorFlow, `layers.dense`.
    """

    scale: float = 1.0

    def feed_forward(self) -> Initializer:
        def initializer(key: jax.Array, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
            deviation = (self.scale / shape[-2]) ** 0.5
            return nn.initializers.truncated_normal(deviation)(key, shape, dtype)

        return initializer

    def logits(self) -> Initializer:
        return self.feed_forward()


@dataclass(frozen=True)
class BertParametrisation:
    """BERT's parametrisation: all parameters N(0, 0.02), cut at two standard deviations.

    Attention logits are scaled by 1 / sqrt(head_dim) at run time. Kernels that end a residual
    branch start smaller by sqrt(`residual_branches`), the number of branches that a pre-norm stack
    sums (twice its layers); with 1 they start like the others.

    Source: google-research/bert, `modeling.py`, `create_initializer`, for 0.02 and the cut, which
    lowers the actual deviation to 0.0176 as it does there; Megatron-LM,
    `scaled_init_method_normal`.
    """

    residual_branches: int = 1

    def embedding(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02)

    def query(self, head_dim: int) -> Initializer:
        return self.attention()

    def attention(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02)

    def attention_out(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02 / self.residual_branches**0.5)

    def attention_scale(self, head_dim: int) -> float:
        return head_dim**-0.5

    def feed_forward(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02)

    def feed_forward_out(self) -> Initializer:
        return self.attention_out()

    def logits(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02)

    def relative_bias(self) -> Initializer:
        return nn.initializers.truncated_normal(0.02)

    def tied_logits_multiplier(self, emb_dim: int) -> float:
        return 1.0
