"""The decoder's cache: arrays kept between tokens so that only new states are computed.

Modules keep arrays, rows first, in two collections of flax variables: CACHE changes with every
token; FIXED holds an encoder's keys and values.

Dimensions: B batch, L length of the querying positions, S slots, H heads, G heads of keys and
values, K head size, C channels, W width of a convolution, N distances.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.masks import Rows
from trainer.model.positions import Positions

CACHE, FIXED = "cache", "fixed"


class Cache(NamedTuple):
    """The place of a call's positions in the rows being decoded.

    A row has `slots` slots. The prompt ends at the same slot in every row, with padding before it.
    `slot` belongs to the first querying position; `seen_BS`, bool, marks the slots visible to the
    next token (None while the prompt fills the cache); `fixed` marks an encoder's keys and values.
    """

    slots: int
    slot: Array | int = 0
    seen_BS: Array | None = None
    fixed: bool = False

    @property
    def filling(self) -> bool:
        """True if this call holds the whole prompt rather than the next token."""
        return self.seen_BS is None

    def source_rows(self) -> Rows:
        """Returns facts about all slots for the next token; ignore unseen slots' positions."""
        assert self.seen_BS is not None
        first_B1 = jnp.argmax(self.seen_BS, axis=1)[:, None]
        position_BS = jnp.maximum(jnp.arange(self.slots) - first_B1, 0)
        return Rows(self.seen_BS.astype(jnp.int32), position_BL=position_BS)

    def behind(self, slots: int) -> Cache:
        """Returns the cache for keys that follow the keys of `slots` other positions."""
        return self._replace(slots=self.slots + slots, slot=self.slot + slots)

    def keys_and_values(
        self, module: nn.Module, k_BSGK: Array, v_BSGK: Array
    ) -> tuple[Array, Array]:
        """Stores this call's keys and values in `module`, and returns all visible ones."""
        return self.kept(module, "key", k_BSGK), self.kept(module, "value", v_BSGK)

    def kept(self, module: nn.Module, name: str, x_BSGK: Array) -> Array:
        """Stores `x_BSGK` in `module` as `name`, and returns the array of all visible positions."""
        collection = FIXED if self.fixed else CACHE
        # Put heads before slots, so that a product for one query reads keys in memory order.
        fresh_BGSK = x_BSGK.swapaxes(1, 2)
        if self.filling:
            missing = 0 if self.fixed else self.slots - fresh_BGSK.shape[2]
            padded = jnp.pad(fresh_BGSK, ((0, 0), (0, 0), (0, missing), (0, 0)))
            module.put_variable(collection, name, padded)
            return x_BSGK
        kept_BGSK: Array = module.get_variable(collection, name)
        if not self.fixed:
            place = (0, 0, self.slot, 0)
            kept_BGSK = jax.lax.dynamic_update_slice(kept_BGSK, fresh_BGSK, place)
            module.put_variable(collection, name, kept_BGSK)
        return kept_BGSK.swapaxes(1, 2)

    def last_inputs(self, module: nn.Module, x_BLC: Array, width: int) -> Array:
        """Prepends a convolution's W - 1 stored inputs, W = `width`, and stores the newest ones.

        Returns [B, W - 1 + L, C]. `x_BLC` must be 0 where there is no token.
        """
        if self.filling:
            before = jnp.zeros((len(x_BLC), width - 1, x_BLC.shape[-1]), x_BLC.dtype)
        else:
            before = module.get_variable(CACHE, "inputs")
        all_BPC = jnp.concatenate([before, x_BLC], axis=1)
        module.put_variable(CACHE, "inputs", all_BPC[:, all_BPC.shape[1] - (width - 1) :])
        return all_BPC


def positions_at(scheme: nn.Module, cache: Cache | None, rows: Rows) -> Positions:
    """Returns what `scheme`, a `Position`'s module, contributes for the queries in `rows`."""
    if cache is None or cache.filling:
        length = rows.segment_BL.shape[1]
        return scheme(length, length, rows.position_BL)
    positions = scheme(cache.slots, cache.slots, rows.position_BL)
    bias_HLS = None
    if positions.bias_HN is not None:
        first = cache.slots - 1 - cache.slot
        bias_HS = jax.lax.dynamic_slice_in_dim(positions.bias_HN, first, cache.slots, axis=1)
        bias_HLS = bias_HS[:, None]
    return positions._replace(bias_HLS=bias_HLS, bias_HN=None, relative=None)
