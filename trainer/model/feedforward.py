"""Feed-forward sublayers, which act on each position separately.

Dimensions: B batch, L length, D model, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.dense import Buildable, Built, tracing_device
from trainer.model.masks import Rows
from trainer.model.part_facts import T5X, TRANSFORMERS

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": nn.gelu,  # the tanh approximation, as in T5X
        "gelu_erf": partial(nn.gelu, approximate=False),  # x times the normal CDF, as in BERT
        "linear": lambda x: x,
        "relu": nn.relu,
        "silu": nn.silu,  # also called swish
        # Source: So et al. 2021 (arXiv:2109.08668), section 3.1.
        "squared_relu": lambda x: jnp.square(nn.relu(x)),
    }
)


# Variable collection in which sublayers store their `Sown`.
SOWN = "sown"


class Sown(NamedTuple):
    """What sublayers add to a model's output, in float32: a loss, and metrics as (sum, weight)."""

    loss: Array
    metrics: dict[str, tuple[Array, Array]]


def sow(module: nn.Module, sown: Sown) -> None:
    """Stores what a sublayer adds to the model's output, where the caller collects it."""
    module.sow(SOWN, "sums", sown)


def sown_of(variables: Mapping[str, Any]) -> Sown:
    """Returns the sum of all that a model's modules stored in SOWN."""
    each = jax.tree.leaves(variables, is_leaf=lambda node: isinstance(node, Sown))
    # A scan stores the values of its layers in one array.
    sums = [jax.tree.map(jnp.sum, sown) for sown in each]
    return jax.tree.map(lambda *parts: sum(parts), *sums)


class FeedForward(Buildable):
    """The feed-forward slot. Its module maps (x_BLD, rows, deterministic) to [B, L, D].

    `build` returns None if layers have neither such a sublayer nor its norm. `bias` None uses the
    model's setting. `sows` names the metrics that it stores beside a loss (`sow`), and None means
    neither; one that sows draws random numbers in training. If not `pointwise`, positions read
    other positions, and the module also gets `cache`.
    """

    activations: tuple[str, ...] = ()
    bias: bool | None = None
    sows: tuple[str, ...] | None = None
    pointwise: bool = True
    exports: tuple[str, ...] = ()

    def of_layer(self, number: int) -> FeedForward:
        """Returns the sublayer of a stack's layer, counted from 1."""
        return self

    def decoding(self, in_decoder: bool) -> FeedForward:
        """Returns the sublayer to decode with, in which no row depends on another."""
        return self


@dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """No feed-forward sublayer: layers consist only of mixers."""

    def build(self, *arguments: Any) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class Mlp(FeedForward):
    """The product of one or more activated projections, projected back.

    One activation gives T5 1.0's plain layer (kernel `wi`), two give T5 1.1's gated layer
    (`wi_0`, `wi_1`). `dropout` drops hidden units, as in T5 but not in BERT.

    Source: Shazeer 2020 (arXiv:2002.05202).
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dropout: bool = True
    bias: bool | None = None
    exports = (TRANSFORMERS, T5X)

    def run(self, module: Built, x_BLD: Array, rows: Rows | None, deterministic: bool) -> Array:
        shared, parametrisation = module.shared, module.shared.parametrisation
        count, projected = len(self.activations), []
        for name in ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]:
            axes, start = ("embed", "mlp"), parametrisation.feed_forward()
            project = shared.dense(self.mlp_dim, axes, start, name, bias=self.bias)
            projected.append(project(x_BLD))

        if tracing_device().activates_once:
            projected = _gradients_stored(projected)

        # Recomputing this in the backward pass is cheaper than keeping it, as a scan would.
        @partial(jax.checkpoint, prevent_cse=False)
        def activate(projected: list[Array]) -> Array:
            pairs = zip(self.activations, projected, strict=True)
            return reduce(mul, (ACTIVATIONS[name](x_BLF) for name, x_BLF in pairs))

        hidden_BLF = activate(projected)
        if self.dropout:
            hidden_BLF = shared.dropout()(hidden_BLF, deterministic)
        axes, start = ("mlp", "embed"), parametrisation.feed_forward_out()
        return shared.dense(shared.emb_dim, axes, start, "wo", bias=self.bias)(hidden_BLF)


@jax.custom_vjp
def _gradients_stored(projected: list[Array]) -> list[Array]:
    """Returns the arrays; their gradients are computed once, for all products that read them.

    Otherwise XLA computes the activations and their derivatives inside each of these products.
    """
    return projected


_gradients_stored.defvjp(
    lambda projected: (projected, None),
    lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


def mlp(config: Any, options: Any) -> FeedForward:
    activations, bias = config.value("mlp_activations"), config.value("mlp_bias")
    return Mlp(config.mlp_dim, activations, drops_hidden(config), bias)


NO_FEED_FORWARD = NoFeedForward()


def drops_hidden(config: Any) -> bool:
    """Returns True if hidden units are dropped, as in T5; BERT-like models drop only outputs."""
    return config.has_decoder
