"""Softmax attention as Pallas kernels for TPUs: no logits [B, H, L, S] in memory.

One kernel makes the forward pass, another the gradients of queries, keys, values and the relative
bias. A grid step takes some rows of the batch and one group of heads: as many as fill the 128
lanes of a register. Logits exist as tiles [keys, queries] in the core's own memory, so that sums
over keys add registers instead of moving lanes. Statistics are float32.

Masks are predicates on small integers of queries and keys. The relative bias depends on the
distance alone: a tile of it is one vector, rotated by one more element in each row. Tiles are made
once for all rows of a batch; their gradients are summed over the batch and folded into a vector.

Dimensions: B batch, L query length, S key length, H heads, K head size, J = H * K, N groups of
heads, G heads of a group, R relative buckets, T tiles of the bias, W = 2 * block, I ids.
Inside kernels: q queries and k keys of a block, P lanes of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.model.facts import LANES, fills_lanes
from trainer.model.masks import Predicate, Rows
from trainer.model.positions import RelativeBias, T5RelativePosition

# A masked logit, and the least maximum of a row: exp(_MASKED - _LEAST) is 0, so a query that sees
# no key gets zeros, with zero gradients.
_MASKED, _LEAST = -1e30, -1e20
# Ids of a query and a key outside of any example; different, so that neither sees the other.
_NO_QUERY, _NO_KEY = -1, -2

# Block lengths, and the cost of an element of their tiles: smaller blocks leave the matrix unit
# waiting. Powers of two, as `_fold` needs.
_BLOCKS = {512: 1.0, 256: 1.1, 128: 1.4}
# Elements of tiles, of one head each, that a kernel works through without a loop. More overlap
# better and take longer to compile: twice as many gain 4 % and take twice as long.
_UNROLLED_FORWARD, _UNROLLED_BACKWARD = 4 * 512 * 512, 2 * 512 * 512
# Bytes of the blocks of a grid step, which takes 0.35 us besides its work. The pipeline holds them
# twice.
_BLOCK_BYTES = 3 << 20

# The name under which `jax.checkpoint` may keep what the backward pass reads.
SAVED = "fused_attention"


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes:
      length: L.
      source_length: S.
      head_dim: K; it divides 128 or is a multiple of it.
      predicate: the mask.
      bias: how distances share the table of the bias; None: there is no bias.
      scale: factor of the products of queries and keys.
      block: queries and keys of a tile.
      vmem_bytes: memory of the core that a kernel may use.
      interpret: run without a TPU.
    """

    length: int
    source_length: int
    head_dim: int
    predicate: Predicate
    bias: T5RelativePosition | None
    scale: float
    block_q: int
    block_k: int
    vmem_bytes: int
    interpret: bool

    @property
    def heads(self) -> int:
        """Heads of a group."""
        return max(1, LANES // self.head_dim)

    @property
    def lanes(self) -> int:
        """Width of a group."""
        return self.heads * self.head_dim

    @property
    def query_blocks(self) -> int:
        return pl.cdiv(self.length, self.block_q)

    @property
    def key_blocks(self) -> int:
        return pl.cdiv(self.source_length, self.block_k)

    @property
    def skips(self) -> bool:
        """Tiles in which every key is after every query are left out."""
        return self.predicate.causal and not self.predicate.prefix

    @property
    def causal_bias(self) -> bool:
        """The tiles of the bias mask keys after their query."""
        return self.skips and self.bias is not None

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The blocks (query, key) of the tiles, by key."""
        return [
            (i, j)
            for j in range(self.key_blocks)
            for i in range(j if self.skips else 0, self.query_blocks)
        ]

    @property
    def area(self) -> int:
        """Elements of the tiles of a row and a group."""
        return len(self.pairs) * self.block_q * self.block_k * self.heads

    @property
    def loops(self) -> bool:
        """A row has so many tiles that kernels loop over them."""
        return self.area > _UNROLLED_FORWARD

    def rows(self, batch: int, arrays: int, itemsize: int) -> int:
        """Returns the rows of a grid step with `arrays` blocks of queries or keys."""
        longest = max(self.query_blocks * self.block_q, self.key_blocks * self.block_k)
        fitting = _BLOCK_BYTES // (arrays * longest * self.lanes * itemsize)
        return 1 if self.loops else _divisor(batch, fitting)

    def unrolled(self, rows: int, area: int) -> int:
        """Returns how many of the rows of a grid step are written out, given an area for them."""
        return _divisor(rows, area // self.area)

    # Tiles of the bias, by block distance.

    @property
    def farthest(self) -> int:
        """The block distance from which all tiles of the bias are alike."""
        assert self.bias is not None
        alike = pl.cdiv(self.bias.max_distance + self.block_q - 1, self.block_q)
        return min(alike, max(self.query_blocks, self.key_blocks) - 1)

    @property
    def tiles(self) -> int:
        """Tiles of the bias of one head, T."""
        return self.farthest + 1 if self.skips else 2 * self.farthest + 1

    def tile(self, head: int, i: Any, j: Any) -> Any:
        """Returns the index of the tile of a head of the group and blocks (query i, key j)."""
        nearest = 0 if self.skips else -self.farthest
        distance: Any
        if isinstance(i, int) and isinstance(j, int):
            distance = min(max(i - j, nearest), self.farthest)
        else:
            distance = jnp.clip(i - j, nearest, self.farthest)
        return head * self.tiles + distance - nearest

    def vectors(self, table_HR: jax.Array) -> jax.Array:
        """Returns the vectors of the tiles, [N, G * T, W] float32.

        Tile t has `vector[(q - k) mod W]` at (k, q). A product with a constant: so is its gradient.
        """
        assert self.bias is not None
        period = 2 * self.block_q
        nearest = 0 if self.skips else -self.farthest
        inside = np.arange(period)
        inside = np.where(inside < self.block_q, inside, inside - period)
        distance_TW = -(np.arange(nearest, self.farthest + 1)[:, None] * self.block_q + inside)
        bucket_TW = self.bias.bucket(distance_TW)
        choice_TWR = jax.nn.one_hot(bucket_TW, table_HR.shape[1], dtype=jnp.float32)
        vector_HTW = jnp.einsum(
            "hr,twr->htw", table_HR * self.scale, choice_TWR, precision=lax.Precision.HIGHEST
        )
        if self.causal_bias:
            vector_HTW = jnp.where(distance_TW > 0, _MASKED, vector_HTW)
        return vector_HTW.reshape(-1, self.heads * self.tiles, period)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is not above `most`, or 1."""
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


class Operands(NamedTuple):
    """Operands of the kernels, or the blocks that a grid step sees."""

    q_BLJ: Any
    k_BSJ: Any
    v_BSJ: Any
    query_BIL: Any
    key_BIS: Any
    vector_NTW: Any


def fits_memory(longest: int, vmem_bytes: int, itemsize: int = 2) -> bool:
    """Returns whether a core's memory holds rows of this length, which kernels read whole.

    The backward pass has eight arrays of a row, each twice for the pipeline; half of the memory is
    left to tiles and sums. With 14 MiB, as on v4, rows of 2,048 are too long by 5 %.
    """
    return 2 * 8 * longest * LANES * itemsize <= vmem_bytes / 2


def fused_attention(
    q_BLJ: jax.Array,
    k_BSJ: jax.Array,
    v_BSJ: jax.Array,
    query: Rows,
    key: Rows,
    head_dim: int,
    predicate: Predicate,
    relative: RelativeBias | None = None,
    scale: float = 1.0,
    block: int | None = None,
    vmem_bytes: int = 14 << 20,
    interpret: bool = False,
) -> jax.Array:
    """Returns values weighted by `softmax((q k + bias) * scale)`: [B, L, J] in the dtype of q.

    A query that sees no key gets zeros. The bias of `relative` is float32, as are logits, weights'
    sums and the sums of products; weights are rounded to the operands' dtype before the products.

    Args:
      query: rows of the queries; the mask reads segments and prefix.
      key: rows of the keys.
      predicate: the mask.
      block: queries and keys of a tile, a power of two; None: as lengths and memory suggest.
      vmem_bytes: memory of the core that a kernel may use.
      interpret: run the kernels without a TPU, for tests.

    Raises:
      ValueError: heads of this size do not fill registers.
    """
    if not fills_lanes(head_dim):
        raise ValueError(f"head_dim {head_dim} neither divides {LANES} nor is a multiple of it")
    length, source_length = q_BLJ.shape[1], k_BSJ.shape[1]
    biased_dim = head_dim if relative else None
    blocks = _blocks(length, source_length, predicate, biased_dim, vmem_bytes, block)
    plan = Plan(
        length,
        source_length,
        head_dim,
        Predicate(predicate.causal, predicate.prefix and query.prefix_BL is not None),
        relative.spec if relative else None,
        scale,
        *blocks,
        vmem_bytes,
        interpret,
    )
    table_HR = relative.table_HR if relative else None
    width = q_BLJ.shape[2]
    missing = -width % plan.lanes
    if missing:  # groups of heads are whole
        widen = ((0, 0), (0, 0), (0, missing))
        q_BLJ, k_BSJ, v_BSJ = (jnp.pad(x, widen) for x in (q_BLJ, k_BSJ, v_BSJ))
        if table_HR is not None:
            table_HR = jnp.pad(table_HR, ((0, missing // head_dim), (0, 0)))
    query_BIL = _ids(query, plan.predicate, plan.query_blocks * plan.block_q, _NO_QUERY)
    key_BIS = _ids(key, plan.predicate, plan.key_blocks * plan.block_k, _NO_KEY)
    out_BLJ = _attention(plan, table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS)
    return out_BLJ[..., :width] if missing else out_BLJ


def _blocks(
    length: int,
    source_length: int,
    predicate: Predicate,
    head_dim: int | None,
    vmem_bytes: int,
    block: int | None,
) -> tuple[int, int]:
    """Returns the lengths of blocks of queries and keys.

    They are equal where tiles of a bias or of a causal mask lie along the diagonal. `head_dim` is
    None without a bias.
    """
    if block:
        return block, block
    if head_dim is None and not predicate.causal:
        return _block(length, False, lambda _: True), _block(source_length, False, lambda _: True)
    longest, skips = max(length, source_length), predicate.causal and not predicate.prefix

    def fits(block: int) -> bool:
        """Returns whether tiles of a bias and their gradients leave room for the rest."""
        if head_dim is None:
            return True
        distances = min(pl.cdiv(longest, block) - 1, 2)
        tiles = max(1, LANES // head_dim) * (distances + 1 if skips else 2 * distances + 1)
        return 2 * tiles * 4 * block**2 <= 0.4 * vmem_bytes

    same = _block(longest, skips, fits)
    return same, same


def _block(length: int, skips: bool, fits: Callable[[int], bool]) -> int:
    def cost(block: int) -> float:
        blocks = pl.cdiv(length, block)
        tiles = blocks * (blocks + 1) / 2 if skips else blocks**2
        return tiles * block**2 * _BLOCKS[block]

    return min(filter(fits, _BLOCKS), key=cost, default=min(_BLOCKS))


def _ids(rows: Rows, predicate: Predicate, length: int, none: int) -> jax.Array:
    """Returns ids of which a key must equal one of the query's: int32 [B, I, length].

    The first is the segment. With a prefix, the second is the segment too, but in the prefix only.
    """
    segment_BL = jnp.where(rows.segment_BL > 0, rows.segment_BL, none).astype(jnp.int32)
    ids = [segment_BL]
    if predicate.prefix:
        assert rows.prefix_BL is not None
        ids.append(jnp.where(rows.prefix_BL > 0, segment_BL, none))
    padding = ((0, 0), (0, 0), (0, length - segment_BL.shape[1]))
    return jnp.pad(jnp.stack(ids, 1), padding, constant_values=none)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS) -> jax.Array:
    return _forward(plan, table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS)[0]


def _forward(plan: Plan, table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS):
    vector_NTW = None if table_HR is None else plan.vectors(table_HR)
    operands = Operands(q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS, vector_NTW)
    batch, groups = q_BLJ.shape[0], q_BLJ.shape[2] // plan.lanes
    statistic = (groups, batch, plan.heads, plan.query_blocks * plan.block_q)
    out_BLJ, normaliser = _call(
        _forward_kernel,
        plan,
        plan.rows(batch, 4, q_BLJ.dtype.itemsize),
        "attention_forward",
        operands,
        {
            "query": jax.ShapeDtypeStruct(q_BLJ.shape, q_BLJ.dtype),
            "statistic": jax.ShapeDtypeStruct(statistic, jnp.float32),
        },
        _tiles_scratch(plan, 1),
    )
    out_BLJ, normaliser = checkpoint_name((out_BLJ, normaliser), SAVED)
    # With one block of keys the backward pass makes its sums from the weights themselves.
    read_out = out_BLJ if plan.key_blocks > 1 else None
    saved = table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS, read_out, normaliser
    return out_BLJ, saved


def _backward(plan: Plan, saved, gradient_BLJ):
    table_HR, q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS, out_BLJ, normaliser = saved
    vector_NTW, to_table = None, None
    if table_HR is not None:
        vector_NTW, to_table = jax.vjp(plan.vectors, table_HR)
    operands = Operands(q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS, vector_NTW)
    batch, dtype = q_BLJ.shape[0], q_BLJ.dtype
    scratch = _tiles_scratch(plan, 2)
    if plan.loops:
        blocks, block_q = plan.query_blocks, plan.block_q
        scratch += [
            pltpu.VMEM((blocks, plan.lanes, block_q), dtype),  # queries, transposed
            pltpu.VMEM((blocks, plan.lanes, block_q), dtype),  # gradients of outputs, transposed
            pltpu.VMEM((blocks, plan.heads, block_q), jnp.float32),  # their products with outputs
            pltpu.VMEM((blocks, plan.lanes, block_q), jnp.float32),  # gradients of queries
        ]
    results = {
        "query": jax.ShapeDtypeStruct(q_BLJ.shape, dtype),
        "key": jax.ShapeDtypeStruct(k_BSJ.shape, dtype),
        "value": jax.ShapeDtypeStruct(v_BSJ.shape, dtype),
    }
    if vector_NTW is not None:
        results["vector"] = jax.ShapeDtypeStruct(vector_NTW.shape, jnp.float32)
    q_gradient, k_gradient, v_gradient, *rest = _call(
        _backward_kernel,
        plan,
        plan.rows(batch, 8, dtype.itemsize),
        "attention_backward",
        (operands, out_BLJ, normaliser, gradient_BLJ),
        results,
        scratch,
    )
    table_gradient = to_table(rest[0])[0] if to_table else None
    return table_gradient, q_gradient, k_gradient, v_gradient, None, None


_attention.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    plan: Plan,
    rows: int,
    name: str,
    operands: Any,
    results: dict[str, jax.ShapeDtypeStruct],
    scratch: list[Any],
) -> list[jax.Array]:
    """Runs a kernel on a grid of groups of heads and, inside, of `rows` rows of the batch each."""
    lanes, heads = plan.lanes, plan.heads
    longest_q, longest_k = plan.query_blocks * plan.block_q, plan.key_blocks * plan.block_k
    query = pl.BlockSpec((rows, longest_q, lanes), lambda group, row: (row, 0, group))
    key = pl.BlockSpec((rows, longest_k, lanes), lambda group, row: (row, 0, group))
    statistic = pl.BlockSpec((None, rows, heads, longest_q), lambda group, row: (group, row, 0, 0))
    ids = 2 if plan.predicate.prefix else 1
    query_ids = pl.BlockSpec((rows, ids, longest_q), lambda group, row: (row, 0, 0))
    key_ids = pl.BlockSpec((rows, ids, longest_k), lambda group, row: (row, 0, 0))
    vector = None
    if plan.bias is not None:
        shape = (None, heads * plan.tiles, 2 * plan.block_q)
        vector = pl.BlockSpec(shape, lambda group, row: (group, 0, 0))
    specs = {"query": query, "key": key, "value": key, "statistic": statistic, "vector": vector}
    in_specs: Any = Operands(query, key, key, query_ids, key_ids, vector)
    if not isinstance(operands, Operands):
        out = None if operands[1] is None else query
        in_specs = (in_specs, out, statistic, query)
    batch, _, width = jax.tree.leaves(operands)[0].shape
    flat_specs, flat = jax.tree.leaves(in_specs), jax.tree.leaves(operands)
    structure = jax.tree.structure(operands)

    def run(*refs: Any) -> None:
        kernel(plan, rows, jax.tree.unflatten(structure, refs[: len(flat)]), *refs[len(flat) :])

    return pl.pallas_call(
        run,
        grid=(width // lanes, batch // rows),
        in_specs=flat_specs,
        out_specs=[specs[result] for result in results],
        out_shape=list(results.values()),
        scratch_shapes=scratch,
        interpret=plan.interpret,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem_bytes
        ),
    )(*flat)


def _tiles_scratch(plan: Plan, copies: int) -> list[Any]:
    if plan.bias is None:
        return []
    shape = (plan.heads * plan.tiles, plan.block_k, plan.block_q)
    return [pltpu.VMEM(shape, jnp.float32)] * copies


def _forward_kernel(plan: Plan, rows: int, at: Operands, out_ref, normaliser_ref, tiles_ref=None):
    if tiles_ref is not None:
        pl.when(pl.program_id(1) == 0)(partial(_spread, plan, at.vector_NTW, tiles_ref))
    heads = range(plan.heads)

    def values(row: Any, j: Any) -> list[jax.Array]:
        """Returns the values of the heads, transposed: [K, k]."""
        v_Pk = _block_of(at.v_BSJ, row, j, plan.block_k, plan.source_length).T
        return [v_Pk[_lanes_of(plan, head)] for head in heads]

    def store(row: Any, i: Any, states: Iterable[_Softmax]) -> None:
        columns = pl.ds(i * plan.block_q, plan.block_q)
        mixed = []
        for head, (maximum_1q, sum_1q, mixed_Kq) in enumerate(states):
            sum_1q = jnp.where(sum_1q == 0, 1.0, sum_1q)
            normaliser_ref[row, head : head + 1, columns] = maximum_1q + jnp.log(sum_1q)
            mixed.append(mixed_Kq * (1 / sum_1q))
        out_ref[row, columns, :] = jnp.concatenate(mixed, 0).T.astype(out_ref.dtype)

    if plan.loops:

        def query_block(i: jax.Array, _: None) -> None:
            def key_block(j: jax.Array, states: tuple[_Softmax, ...]) -> tuple[_Softmax, ...]:
                key_ids, of_heads = _key_ids(at, 0, j, plan), values(0, j)
                tiles = [_logits(plan, at, tiles_ref, key_ids, 0, i, j, head) for head in heads]
                each = zip(states, tiles, of_heads, strict=True)
                return tuple(_absorb(state, tile, v_Kk) for state, tile, v_Kk in each)

            row_1q = jnp.zeros((1, plan.block_q), jnp.float32)
            nothing = jnp.zeros((plan.head_dim, plan.block_q), jnp.float32)
            start = _Softmax(row_1q + _LEAST, row_1q, nothing)
            last = i + 1 if plan.skips else plan.key_blocks
            states = lax.fori_loop(0, last, key_block, (start,) * plan.heads)
            store(0, i, states)

        lax.fori_loop(0, plan.query_blocks, query_block, None)
        return

    together = plan.unrolled(rows, _UNROLLED_FORWARD)
    work = [
        (row, i, j, head)
        for row in range(together)
        for i in range(plan.query_blocks)
        for head in heads
        for j in (j for block, j in plan.pairs if block == i)
    ]

    def some_rows(first: Any) -> None:
        key_ids = {
            (row, j): _key_ids(at, first + row, j, plan)
            for row in range(together)
            for j in range(plan.key_blocks)
        }

        def products(row: int, i: int, j: int, head: int) -> jax.Array:
            return _logits(plan, at, tiles_ref, key_ids[row, j], first + row, i, j, head)

        states: dict[int, _Softmax] = {}
        for number, ((row, i, j, head), logits_kq) in enumerate(_one_ahead(work, products)):
            v_Kk = values(first + row, j)[head]
            states[head] = _absorb(states.get(head), logits_kq, v_Kk)
            if number + 1 == len(work) or work[number + 1][:2] != (row, i):
                store(first + row, i, [states[head] for head in heads])
                states = {}

    _for_each(rows, together, some_rows)


def _backward_kernel(plan: Plan, rows: int, at: Any, dq_ref, dk_ref, dv_ref, *refs):
    operands, out_ref, normaliser_ref, gradient_ref = at
    vector_gradient_ref: Any = None
    tiles_ref: Any = None
    tiles_gradient_ref: Any = None
    of_loops: Any = refs
    if plan.bias is not None:
        vector_gradient_ref, tiles_ref, tiles_gradient_ref, *of_loops = refs

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            _spread(plan, operands.vector_NTW, tiles_ref)
            tiles_gradient_ref[...] = jnp.zeros_like(tiles_gradient_ref)

    heads = range(plan.heads)

    def query_side(row: Any, i: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns transposed queries and gradients [P, q], and gradients times outputs [G, q]."""
        q_qP = _block_of(operands.q_BLJ, row, i, plan.block_q, plan.length)
        gradient_qP = _block_of(gradient_ref, row, i, plan.block_q, plan.length)
        inner_Gq = None
        if out_ref is not None:
            out_qP = _block_of(out_ref, row, i, plan.block_q, plan.length)
            product_Pq = (gradient_qP.astype(jnp.float32) * out_qP.astype(jnp.float32)).T
            parts = [product_Pq[_lanes_of(plan, head)] for head in heads]
            inner_Gq = jnp.concatenate([jnp.sum(part, 0, keepdims=True) for part in parts], 0)
        return q_qP.T, gradient_qP.T, inner_Gq

    def products(key_ids: Any, row: Any, i: Any, j: Any, head: int) -> tuple[jax.Array, jax.Array]:
        """Returns logits and gradients of weights, [k, q] both."""
        v_kP = _block_of(operands.v_BSJ, row, j, plan.block_k, plan.source_length)
        gradient_qP = _block_of(gradient_ref, row, i, plan.block_q, plan.length)
        weights_gradient = _dot(_only(plan, v_kP, head), gradient_qP, 1, 1)
        return (
            _logits(plan, operands, tiles_ref, key_ids, row, i, j, head),
            weights_gradient,
        )

    def gradients(
        side: Any, k_Pk: jax.Array, tile: tuple, row: Any, i: Any, j: Any, head: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what a tile adds to the gradients of a head: dq [K, q], dk and dv [K, k]."""
        q_Pq, gradient_Pq, inner_Gq = side
        logits_kq, weights_gradient_kq = tile
        columns, lanes = pl.ds(i * plan.block_q, plan.block_q), _lanes_of(plan, head)
        weights_kq = jnp.exp(logits_kq - normaliser_ref[row, head : head + 1, columns])
        product_kq = weights_kq * weights_gradient_kq
        if inner_Gq is None:
            inner_1q = jnp.sum(product_kq, 0, keepdims=True)
        else:
            inner_1q = inner_Gq[head : head + 1]
        logits_gradient_kq = product_kq - weights_kq * inner_1q
        if tiles_gradient_ref is not None:
            tiles_gradient_ref[plan.tile(head, i, j)] += logits_gradient_kq
        logits_gradient_kq = logits_gradient_kq.astype(q_Pq.dtype)
        dv_Kk = _dot(gradient_Pq[lanes], weights_kq.astype(q_Pq.dtype), 1, 1)
        dk_Kk = _dot(q_Pq[lanes], logits_gradient_kq, 1, 1)
        dq_Kq = _dot(k_Pk[lanes], logits_gradient_kq, 1, 0)
        return dq_Kq, dk_Kk, dv_Kk

    def store(ref: Any, row: Any, index: Any, block: int, x_Pn: jax.Array, scale: float) -> None:
        x_Pn = x_Pn if scale == 1 else x_Pn * scale
        ref[row, pl.ds(index * block, block), :] = x_Pn.T.astype(ref.dtype)

    def keys(row: Any, j: Any) -> jax.Array:
        return _block_of(operands.k_BSJ, row, j, plan.block_k, plan.source_length).T

    if plan.loops:
        q_ref, gradients_ref, inner_ref, sums_ref = of_loops

        def prepare(i: jax.Array, _: None) -> None:
            q_ref[i], gradients_ref[i], inner_Gq = query_side(0, i)
            if inner_Gq is not None:
                inner_ref[i] = inner_Gq
            sums_ref[i] = jnp.zeros_like(sums_ref[i])

        def key_block(j: jax.Array, _: None) -> None:
            key_ids, k_Pk = _key_ids(operands, 0, j, plan), keys(0, j)

            def query_block(i: jax.Array, sums: tuple) -> tuple:
                inner_Gq = None if out_ref is None else inner_ref[i]
                side = q_ref[i], gradients_ref[i], inner_Gq
                tiles = [products(key_ids, 0, i, j, head) for head in heads]
                each = [gradients(side, k_Pk, tiles[head], 0, i, j, head) for head in heads]
                dq, dk, dv = (jnp.concatenate(parts, 0) for parts in zip(*each, strict=True))
                sums_ref[i] += dq
                return sums[0] + dk, sums[1] + dv

            nothing = jnp.zeros((plan.lanes, plan.block_k), jnp.float32)
            first = j if plan.skips else 0
            dk, dv = lax.fori_loop(first, plan.query_blocks, query_block, (nothing, nothing))
            store(dk_ref, 0, j, plan.block_k, dk, plan.scale)
            store(dv_ref, 0, j, plan.block_k, dv, 1.0)

        def finish(i: jax.Array, _: None) -> None:
            store(dq_ref, 0, i, plan.block_q, sums_ref[i], plan.scale)

        lax.fori_loop(0, plan.query_blocks, prepare, None)
        lax.fori_loop(0, plan.key_blocks, key_block, None)
        lax.fori_loop(0, plan.query_blocks, finish, None)
    else:
        together = plan.unrolled(rows, _UNROLLED_BACKWARD)
        work = [
            (row, i, j, head) for row in range(together) for i, j in plan.pairs for head in heads
        ]

        def some_rows(first: Any) -> None:
            key_ids = {
                (row, j): _key_ids(operands, first + row, j, plan)
                for row in range(together)
                for j in range(plan.key_blocks)
            }
            sides: dict[Any, Any] = {}
            sums: dict[tuple, jax.Array] = {}

            def ahead(row: int, i: int, j: int, head: int) -> tuple[jax.Array, jax.Array]:
                return products(key_ids[row, j], first + row, i, j, head)

            def add(name: str, row: int, index: int, head: int, x: jax.Array) -> None:
                known = sums.get((name, row, index, head))
                sums[name, row, index, head] = x if known is None else known + x

            def joined(name: str, row: int, index: int) -> jax.Array:
                return jnp.concatenate([sums.pop((name, row, index, head)) for head in heads], 0)

            for number, ((row, i, j, head), tile) in enumerate(_one_ahead(work, ahead)):
                if (row, i) not in sides:
                    sides[row, i] = query_side(first + row, i)
                k_Pk = keys(first + row, j)
                parts = gradients(sides[row, i], k_Pk, tile, first + row, i, j, head)
                for name, index, part in zip(("dq", "dk", "dv"), (i, j, j), parts, strict=True):
                    add(name, row, index, head, part)
                rest = work[number + 1 :]
                if not any((other[0], other[2]) == (row, j) for other in rest):
                    store(dk_ref, first + row, j, plan.block_k, joined("dk", row, j), plan.scale)
                    store(dv_ref, first + row, j, plan.block_k, joined("dv", row, j), 1.0)
                if not any(other[:2] == (row, i) for other in rest):
                    store(dq_ref, first + row, i, plan.block_q, joined("dq", row, i), plan.scale)

        _for_each(rows, together, some_rows)

    if vector_gradient_ref is not None:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _() -> None:
            for tile in range(plan.heads * plan.tiles):
                vector_gradient_ref[tile : tile + 1, :] = _fold(tiles_gradient_ref[tile])


class _Softmax(NamedTuple):
    """The state of a softmax over keys: maxima and sums [1, q], sums of weighted values [K, q]."""

    maximum_1q: jax.Array
    sum_1q: jax.Array
    mixed_Kq: jax.Array


def _absorb(state: _Softmax | None, logits_kq: jax.Array, v_Kk: jax.Array) -> _Softmax:
    """Returns the state after more keys."""
    before = _LEAST if state is None else state.maximum_1q
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
    plan: Plan, at: Operands, tiles_ref: Any, key_ids: list, row: Any, i: Any, j: Any, head: int
) -> jax.Array:
    """Returns the masked logits of a tile, float32 [k, q]."""
    columns = pl.ds(i * plan.block_q, plan.block_q)
    k_kP = _only(plan, at.k_BSJ[row, pl.ds(j * plan.block_k, plan.block_k), :], head)
    logits_kq = _dot(k_kP, at.q_BLJ[row, columns, :], 1, 1)
    if plan.scale != 1:
        logits_kq *= plan.scale
    if tiles_ref is not None:
        logits_kq += tiles_ref[plan.tile(head, i, j)]
    visible_kq = key_ids[0] == at.query_BIL[row, 0:1, columns]
    if plan.predicate.causal and not plan.causal_bias:
        key_k1 = lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0) + j * plan.block_k
        query_1q = lax.broadcasted_iota(jnp.int32, (1, plan.block_q), 1) + i * plan.block_q
        visible_kq &= key_k1 <= query_1q
    if plan.predicate.prefix:
        visible_kq |= key_ids[1] == at.query_BIL[row, 1:2, columns]
    return jnp.where(visible_kq, logits_kq, _MASKED)


def _key_ids(at: Operands, row: Any, j: Any, plan: Plan) -> list[jax.Array]:
    """Returns the ids of a block of keys as columns [k, 1]."""
    ids_Ik = at.key_BIS[row, :, pl.ds(j * plan.block_k, plan.block_k)]
    # A transposition needs whole registers.
    return [
        jnp.broadcast_to(ids_Ik[n : n + 1], (LANES, plan.block_k)).T[:, :1]
        for n in range(ids_Ik.shape[0])
    ]


def _block_of(ref: Any, row: Any, index: Any, block: int, length: int) -> jax.Array:
    """Returns a block of a row of `ref`, [block, P]. What is after `length` in memory becomes 0."""
    x_nP = ref[row, pl.ds(index * block, block), :]
    if length % block == 0:
        return x_nP
    position_nP = lax.broadcasted_iota(jnp.int32, x_nP.shape, 0) + index * block
    return jnp.where(position_nP < length, x_nP.astype(jnp.float32), 0).astype(x_nP.dtype)


def _lanes_of(plan: Plan, head: int) -> slice:
    return slice(head * plan.head_dim, (head + 1) * plan.head_dim)


def _only(plan: Plan, x_nP: jax.Array, head: int) -> jax.Array:
    """Returns `x_nP` with the other heads' lanes 0: a product is 128 deep in any case."""
    if plan.heads == 1:
        return x_nP
    lane_nP = lax.broadcasted_iota(jnp.int32, x_nP.shape, 1)
    lanes = _lanes_of(plan, head)
    inside_nP = (lane_nP >= lanes.start) & (lane_nP < lanes.stop)
    # The vector unit of v5e has no bfloat16.
    return jnp.where(inside_nP, x_nP.astype(jnp.float32), 0).astype(x_nP.dtype)


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Returns the float32 product of two matrices over one axis of each."""
    return lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )


def _spread(plan: Plan, vectors_ref: Any, tiles_ref: Any) -> None:
    """Makes the tiles of the bias from their vectors, without the strided rotation that v4 lacks.

    Row r is turned right by r: eight rows by the bits of their number, then twice as many by
    turning all at once.
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


def _fold(tile_kq: jax.Array) -> jax.Array:
    """Returns the sums of a tile over its diagonals, [1, W]: the transpose of `_spread`."""
    x = jnp.concatenate([tile_kq, jnp.zeros_like(tile_kq)], 1)
    period, rows = x.shape[1], x.shape[0]
    # Row r is turned left by r: the lower half by half of the rows, then both halves at once.
    while rows > 8:
        rows //= 2
        x = x[:rows] + pltpu.roll(x[rows:], period - rows, 1)
    return sum(
        (pltpu.roll(x[row : row + 1], period - row, 1) for row in range(1, rows)), start=x[:1]
    )


def _for_each(rows: int, together: int, some_rows: Callable[[Any], None]) -> None:
    """Runs `some_rows` on the first of each `together` rows."""
    if rows == together:
        some_rows(0)
    else:
        lax.fori_loop(0, rows // together, lambda n, _: some_rows(n * together), None)


_Item = TypeVar("_Item", bound=tuple)
_Result = TypeVar("_Result")


def _one_ahead(
    work: list[_Item], products: Callable[..., _Result]
) -> Iterator[tuple[_Item, _Result]]:
    """Yields each item with its products, after writing down the products of the next.

    So the matrix unit has work while the vector unit uses the results.
    """
    upcoming = products(*work[0])
    for number, item in enumerate(work):
        current = upcoming
        if number + 1 < len(work):
            upcoming = products(*work[number + 1])
        yield item, current
