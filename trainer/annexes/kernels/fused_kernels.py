"""Bodies of the fused attention kernels: the work of one grid step.

Dimensions: see `fused_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.annexes.kernels.fused_tiles import MASKED, Plan
from trainer.model.device import LANES, SUBLANES

# Lower limit of a row's maximum: exp(MASKED - LEAST) is 0, so a query that sees no key gets zeros
# and zero gradients.
LEAST = -1e20


class Operands(NamedTuple):
    """The operands of a kernel, or one grid step's blocks of them; or the results, likewise.

    If `k_BSJ` is None, each group of `q_BLJ` holds queries, keys and values; if only `v_BSJ` is,
    each group of `k_BSJ` holds keys and values.
    """

    q_BLJ: Any = None
    k_BSJ: Any = None
    v_BSJ: Any = None
    query_BIL: Any = None
    key_BIS: Any = None
    vector_NTW: Any = None
    tables: Any = None
    out_BLJ: Any = None
    normaliser: Any = None
    gradient_BLJ: Any = None

    def groups(self, plan: Plan) -> int:
        """Returns the number of groups of heads in whole operands."""
        joined = 3 if self.k_BSJ is None else 1
        return int(self.q_BLJ.shape[2]) // (joined * plan.lanes)

    def apart(self, plan: Plan) -> Operands:
        """Returns a grid step's blocks with queries, keys and values in three of them."""
        if self.q_BLJ is None:
            return self
        of_queries, *of_sources = _split(self.q_BLJ, plan)
        for ref in (self.k_BSJ, self.v_BSJ):
            of_sources += [] if ref is None else _split(ref, plan)
        return self._replace(q_BLJ=of_queries, k_BSJ=of_sources[0], v_BSJ=of_sources[1])


def _split(ref: Any, plan: Plan) -> list[Any]:
    lanes, width = plan.lanes, ref.shape[2]
    if width == lanes:
        return [ref]
    return [ref.at[:, :, pl.ds(first, lanes)] for first in range(0, width, lanes)]


def forward_kernel(
    plan: Plan, rows: int, at: Operands, to: Operands, tiles_ref: Any = None
) -> None:
    if tiles_ref is not None:
        pl.when(pl.program_id(1) == 0)(partial(_spread, plan, at.vector_NTW, tiles_ref))
    heads, group = range(plan.heads), pl.program_id(0)

    def values(row: Any, j: Any) -> list[Array]:
        v_Pk = _block_of(at.v_BSJ, row, j, plan.block_k, plan.source_length).T
        return [v_Pk[_lanes_of(plan, head)] for head in heads]

    def store(row: Any, i: Any, states: Iterable[_Softmax]) -> None:
        columns = pl.ds(i * plan.block_q, plan.block_q)
        mixed = []
        for head, (maximum_1q, sum_1q, mixed_Kq) in enumerate(states):
            sum_1q = jnp.where(sum_1q == 0, 1.0, sum_1q)
            to.normaliser[row, head : head + 1, columns] = maximum_1q + jnp.log(sum_1q)
            mixed.append(mixed_Kq * (1 / sum_1q))
        to.out_BLJ[row, columns, :] = jnp.concatenate(mixed, 0).T.astype(to.out_BLJ.dtype)

    if plan.loops:

        def query_block(i: Array, _: None) -> None:
            which, first, last = _visited_keys(plan, at, group, i)

            def key_block(m: Array, states: tuple[_Softmax, ...]) -> tuple[_Softmax, ...]:
                j = which(m)
                key_ids, of_heads = _key_ids(at, 0, j, plan), values(0, j)
                tiles = [_logits(plan, at, tiles_ref, key_ids, 0, i, j, head) for head in heads]
                each = zip(states, tiles, of_heads, strict=True)
                return tuple(_absorb(state, tile, v_Kk) for state, tile, v_Kk in each)

            row_1q = jnp.zeros((1, plan.block_q), jnp.float32)
            nothing = jnp.zeros((plan.head_dim, plan.block_q), jnp.float32)
            start = _Softmax(row_1q + LEAST, row_1q, nothing)
            states = lax.fori_loop(first, last, key_block, (start,) * plan.heads)
            store(0, i, states)

        lax.fori_loop(0, plan.query_blocks, query_block, None)
        return

    together = plan.unrolled(rows)
    work = [
        (row, i, j, head)
        for row in range(together)
        for i in range(plan.query_blocks)
        for head in heads
        for j in (j for block, j in plan.pairs if block == i)
    ]

    def some_rows(first: Any) -> None:
        key_ids = _ids_of_rows(at, first, together, plan)

        def products(row: int, i: int, j: int, head: int) -> Array:
            return _logits(plan, at, tiles_ref, key_ids[row, j], first + row, i, j, head)

        states: dict[int, _Softmax] = {}
        for number, ((row, i, j, head), logits_kq) in enumerate(_one_ahead(work, products)):
            v_Kk = values(first + row, j)[head]
            states[head] = _absorb(states.get(head), logits_kq, v_Kk)
            if number + 1 == len(work) or work[number + 1][:2] != (row, i):
                store(first + row, i, [states[head] for head in heads])
                states = {}

    _for_each(rows, together, some_rows)


def backward_kernel(plan: Plan, rows: int, at: Operands, to: Operands, *refs: Any) -> None:
    dq_ref, dk_ref, dv_ref = to.q_BLJ, to.k_BSJ, to.v_BSJ
    tiles_ref: Any = None
    tiles_gradient_ref: Any = None
    of_loops: Any = refs
    if plan.bias is not None:
        tiles_ref, tiles_gradient_ref, *of_loops = refs

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            _spread(plan, at.vector_NTW, tiles_ref)
            tiles_gradient_ref[...] = jnp.zeros_like(tiles_gradient_ref)

    heads, group = range(plan.heads), pl.program_id(0)

    def query_side(row: Any, i: Any) -> tuple[Array, Array, Array | None]:
        """Returns transposed queries and gradients [P, q], and gradients times outputs [G, q]."""
        q_qP = _block_of(at.q_BLJ, row, i, plan.block_q, plan.length)
        gradient_qP = _block_of(at.gradient_BLJ, row, i, plan.block_q, plan.length)
        inner_Gq = None
        if at.out_BLJ is not None:
            out_qP = _block_of(at.out_BLJ, row, i, plan.block_q, plan.length)
            product_Pq = (gradient_qP.astype(jnp.float32) * out_qP.astype(jnp.float32)).T
            parts = [product_Pq[_lanes_of(plan, head)] for head in heads]
            inner_Gq = jnp.concatenate([jnp.sum(part, 0, keepdims=True) for part in parts], 0)
        return q_qP.T, gradient_qP.T, inner_Gq

    def products(key_ids: Any, row: Any, i: Any, j: Any, head: int) -> tuple[Array, Array]:
        """Returns logits and weight gradients, both [k, q]."""
        v_kP = _block_of(at.v_BSJ, row, j, plan.block_k, plan.source_length)
        gradient_qP = _block_of(at.gradient_BLJ, row, i, plan.block_q, plan.length)
        weights_gradient = _dot(_only(plan, v_kP, head), gradient_qP, 1, 1)
        return _logits(plan, at, tiles_ref, key_ids, row, i, j, head), weights_gradient

    def gradients(
        side: Any, k_Pk: Array, tile: Any, row: Any, i: Any, j: Any, head: int
    ) -> tuple[Array, Array, Array]:
        """Returns a tile's share of a head's gradients: dq [K, q], dk and dv [K, k]."""
        q_Pq, gradient_Pq, inner_Gq = side
        logits_kq, weights_gradient_kq = tile
        columns, lanes = pl.ds(i * plan.block_q, plan.block_q), _lanes_of(plan, head)
        weights_kq = jnp.exp(logits_kq - at.normaliser[row, head : head + 1, columns])
        product_kq = weights_kq * weights_gradient_kq
        if inner_Gq is None:
            inner_1q = jnp.sum(product_kq, 0, keepdims=True)
        else:
            inner_1q = inner_Gq[head : head + 1]
        logits_gradient_kq = product_kq - weights_kq * inner_1q
        if plan.softcap is not None:
            # Masked logits have no gradient; their square would not be finite.
            share_kq = jnp.maximum(logits_kq, -plan.softcap) * (1 / plan.softcap)
            logits_gradient_kq *= 1 - share_kq * share_kq
        if tiles_gradient_ref is not None:
            tiles_gradient_ref[plan.tile(head, i, j)] += logits_gradient_kq
        logits_gradient_kq = logits_gradient_kq.astype(q_Pq.dtype)
        dv_Kk = _dot(gradient_Pq[lanes], weights_kq.astype(q_Pq.dtype), 1, 1)
        dk_Kk = _dot(q_Pq[lanes], logits_gradient_kq, 1, 1)
        dq_Kq = _dot(k_Pk[lanes], logits_gradient_kq, 1, 0)
        return dq_Kq, dk_Kk, dv_Kk

    def store(ref: Any, row: Any, index: Any, block: int, x_Pn: Array, scale: float) -> None:
        x_Pn = x_Pn if scale == 1 else x_Pn * scale
        ref[row, pl.ds(index * block, block), :] = x_Pn.T.astype(ref.dtype)

    def keys(row: Any, j: Any) -> Array:
        return _block_of(at.k_BSJ, row, j, plan.block_k, plan.source_length).T

    if plan.loops:
        q_ref, gradients_ref, inner_ref, sums_ref = of_loops

        def prepare(i: Array, _: None) -> None:
            q_ref[i], gradients_ref[i], inner_Gq = query_side(0, i)
            if inner_Gq is not None:
                inner_ref[i] = inner_Gq
            sums_ref[i] = jnp.zeros_like(sums_ref[i])

        def key_block(j: Array, _: None) -> None:
            key_ids, k_Pk = _key_ids(at, 0, j, plan), keys(0, j)

            which, begin, end = _visiting_queries(plan, at, group, j)

            def query_block(m: Array, sums: Any) -> Any:
                i = which(m)
                inner_Gq = None if at.out_BLJ is None else inner_ref[i]
                side = q_ref[i], gradients_ref[i], inner_Gq
                tiles = [products(key_ids, 0, i, j, head) for head in heads]
                each = [gradients(side, k_Pk, tiles[head], 0, i, j, head) for head in heads]
                dq, dk, dv = (jnp.concatenate(parts, 0) for parts in zip(*each, strict=True))
                sums_ref[i] += dq
                return sums[0] + dk, sums[1] + dv

            nothing = jnp.zeros((plan.lanes, plan.block_k), jnp.float32)
            dk, dv = lax.fori_loop(begin, end, query_block, (nothing, nothing))
            store(dk_ref, 0, j, plan.block_k, dk, plan.scale)
            store(dv_ref, 0, j, plan.block_k, dv, 1.0)

        def finish(i: Array, _: None) -> None:
            store(dq_ref, 0, i, plan.block_q, sums_ref[i], plan.scale)

        lax.fori_loop(0, plan.query_blocks, prepare, None)
        lax.fori_loop(0, plan.key_blocks, key_block, None)
        lax.fori_loop(0, plan.query_blocks, finish, None)
    else:
        together = plan.unrolled(rows, backward=True)
        work = [
            (row, i, j, head) for row in range(together) for i, j in plan.pairs for head in heads
        ]

        def some_rows(first: Any) -> None:
            key_ids = _ids_of_rows(at, first, together, plan)
            sides: dict[Any, Any] = {}
            sums: dict[tuple[str, int, int, int], Array] = {}

            def ahead(row: int, i: int, j: int, head: int) -> tuple[Array, Array]:
                return products(key_ids[row, j], first + row, i, j, head)

            def joined(name: str, row: int, index: int) -> Array:
                return jnp.concatenate([sums.pop((name, row, index, head)) for head in heads], 0)

            for number, ((row, i, j, head), tile) in enumerate(_one_ahead(work, ahead)):
                if (row, i) not in sides:
                    sides[row, i] = query_side(first + row, i)
                k_Pk = keys(first + row, j)
                parts = gradients(sides[row, i], k_Pk, tile, first + row, i, j, head)
                for name, index, part in zip(("dq", "dk", "dv"), (i, j, j), parts, strict=True):
                    known = sums.get((name, row, index, head))
                    sums[name, row, index, head] = part if known is None else known + part
                rest = work[number + 1 :]
                if not any((other[0], other[2]) == (row, j) for other in rest):
                    store(dk_ref, first + row, j, plan.block_k, joined("dk", row, j), plan.scale)
                    store(dv_ref, first + row, j, plan.block_k, joined("dv", row, j), 1.0)
                if not any(other[:2] == (row, i) for other in rest):
                    store(dq_ref, first + row, i, plan.block_q, joined("dq", row, i), plan.scale)

        _for_each(rows, together, some_rows)

    if to.vector_NTW is not None:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _() -> None:
            for tile in range(plan.heads * plan.tiles):
                to.vector_NTW[tile : tile + 1, :] = _fold(tiles_gradient_ref[tile])


# A function from loop counter to block; the loop's first counter; and its end, which is excluded.
_Loop = tuple[Callable[[Any], Any], Any, Any]


def _visited_keys(plan: Plan, at: Operands, group: Any, i: Any) -> _Loop:
    if plan.visits is None:
        return lambda j: j, *plan.keys_of(i)
    own = i + group * plan.query_blocks if plan.visits.by_group else i
    first = own * plan.visits.most_keys
    return lambda m: at.tables.keys[first + m], 0, at.tables.key_counts[own]


def _visiting_queries(plan: Plan, at: Operands, group: Any, j: Any) -> _Loop:
    if plan.visits is None:
        return lambda i: i, *plan.queries_of(j)
    own = j + group * plan.key_blocks if plan.visits.by_group else j
    first = own * plan.visits.most_queries
    return lambda m: at.tables.queries[first + m], 0, at.tables.query_counts[own]


class _Softmax(NamedTuple):
    """A running softmax over keys: maxima and sums [1, q], sums of weighted values [K, q]."""

    maximum_1q: Array
    sum_1q: Array
    mixed_Kq: Array


def _absorb(state: _Softmax | None, logits_kq: Array, v_Kk: Array) -> _Softmax:
    before = LEAST if state is None else state.maximum_1q
    maximum_1q = jnp.maximum(jnp.max(logits_kq, 0, keepdims=True), before)
    weights_kq = jnp.exp(logits_kq - maximum_1q)
    sum_1q = jnp.sum(weights_kq, 0, keepdims=True)
    mixed_Kq = _dot(v_Kk, weights_kq.astype(v_Kk.dtype), 1, 0)
    if state is not None:
        shrunk_1q = jnp.exp(state.maximum_1q - maximum_1q)
        sum_1q += state.sum_1q * shrunk_1q
        mixed_Kq += state.mixed_Kq * shrunk_1q
    return _Softmax(maximum_1q, sum_1q, mixed_Kq)


def _logits(
    plan: Plan, at: Operands, tiles_ref: Any, key_ids: Any, row: Any, i: Any, j: Any, head: int
) -> Array:
    """Returns a tile's masked logits, float32 [k, q]."""
    columns = pl.ds(i * plan.block_q, plan.block_q)
    k_kP = _only(plan, at.k_BSJ[row, pl.ds(j * plan.block_k, plan.block_k), :], head)
    logits_kq = _dot(k_kP, at.q_BLJ[row, columns, :], 1, 1)
    if plan.scale != 1:
        logits_kq *= plan.scale
    if tiles_ref is not None:
        logits_kq += tiles_ref[plan.tile(head, i, j)]
    if plan.softcap is not None:
        logits_kq = plan.softcap * jnp.tanh(logits_kq * (1 / plan.softcap))
    bits = None if at.tables is None else at.tables.bits
    visible_kq = key_ids[0] == at.query_BIL[row, 0:1, columns]
    causal = plan.predicate.causal and not plan.causal_bias
    if causal or plan.predicate.window is not None:
        key_k1 = lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0) + j * plan.block_k
        query_1q = lax.broadcasted_iota(jnp.int32, (1, plan.block_q), 1) + i * plan.block_q
    if causal:
        visible_kq &= key_k1 <= query_1q
    if plan.predicate.prefix:
        visible_kq |= key_ids[1] == at.query_BIL[row, 1:2, columns]
    if plan.predicate.window is not None:
        visible_kq &= key_k1 > query_1q - plan.predicate.window
        if not plan.skips:
            visible_kq &= key_k1 <= query_1q + plan.predicate.reach
    if bits is not None and plan.visits is not None:
        own = head if plan.visits.by_group else 0
        bits_1q = _row_of(bits, own * plan.key_blocks + j, columns)
        at_k1 = lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0)
        part_k1 = lax.div(at_k1, jnp.int32(plan.visits.part))
        seen_kq = lax.shift_right_logical(*jnp.broadcast_arrays(bits_1q, part_k1))
        visible_kq &= (seen_kq & 1) > 0
    return jnp.where(visible_kq, logits_kq, MASKED)


def _row_of(ref: Any, row: Any, columns: Any) -> Array:
    """Returns columns of one row of an int32 array, [1, columns]; loads need whole registers."""
    first = pl.multiple_of(lax.div(row, SUBLANES) * SUBLANES, SUBLANES)
    rows = ref[pl.ds(first, SUBLANES), columns]
    number = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.sum(jnp.where(number == row - first, rows, 0), 0, keepdims=True)


def _ids_of_rows(at: Operands, first: Any, rows: int, plan: Plan) -> dict[tuple[int, int], Any]:
    """Returns `_key_ids` keyed by (row, key block), with rows counted from `first`."""
    pairs = itertools.product(range(rows), range(plan.key_blocks))
    return {(row, j): _key_ids(at, first + row, j, plan) for row, j in pairs}


def _key_ids(at: Operands, row: Any, j: Any, plan: Plan) -> list[Array]:
    """Returns a key block's ids as columns [k, 1]."""
    ids_Ik = at.key_BIS[row, :, pl.ds(j * plan.block_k, plan.block_k)]
    # Transposing needs whole registers.
    return [
        jnp.broadcast_to(ids_Ik[n : n + 1], (LANES, plan.block_k)).T[:, :1]
        for n in range(ids_Ik.shape[0])
    ]


def _block_of(ref: Any, row: Any, index: Any, block: int, length: int) -> Array:
    """Returns one block of a row of `ref`, [block, P], with zeros after `length`."""
    x_nP = ref[row, pl.ds(index * block, block), :]
    if length % block == 0:
        return x_nP
    position_nP = lax.broadcasted_iota(jnp.int32, x_nP.shape, 0) + index * block
    return jnp.where(position_nP < length, x_nP.astype(jnp.float32), 0).astype(x_nP.dtype)


def _lanes_of(plan: Plan, head: int) -> slice:
    return slice(head * plan.head_dim, (head + 1) * plan.head_dim)


def _only(plan: Plan, x_nP: Array, head: int) -> Array:
    """Returns `x_nP` with other heads' lanes set to 0: a product is 128 deep in any case."""
    if plan.heads == 1:
        return x_nP
    lane_nP = lax.broadcasted_iota(jnp.int32, x_nP.shape, 1)
    lanes = _lanes_of(plan, head)
    inside_nP = (lane_nP >= lanes.start) & (lane_nP < lanes.stop)
    # The vector unit of a v5e does not support bfloat16.
    return jnp.where(inside_nP, x_nP.astype(jnp.float32), 0).astype(x_nP.dtype)


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    return lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )


def _spread(plan: Plan, vectors_ref: Any, tiles_ref: Any) -> None:
    """Builds the bias tiles from their vectors, without strided rotation, which v4 lacks.

    Row r is rotated right by r: first eight rows, bit by bit of their number; then all finished
    rows at once, which doubles their count each time.
    """
    for tile in range(plan.heads * plan.tiles):
        vector = vectors_ref[tile : tile + 1, :]
        x = jnp.broadcast_to(vector, (8, vector.shape[1]))
        number = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        for bit in (1, 2, 4):
            x = jnp.where((number & bit) > 0, pltpu.roll(x, bit, 1), x)
        while len(x) < plan.block_k:
            x = jnp.concatenate([x, pltpu.roll(x, len(x), 1)], 0)
        tiles_ref[tile] = x[:, : plan.block_q]


def _fold(tile_kq: Array) -> Array:
    """Returns the sums over a tile's diagonals, [1, W]: the transpose of `_spread`."""
    x = jnp.concatenate([tile_kq, jnp.zeros_like(tile_kq)], 1)
    period, rows = x.shape[1], x.shape[0]
    # Rotate row r left by r: the lower half by half the number of rows, then both halves at once.
    while rows > 8:
        rows //= 2
        x = x[:rows] + pltpu.roll(x[rows:], period - rows, 1)
    return sum(
        (pltpu.roll(x[row : row + 1], period - row, 1) for row in range(1, rows)), start=x[:1]
    )


def _for_each(rows: int, together: int, some_rows: Callable[[Any], None]) -> None:
    if rows == together:
        some_rows(0)
    else:
        lax.fori_loop(0, rows // together, lambda n, _: some_rows(n * together), None)


_Item = TypeVar("_Item", bound=tuple[int, ...])
_Result = TypeVar("_Result")


def _one_ahead(
    work: list[_Item], products: Callable[..., _Result]
) -> Iterator[tuple[_Item, _Result]]:
    """Yields items with their products, computed one ahead to keep the matrix unit busy."""
    upcoming = products(*work[0])
    for number, item in enumerate(work):
        current = upcoming
        if number + 1 < len(work):
            upcoming = products(*work[number + 1])
        yield item, current
