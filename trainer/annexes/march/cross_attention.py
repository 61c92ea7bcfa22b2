"""Alternative cross-attention (layerwise, to an encoder's keys, or merged), and databases.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K, N
entries of a database.

Source: MARCH (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from trainer.model.arrangements import Sublayer
from trainer.model.attention import attention
from trainer.model.dense import Buildable, Built, Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View, compare_heads, mix_heads, split_heads
from trainer.model.norms import Norm, NormPlacement
from trainer.model.parameters import Use, parameter
from trainer.model.positions import Positions, rotate
from trainer.model.stack_parts import CrossAttention, LayerHook, StackPart, Watched

# Entries are multiplied once per query; `GivenAttention.products_per_pair` counts that.
_ENTRIES = Use(None, decays=True)


class KeysAndValues(NamedTuple):
    """Unrotated keys, and values: each [B, S, H * K], or [B, N, K] if shared by all heads."""

    key_BSJ: Array
    value_BSJ: Array


@dataclass(frozen=True)
class GivenAttention(Buildable):
    """Softmax attention that projects only queries and outputs. Its source is `KeysAndValues`.

    Source: "no_key_value_weights_cross_attn" and "database" of MARCH (2023).
    """

    num_heads: int
    head_dim: int
    query_norm: Norm | None = None

    @property
    def products_per_pair(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def run(
        self, module: Built, x_BLD: Array, source: KeysAndValues, view: View, deterministic: bool
    ) -> Array:
        shared, positions = module.shared, view.positions
        width, axes = self.num_heads * self.head_dim, ("embed", "joined_kv")
        query = shared.dense(width, axes, shared.parametrisation.query(self.head_dim), "query")
        q_BLHK = split_heads(query(x_BLD), self.head_dim)
        if self.query_norm is not None:
            q_BLHK = self.query_norm.build(shared, "query_norm", "kv")(q_BLHK)
        k_BSGK, v_BSGK = (split_heads(joined, self.head_dim) for joined in source)
        if positions.angle_BLC is not None and positions.source_angle_BSC is not None:
            q_BLHK = rotate(q_BLHK, positions.angle_BLC, positions.amplitude)
            k_BSGK = rotate(k_BSGK, positions.source_angle_BSC, positions.amplitude)
        return mix_heads(shared, compare_heads(q_BLHK, k_BSGK), v_BSGK, view, deterministic)


@dataclass(frozen=True)
class Database(Buildable):
    """A stack's learned keys and values [N, K], which each of its layers reads.

    All rows, positions and heads share them. Every entry is visible, and none has a position.

    Source: "database" of MARCH (2023).
    """

    entries: int
    head_dim: int

    def run(self, module: Built, batch: int) -> KeysAndValues:
        shared, shape = module.shared, (self.entries, self.head_dim)
        start, axes = shared.parametrisation.attention(), ("unmodeled", "kv")

        def entries(name: str) -> Array:
            entry_NK = parameter(module, _ENTRIES, name, start, axes, shape)
            return jnp.broadcast_to(entry_NK.astype(shared.dtype), (batch, *shape))

        return KeysAndValues(entries("key"), entries("value"))


@dataclass(frozen=True)
class LookAtDatabase(LayerHook):
    """A sublayer that attends to a `Database`."""

    mixer: GivenAttention
    entries: int

    @property
    def products_per_position(self) -> int:
        return self.mixer.products_per_pair * self.entries

    def sublayer(
        self,
        shared: Shared,
        placement: NormPlacement,
        sources: Mapping[str, Any],
        deterministic: bool,
    ) -> Sublayer:
        read, entries = self.mixer.build(shared, "database_attention"), sources["database"]

        def look(y_BLD: Array, rows: Rows) -> Array:
            ones_BN = jnp.ones(entries.key_BSJ.shape[:2], jnp.int32)
            view = View(ones_BN[:1, None] > 0, Positions(), rows, Rows(ones_BN))
            return read(y_BLD, entries, view, deterministic)

        return Sublayer("database_layer_norm", placement, look)


def given_attention(config: Any) -> GivenAttention:
    """Returns attention to given keys and values, with the sizes of a configuration."""
    norm = config.build("norm") if config.query_key_norm else None
    return GivenAttention(config.num_heads, config.head_dim, norm)


def database(config: Any, options: Any) -> StackPart:
    """Returns the part that lets every layer read its stack's database."""
    entries = options.count
    hook = LookAtDatabase(given_attention(config), entries)
    return StackPart("database", hook, source=Database(entries, config.head_dim))


@dataclass(frozen=True)
class LeavesStates(LayerHook):
    """Leaves the states after a layer for the decoder layer of the same number."""

    def left(self, x_BLD: Array, watched: Watched) -> Array:
        return x_BLD

    def finished(self, left: Array, norm: Callable[[Array], Array]) -> Array:
        return norm(left)


@dataclass(frozen=True)
class LeavesKeys(LayerHook):
    """Leaves a layer's keys and values."""

    watches = ("key_BSJ", "value_BSJ")

    def left(self, x_BLD: Array, watched: Watched) -> KeysAndValues:
        return KeysAndValues(*(watched[name] for name in self.watches))


def layerwise(config: Any, options: Any) -> CrossAttention:
    """Returns attention to the states after the encoder layer of the same number."""
    return CrossAttention(attention(config), encoder=LeavesStates())


def encoder_keys(config: Any, options: Any) -> CrossAttention:
    """Returns attention to the keys and values of the encoder layer of the same number."""
    return CrossAttention(given_attention(config), encoder=LeavesKeys())
