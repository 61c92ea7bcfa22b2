"""Tiles of `triton_attention` on a GPU: blocks of queries and keys, their logits and gradients.

Dimensions as in `triton_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from trainer.annexes.kernels.fused_attention import NO_KEY, NO_QUERY
from trainer.annexes.kernels.fused_tiles import MASKED, seen_blocks
from trainer.model.masks import Mask
from trainer.model.positions import T5RelativePosition, spread_diagonals

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Plan:
    """The static part of a call; fields as in `fused_tiles.Plan`. `shared` is H / G."""

    length: int
    source_length: int
    num_heads: int
    shared: int
    head_dim: int
    predicate: Mask
    bias: T5RelativePosition | None
    scale: float
    block_q: int
    block: int
    interpret: bool
    softcap: float | None = None

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_heads // self.shared

    @property
    def before(self) -> int:
        """The number of distances below 0 in the bias vectors."""
        return pl.cdiv(self.length, self.block_q) * self.block_q

    def vectors(self, table_HR: Array) -> Array:
        """Returns each head's bias by distance from `-before` on, [H, N], in units of log 2.

        A matrix product looks it up, so that the gradient is one, too.
        """
        assert self.bias is not None
        after = pl.cdiv(self.source_length, self.block) * self.block
        bucket_N = self.bias.bucket(np.arange(-self.before, after))
        choice_NR = jax.nn.one_hot(bucket_N, table_HR.shape[1], dtype=jnp.float32)
        scaled_HR = table_HR * (self.scale * LOG2_E)
        return jnp.einsum("hr,nr->hn", scaled_HR, choice_NR, precision=lax.Precision.HIGHEST)

    @property
    def blocks(self) -> tuple[int, int]:
        """The numbers of blocks of queries, outside the forward pass, and of keys."""
        return pl.cdiv(self.length, self.block), pl.cdiv(self.source_length, self.block)

    def keys_of(self, i: Any, block_q: int) -> tuple[Any, Any]:
        """Returns the first key block that a block of queries sees, and the end."""
        return seen_blocks(i, block_q, self.block, self.blocks[1], self.predicate.bounds)

    @property
    def diagonals(self) -> tuple[int, int]:
        """The first and last difference of a tile's key block and query block."""
        (queries, keys), (back, ahead) = self.blocks, self.predicate.bounds
        first = 1 - queries if back is None else max(1 - queries, -back // self.block)
        last = keys if ahead is None else (self.block - 1 + ahead) // self.block
        return first, min(last, keys - 1)

    def tiles(self, vector_HN: Array) -> Array:
        """Returns the bias tiles of all diagonals, [H, D, q, k]."""
        block, (first, last) = self.block, self.diagonals
        heads, diagonals = len(vector_HN), last - first + 1
        blocks_HMn = vector_HN.reshape(heads, -1, block)
        start = self.before // block + first - 1
        low, high = (blocks_HMn[:, start + n :][:, :diagonals] for n in (0, 1))
        window_HDN = jnp.concatenate([low, high], 2)[:, :, 1:]
        tiles = spread_diagonals(window_HDN.reshape(heads * diagonals, -1), block)
        return tiles.reshape(heads, diagonals, block, block)


class Operands(NamedTuple):
    """The operands of a kernel: ids [B * I, L], statistics [B, H, L].

    If `k_BSJ` is None, `q_BLJ` holds queries, keys and values side by side; if only `v_BSJ` is,
    `k_BSJ` holds keys and values.
    """

    q_BLJ: Any
    k_BSJ: Any
    v_BSJ: Any
    query_IL: Any
    key_IS: Any
    vector_HN: Any = None
    gradient_BLJ: Any = None
    normaliser: Any = None
    inner: Any = None

    def parts(self, plan: Plan) -> list[tuple[Any, int]]:
        """Returns the array of queries, of keys and of values, and the first channel in it."""
        q_BLJ, k_BSJ, v_BSJ = self[:3]
        width, source = plan.num_heads * plan.head_dim, plan.groups * plan.head_dim
        if k_BSJ is None:
            return [(q_BLJ, 0), (q_BLJ, width), (q_BLJ, 2 * width)]
        if v_BSJ is None:
            return [(q_BLJ, 0), (k_BSJ, 0), (k_BSJ, source)]
        return [(q_BLJ, 0), (k_BSJ, 0), (v_BSJ, 0)]


class Queries(NamedTuple):
    """A block of one head's queries; the last three fields are None in the forward pass."""

    at_q: Array
    ids: list[Array]
    q_qK: Array
    gradient_qK: Any = None
    normaliser_q: Any = None
    inner_q: Any = None


class Keys(NamedTuple):
    """A block of one head's keys and values."""

    at_k: Array
    ids: list[Array]
    k_kK: Array
    v_kK: Array


def load_queries(plan: Plan, of: Operands, row: Any, i: Any, block: int, head: Any) -> Queries:
    """Returns block `i` of one head's queries, of `block` queries."""
    at_q, places = i * block + jnp.arange(block), pl.ds(i * block, block)
    load = partial(_channels, plan, row=row, at_n=at_q, index=i, head=head)
    channels = load(of.parts(plan)[0])
    queries = Queries(at_q, _ids(plan, of.query_IL, row, at_q, i, NO_QUERY), channels)
    if of.gradient_BLJ is None:
        return queries
    inside_q = at_q < plan.length
    normaliser_q, inner_q = (
        triton.load(ref.at[row, head, places], mask=inside_q, other=0.0)
        for ref in (of.normaliser, of.inner)
    )
    return queries._replace(
        gradient_qK=load((of.gradient_BLJ, 0)), normaliser_q=normaliser_q, inner_q=inner_q
    )


def load_keys(plan: Plan, of: Operands, row: Any, j: Any, group: Any) -> Keys:
    """Returns block `j` of the keys and values that a group of heads shares."""
    at_k = j * plan.block + jnp.arange(plan.block)
    load = partial(_channels, plan, row=row, at_n=at_k, index=j, head=group)
    _, k, v = of.parts(plan)
    return Keys(at_k, _ids(plan, of.key_IS, row, at_k, j, NO_KEY), load(k), load(v))


def _ids(plan: Plan, ids_ref: Any, row: Any, at_n: Array, index: Any, none: int) -> list[Array]:
    inside_n, places = at_n < ids_ref.shape[1], pl.ds(index * len(at_n), len(at_n))
    ids = 2 if plan.predicate.prefix else 1
    return [
        triton.load(ids_ref.at[row * ids + number, places], mask=inside_n, other=none)
        for number in range(ids)
    ]


def _channels(
    plan: Plan, part: tuple[Any, int], row: Any, at_n: Array, index: Any, head: Any
) -> Array:
    """Loads a block of one head's channels, with zeros after the end of the row."""
    block, length = len(at_n), part[0].shape[1]
    places = _places(plan, part, row, block, index, head)
    if length % block == 0:
        return triton.load(places)
    return triton.load(places, mask=(at_n < length)[:, None], other=0.0)


def store(
    plan: Plan,
    part: tuple[Any, int],
    row: Any,
    at_n: Array,
    index: Any,
    head: Any,
    x_nK: Array,
) -> None:
    """Writes a block of one head's channels, without what lies after the end of the row."""
    ref, places = part[0], _places(plan, part, row, len(at_n), index, head)
    triton.store(places, x_nK.astype(ref.dtype), mask=(at_n < ref.shape[1])[:, None])


def _places(plan: Plan, part: tuple[Any, int], row: Any, block: int, index: Any, head: Any) -> Any:
    (ref, first), size = part, plan.head_dim
    return ref.at[row, pl.ds(index * block, block), pl.ds(first + head * size, size)]


def logits_of(
    plan: Plan, of: Operands, head: Any, queries: Queries, keys: Keys, keys_first: bool = False
) -> Array:
    """Returns a tile's masked logits, float32 [q, k], or [k, q] with `keys_first`."""
    (query, key), product = _along(keys_first), _product(keys_first)
    logits = product(queries.q_qK, keys.k_kK) * (plan.scale * LOG2_E)
    distance = key(keys.at_k) - query(queries.at_q)
    if of.vector_HN is not None:
        logits += of.vector_HN[head, distance + plan.before]
    if plan.softcap is not None:
        cap = plan.softcap * LOG2_E
        logits = cap * jnp.tanh(logits * (1 / cap))
    visible = query(queries.ids[0]) == key(keys.ids[0])
    if plan.predicate.causal:
        visible &= distance <= 0
    if plan.predicate.prefix:
        visible |= query(queries.ids[1]) == key(keys.ids[1])
    if plan.predicate.window is not None:
        visible &= (-plan.predicate.window < distance) & (distance <= plan.predicate.reach)
    return jnp.where(visible, logits, MASKED)


def gradients_of(
    plan: Plan, of: Operands, head: Any, queries: Queries, keys: Keys, keys_first: bool = False
) -> tuple[Array, Array]:
    """Returns a tile's weights and the gradients of its logits, both float32."""
    (query, _), product = _along(keys_first), _product(keys_first)
    logits = logits_of(plan, of, head, queries, keys, keys_first)
    weights = jnp.exp2(logits - query(queries.normaliser_q))
    weights_gradient = product(queries.gradient_qK, keys.v_kK)
    gradient = weights * (weights_gradient - query(queries.inner_q))
    if plan.softcap is None:
        return weights, gradient
    # Masked logits have no gradient; their square would not be finite.
    share = jnp.maximum(logits * (1 / (plan.softcap * LOG2_E)), -1)
    return weights, gradient * (1 - share * share)


def _along(keys_first: bool) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Returns functions that lay out a vector of queries, and one of keys, along their axis."""

    def column(x: Array) -> Array:
        return x[:, None]

    def row(x: Array) -> Array:
        return x[None, :]

    return (row, column) if keys_first else (column, row)


def _product(keys_first: bool) -> Callable[[Array, Array], Array]:
    """Returns the function that multiplies channels of queries and keys into a tile."""
    return lambda of_q, of_k: dot(of_k, of_q.T) if keys_first else dot(of_q, of_k.T)


def dot(x: Array, y: Array) -> Array:
    """Returns the product of two matrices, summed in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)
