"""The rows of a batch as attention sees them, and masks on (query, key) pairs.

Dimensions: B batch, L query length, S key length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Rows(NamedTuple):
    """A batch's rows on one side of attention, as masks and positions see them.

    Attributes:
      segment_BL: int, number of the packed example; 0 where there is no token.
      prefix_BL: int, nonzero in a fully visible prefix; None if the batch marks none.
      position_BL: int, position within each packed example; None counts along the row.
      type_BL: int, the part of its example (BERT's A or B) that holds a token; None if all is one.
      input_BL: int, input ids; None in an encoder.
    """

    segment_BL: Array
    prefix_BL: Array | None = None
    position_BL: Array | None = None
    type_BL: Array | None = None
    input_BL: Array | None = None


class Mask(NamedTuple):
    """The mask slot: True where a query may see a key, broadcastable to bool [B, L, S].

    Tokens see their own packed example, and padding is never seen. With `causal` they see only
    themselves and earlier positions of the row; with `prefix`, tokens in the prefix also see all of
    it; with `window`, they see no key that is `window` or more positions away, or, with `ahead`, no
    later key more than `ahead` positions away. Kernels compute the same from integers per query and
    key. A spec may use any other function as its mask, but kernels do not support it.
    """

    causal: bool = False
    prefix: bool = False
    window: int | None = None
    ahead: int | None = None

    @property
    def reach(self) -> int:
        """How many positions a window extends ahead of its query."""
        assert self.window is not None
        return self.window - 1 if self.ahead is None else self.ahead

    @property
    def skips(self) -> bool:
        """True if no query sees a later key."""
        return self.causal and not self.prefix

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The numbers of positions that a query sees before and after its own; None: all."""
        back, ahead = (None, None) if self.window is None else (self.window - 1, self.reach)
        return back, 0 if self.skips else ahead

    def on(self, rows: Rows) -> Mask:
        """Returns the mask without a prefix if the rows have none."""
        return self._replace(prefix=self.prefix and rows.prefix_BL is not None)

    def __call__(self, query: Rows, key: Rows) -> Array:
        key_segment_B1S = key.segment_BL[:, None, :]
        same_BLS = (query.segment_BL[:, :, None] == key_segment_B1S) & (key_segment_B1S > 0)
        query_index_L1 = jnp.arange(query.segment_BL.shape[1])[:, None]
        key_index_1S = jnp.arange(key.segment_BL.shape[1])[None, :]
        if self.window is not None:
            distance_LS = key_index_1S - query_index_L1
            same_BLS &= (-self.window < distance_LS) & (distance_LS <= self.reach)
        if not self.causal:
            return same_BLS
        seen_BLS = (key_index_1S <= query_index_L1)[None]
        if self.prefix and query.prefix_BL is not None and key.prefix_BL is not None:
            seen_BLS |= (query.prefix_BL[:, :, None] > 0) & (key.prefix_BL[:, None, :] > 0)
        return same_BLS & seen_BLS


# Maps the rows of queries and keys to True where a query may see a key.
AnyMask = Mask | Callable[[Rows, Rows], Array]


def known(mask: AnyMask | None) -> Mask | None:
    """Returns the mask if kernels support it."""
    return mask if isinstance(mask, Mask) else None


def seen_from(mask: AnyMask, slot: Array | int, seen_BS: Array) -> Array:
    """Returns which of a cache's seen slots the query at `slot` may see, bool [B, 1, S]."""
    if isinstance(mask, Mask) and mask.window is not None:
        seen_BS &= slot - jnp.arange(seen_BS.shape[1]) < mask.window
    return seen_BS[:, None]


def encoder_rows(batch: Mapping[str, Array]) -> Rows:
    """Returns the encoder side of a batch: positions with an input id above 0 hold tokens."""
    segment_ids_BS = batch.get("encoder_segment_ids")
    return Rows(
        _segments(batch["encoder_input_tokens"], segment_ids_BS),
        position_BL=_positions(batch.get("encoder_positions"), segment_ids_BS),
        type_BL=batch.get("encoder_token_types"),
    )


def decoder_rows(batch: Mapping[str, Array]) -> Rows:
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


def _positions(position_BL: Array | None, segment_ids_BL: Array | None) -> Array | None:
    """Returns the given positions, or derives positions within each packed example."""
    if position_BL is not None or segment_ids_BL is None:
        return position_BL
    index_L = jnp.arange(segment_ids_BL.shape[1])
    begins_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1]) != 0
    return index_L - jax.lax.cummax(jnp.where(begins_BL, index_L, 0), axis=1)


def _segments(tokens_BL: Array, segment_ids_BL: Array | None) -> Array:
    """Returns the given segment ids, or 1 where an id is above 0; both are 0 at padding."""
    return (tokens_BL > 0).astype(jnp.int32) if segment_ids_BL is None else segment_ids_BL
