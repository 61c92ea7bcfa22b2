"""Attention masks as frozen data: predicates on (query, key) pairs, and their combinations.

Dimensions: B batch, L query length, S key length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from types import MappingProxyType
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """A batch's rows on one side of an attention, as masks and positions see them.

    Attributes:
      segment_BL: int, number of the packed example; 0 where there is no token.
      prefix_BL: int, nonzero in a fully visible prefix; None if the batch marks none.
      position_BL: int, position within each packed example; None if along the row.
      type_BL: int, the token's part of its example, BERT's A and B; None if there is one part.
      input_BL: int, input ids; None in an encoder.
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
    """Returns the encoder side of a batch: positions with an input id above 0 hold tokens."""
    segment_ids_BS = batch.get("encoder_segment_ids")
    return Rows(
        _segments(batch["encoder_input_tokens"], segment_ids_BS),
        position_BL=_positions(batch.get("encoder_positions"), segment_ids_BS),
        type_BL=batch.get("encoder_token_types"),
    )


def decoder_rows(batch: Mapping[str, jax.Array]) -> Rows:
    """Returns the decoder side of a batch.

    Without segment ids, *target* ids above 0 mark tokens: the first input of an example is 0.
    """
    segment_ids_BL = batch.get("decoder_segment_ids")
    return Rows(
        _segments(batch["decoder_target_tokens"], segment_ids_BL),
        batch.get("decoder_causal_attention"),
        _positions(batch.get("decoder_positions"), segment_ids_BL),
        input_BL=batch["decoder_input_tokens"],
    )


def _positions(position_BL: jax.Array | None, segment_ids_BL: jax.Array | None) -> jax.Array | None:
    """Returns the given positions, or else positions within each packed example."""
    if position_BL is not None or segment_ids_BL is None:
        return position_BL
    index_L = jnp.arange(segment_ids_BL.shape[1])
    begins_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1]) != 0
    return index_L - jax.lax.cummax(jnp.where(begins_BL, index_L, 0), axis=1)


def _segments(tokens_BL: jax.Array, segment_ids_BL: jax.Array | None) -> jax.Array:
    """Returns the given segment ids, or 1 where an id is above 0; both are 0 at padding."""
    return (tokens_BL > 0).astype(jnp.int32) if segment_ids_BL is None else segment_ids_BL


@dataclass(frozen=True)
class SameSegment:
    """Tokens see their own packed example; padding is never seen."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        key_segment_B1S = key.segment_BL[:, None, :]
        return (query.segment_BL[:, :, None] == key_segment_B1S) & (key_segment_B1S > 0)


@dataclass(frozen=True)
class Causal:
    """A position sees itself and earlier positions of the row."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        query_index_L1 = jnp.arange(query.segment_BL.shape[1])[:, None]
        key_index_1S = jnp.arange(key.segment_BL.shape[1])[None, :]
        return (key_index_1S <= query_index_L1)[None]


@dataclass(frozen=True)
class BothInPrefix:
    """Positions of a prefix see one another in both directions; others see nothing."""

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        if query.prefix_BL is None or key.prefix_BL is None:
            return jnp.zeros((1, 1, 1), bool)
        return (query.prefix_BL[:, :, None] > 0) & (key.prefix_BL[:, None, :] > 0)


@dataclass(frozen=True)
class AllOf:
    """Visible where all of `masks` are."""

    masks: tuple[Mask, ...]

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        return reduce(and_, (mask(query, key) for mask in self.masks))


@dataclass(frozen=True)
class AnyOf:
    """Visible where at least one of `masks` is."""

    masks: tuple[Mask, ...]

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        return reduce(or_, (mask(query, key) for mask in self.masks))


class Predicate(NamedTuple):
    """A mask that kernels compute from integers per query and key.

    Tokens see their own packed example; with `causal` only themselves and earlier tokens; with
    `prefix` also the whole prefix if they are in it.
    """

    causal: bool = False
    prefix: bool = False


_PREDICATES: Mapping[Mask, Predicate] = MappingProxyType(
    {
        SameSegment(): Predicate(),
        AllOf((SameSegment(), Causal())): Predicate(causal=True),
        AllOf((SameSegment(), AnyOf((Causal(), BothInPrefix())))): Predicate(True, prefix=True),
    }
)


def predicate(mask: Mask | None) -> Predicate | None:
    """Returns a mask's predicate; None if kernels do not know the mask."""
    return None if mask is None else _PREDICATES.get(mask)
