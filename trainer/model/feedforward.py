"""Feed-forward sublayers: what happens to each position by itself.

Dimensions: B batch, L length, D model, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
from types import MappingProxyType
from typing import Protocol

import jax
from flax import linen as nn

from trainer.model.dense import Dense, Shared


def _linear(x: jax.Array) -> jax.Array:
    return x


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "gelu": nn.gelu,  # the tanh approximation, as in T5X
        "linear": _linear,
        "relu": nn.relu,
        "silu": nn.silu,
    }
)


class FeedForward(Protocol):
    """The feed-forward slot. Its module maps x_BLD to [B, L, D]."""

    def build(self, shared: Shared, name: str) -> nn.Module: ...


@dataclass(frozen=True)
class Mlp:
    """The product of one or more activated projections, projected back; no biases.

    One activation gives the plain layer of T5 1.0 (kernel `wi`), two the gated one of T5 1.1
    (`wi_0`, `wi_1`). Names are keys of `ACTIVATIONS`.

    Source: Shazeer 2020 (arXiv:2002.05202).
    """

    mlp_dim: int
    activations: tuple[str, ...]

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _Mlp(self, shared, name=name)


class _Mlp(nn.Module):
    spec: Mlp
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array, deterministic: bool) -> jax.Array:
        dtype, initializer = self.shared.dtype, self.shared.parametrisation.feed_forward()
        activations = self.spec.activations
        names = ["wi"] if len(activations) == 1 else [f"wi_{i}" for i in range(len(activations))]
        factors = []
        for name, activation in zip(names, activations, strict=True):
            project = Dense(self.spec.mlp_dim, ("embed", "mlp"), initializer, dtype, name=name)
            factors.append(ACTIVATIONS[activation](project(x_BLD)))
        hidden_BLF = self.shared.dropout()(reduce(mul, factors), deterministic)
        out = Dense(self.shared.emb_dim, ("mlp", "embed"), initializer, dtype, name="wo")
        return out(hidden_BLF)
