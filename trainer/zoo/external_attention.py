"""Attention to given keys and values: an encoder layer's own, or a learned database.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K, N
entries of a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.arrangements import Sublayer
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View, compare_heads, mix_heads
from trainer.model.norms import Norm, NormPlacement
from trainer.model.parameters import Use, parameter
from trainer.model.positions import Positions, rotate
from trainer.model.stack_parts import LayerHook, StackPart

# Entries are multiplied once per query, counted by `GivenAttention.products_per_pair`.
_ENTRIES = Use(None, decays=True)


class KeysAndValues(NamedTuple):
    """Unrotated keys, and values: [B, S, H * K], or [B, N, K] shared by all heads."""

    key_BSJ: jax.Array
    value_BSJ: jax.Array


@dataclass(frozen=True)
class GivenAttention:
    """Softmax attention that projects only queries and outputs. Its source is `KeysAndValues`.

    Source: "no_key_value_weights_cross_attn" and "database" of MARCH (2023).
    """

    num_heads: int
    head_dim: int
    query_norm: Norm | None = None

    @property
    def products_per_pair(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _GivenAttention(self, shared, name=name)


class _GivenAttention(nn.Module):
    spec: GivenAttention
    shared: Shared

    @nn.compact
    def __call__(
        self, x_BLD: jax.Array, source_BSD: KeysAndValues, view: View, deterministic: bool
    ) -> jax.Array:
        spec, shared, positions = self.spec, self.shared, view.positions

        def heads(joined: jax.Array) -> jax.Array:
            return joined.reshape(*joined.shape[:2], -1, spec.head_dim)

        initializer = shared.parametrisation.query(spec.head_dim)
        width, axes = spec.num_heads * spec.head_dim, ("embed", "joined_kv")
        q_BLHK = heads(shared.dense(width, axes, initializer, "query")(x_BLD))
        if spec.query_norm is not None:
            q_BLHK = spec.query_norm.build(shared, "query_norm", "kv")(q_BLHK)
        k_BSGK, v_BSGK = map(heads, source_BSD)
        if positions.angle_BLC is not None and positions.source_angle_BSC is not None:
            q_BLHK = rotate(q_BLHK, positions.angle_BLC)
            k_BSGK = rotate(k_BSGK, positions.source_angle_BSC)
        logits_BHLS = compare_heads(q_BLHK, k_BSGK)
        return mix_heads(shared, logits_BHLS, v_BSGK, view, deterministic)


@dataclass(frozen=True)
class Database:
    """Learned keys and values [N, K] of a stack, read by each of its layers.

    All rows, positions and heads share them. Every entry is visible; none has a position.

    Source: "database" of MARCH (2023).
    """

    entries: int
    head_dim: int

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _Database(self, shared, name=name)


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

        def look(y_BLD: jax.Array, rows: Rows) -> jax.Array:
            view = _entries_view(entries, rows)
            return read(y_BLD, entries, view, deterministic)

        return Sublayer("database_layer_norm", placement, look)


def _entries_view(entries: KeysAndValues, rows: Rows) -> View:
    ones_BN = jnp.ones(entries.key_BSJ.shape[:2], jnp.int32)
    return View(ones_BN[:1, None] > 0, Positions(), rows, Rows(ones_BN))


class _Database(nn.Module):
    spec: Database
    shared: Shared

    @nn.compact
    def __call__(self, batch: int) -> KeysAndValues:
        spec, shared = self.spec, self.shared
        initializer, axes = shared.parametrisation.attention(), ("unmodeled", "kv")

        def entries(name: str) -> jax.Array:
            shape = (spec.entries, spec.head_dim)
            entry_NK = parameter(self, _ENTRIES, name, initializer, axes, shape)
            return jnp.broadcast_to(entry_NK.astype(shared.dtype), (batch, *shape))

        return KeysAndValues(entries("key"), entries("value"))


def given_attention(config: Any) -> GivenAttention:
    """Returns attention to given keys and values, in a configuration's sizes."""
    norm = config.build("norm") if config.query_key_norm else None
    return GivenAttention(config.num_heads, config.head_dim, norm)


def database(config: Any, entries: int) -> StackPart:
    """Returns the part that lets every layer read its stack's database."""
    hook = LookAtDatabase(given_attention(config), entries)
    return StackPart("database", hook, source=Database(entries, config.head_dim))
