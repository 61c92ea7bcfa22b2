"""Attention masks as frozen data: predicates on (query, key) pairs, joined by all-of and any-of.

Dimensions: B batch, L query length, S key length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """What masks and positions may look at on one side of an attention.

    `segment_BL`: int, 0 where there is no token, else the number of the packed example.
    `prefix_BL`: int, nonzero where the token belongs to a fully visible prefix; None if there is
    no such prefix in the batch. `position_BL`: int, places counted within each packed example;
    None where they are those of the row. `type_BL`: int, which of its example's parts a token
    belongs to, BERT's A and B; None where there is one part. `input_BL`: the ids that go in; None
    where nothing asks for them.
    """

    segment_BL: jax.Array
    prefix_BL: jax.Array | None = None
    position_BL: jax.Array | None = None
    type_BL: jax.Array | None = None
    input_BL: jax.Array | None = None


class Mask(Protocol):
    """The mask slot: True where a query may see a key, broadcastable to bool [B, L, S]."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array: ...


def encoder_rows(batch: Mapping[str, jax.Array]) -> Rows:
    """The encoder side of a batch: a position is a token where its input id is above 0."""
    tokens_BS = batch["encoder_input_tokens"]
    return Rows(
        _segments(tokens_BS, batch.get("encoder_segment_ids")),
        position_BL=batch.get("encoder_positions"),
        type_BL=batch.get("encoder_token_types"),
    )


def decoder_rows(batch: Mapping[str, jax.Array]) -> Rows:
    """The decoder side of a batch: a position is a token where its *target* id is above 0.

    Targets and not inputs, since the first input of every example is 0 by construction.
    """
    tokens_BL = batch["decoder_target_tokens"]
    segment_ids_BL = batch.get("decoder_segment_ids")
    position_BL = batch.get("decoder_positions")
    if position_BL is None and segment_ids_BL is not None:
        position_BL = _places(segment_ids_BL)
    return Rows(
        _segments(tokens_BL, segment_ids_BL),
        batch.get("decoder_causal_attention"),
        position_BL,
        input_BL=batch["decoder_input_tokens"],
    )


def _places(segment_ids_BL: jax.Array) -> jax.Array:
    """At each position, how many of its own packed example stand before it."""
    index_L = jnp.arange(segment_ids_BL.shape[1])
    begins_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1]) != 0
    return index_L - jax.lax.cummax(jnp.where(begins_BL, index_L, 0), axis=1)


def _segments(tokens_BL: jax.Array, segment_ids_BL: jax.Array | None) -> jax.Array:
    is_token_BL = tokens_BL > 0
    if segment_ids_BL is None:
        return is_token_BL.astype(jnp.int32)
    return jnp.where(is_token_BL, segment_ids_BL, 0)


@dataclass(frozen=True)
class SameSegment:
    """Tokens see tokens of their own packed example; nothing sees padding."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        key_segment_B1S = key.segment_BL[:, None, :]
        return (query.segment_BL[:, :, None] == key_segment_B1S) & (key_segment_B1S > 0)


@dataclass(frozen=True)
class Causal:
    """A position sees itself and what stands before it in the row."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        query_index_L1 = jnp.arange(query.segment_BL.shape[1])[:, None]
        key_index_1S = jnp.arange(key.segment_BL.shape[1])[None, :]
        return (key_index_1S <= query_index_L1)[None]


@dataclass(frozen=True)
class BothInPrefix:
    """Positions marked as prefix see one another in both directions; without marks, nothing."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        if query.prefix_BL is None or key.prefix_BL is None:
            return jnp.zeros((1, 1, 1), bool)
        return (query.prefix_BL[:, :, None] > 0) & (key.prefix_BL[:, None, :] > 0)


@dataclass(frozen=True)
class AllOf:
    """Visible where every one of `masks` says so."""

    masks: tuple[Mask, ...]

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        return reduce(and_, (mask(query, key) for mask in self.masks))


@dataclass(frozen=True)
class AnyOf:
    """Visible where at least one of `masks` says so."""

    masks: tuple[Mask, ...]

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        return reduce(or_, (mask(query, key) for mask in self.masks))
