"""Softmax attention in Pallas kernels for TPUs, which keep no logits [B, H, L, S] in memory.

One kernel computes the forward pass, another the gradients of queries, keys, values and relative
bias. A grid step takes some rows of the batch and one group of heads, enough to fill the 128
lanes of a register. Logits exist only as tiles [keys, queries] in the core's memory, so sums over
keys add registers instead of moving lanes. Statistics are float32.

Masks are predicates on small integers of queries and keys. The relative bias depends only on
distance, so a tile is one vector, rotated by one more element in each row. Tiles are built once for
all rows of a batch; their gradients are summed over the batch and folded into a vector.

JAX's splash attention takes no additive bias, and its flash attention takes one of shape
[B, H, L, S]. tokamax uses splash attention on TPUs and rejects a bias.

Dimensions: B batch, L query length, S key length, H heads, K head size, J = H * K, N groups of
heads, G heads in a group, R relative buckets, T tiles of the bias, W = 2 * block, I ids.
Inside kernels: q queries and k keys in a block, P lanes in a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.annexes.kernels.fused_kernels import Operands, backward_kernel, forward_kernel
from trainer.annexes.kernels.fused_sparsity import Tables
from trainer.annexes.kernels.fused_tiles import Plan, Visits, blocks_of
from trainer.annexes.kernels.hardware import buffers_of, fills_lanes
from trainer.model.attention_cores import SAVED
from trainer.model.device import LANES
from trainer.model.masks import Mask, Rows
from trainer.model.positions import RelativeBias

# Ids of queries and keys outside any example; they differ, so these never see each other.
NO_QUERY, NO_KEY = -1, -2


def fused_attention(
    q_BLJ: Array,
    k_BSJ: Array | None,
    v_BSJ: Array | None,
    query: Rows,
    key: Rows,
    head_dim: int,
    predicate: Mask,
    relative: RelativeBias | None = None,
    scale: float = 1.0,
    block: int | None = None,
    vmem_bytes: int = 14 << 20,
    interpret: bool = False,
    layout: tuple[Visits, Tables] | None = None,
    softcap: float | None = None,
) -> Array:
    """Returns values weighted by `softmax((q k + bias) * scale)`: [B, L, J] in the dtype of q.

    With `softcap` c, logits x become c * tanh(x / c) before the softmax. A query that sees no key
    gets zeros. Bias, logits and all sums are float32; weights are rounded to the operands' dtype
    before the products. Raises ValueError if heads do not fill registers.

    What one product projects need not be taken apart: `q_BLJ` may be [B, L, 3 * J] without the
    other two, or `k_BSJ` [B, S, 2 * J] without `v_BSJ`, with one piece per group of heads (see
    `Order`). Their gradients are such arrays, too.

    Args:
      block: queries and keys per tile, a power of two; None chooses from lengths and memory.
      vmem_bytes: core memory that a kernel may use.
      interpret: run the kernels without a TPU, for tests.
      layout: `tables_of` a block-sparse layout, whose tiles are the blocks. None means all pairs.
    """
    if not fills_lanes(head_dim):
        raise ValueError(f"head_dim {head_dim} neither divides {LANES} nor is a multiple of it")
    length, source_length = q_BLJ.shape[1], (q_BLJ if k_BSJ is None else k_BSJ).shape[1]
    biased_dim = head_dim if relative else None
    visits, tables = layout or (None, None)
    block = visits.tile if visits else block
    longest, itemsize = max(length, source_length), q_BLJ.dtype.itemsize
    buffers = buffers_of(longest, vmem_bytes, itemsize) or 1
    for_tiles = vmem_bytes if buffers == 2 else vmem_bytes // 4
    blocks = blocks_of(length, source_length, predicate, biased_dim, for_tiles, block)
    plan = Plan(
        length,
        source_length,
        head_dim,
        predicate.on(query),
        relative.spec if relative else None,
        scale,
        *blocks,
        vmem_bytes,
        interpret,
        visits,
        softcap,
        buffers,
    )
    table_HR = relative.table_HR if relative else None
    width = q_BLJ.shape[2]
    missing = -width % plan.lanes
    if missing:  # complete the last group of heads
        widen = ((0, 0), (0, 0), (0, missing))
        q_BLJ, k_BSJ, v_BSJ = jax.tree.map(lambda x: jnp.pad(x, widen), (q_BLJ, k_BSJ, v_BSJ))
        if table_HR is not None:
            table_HR = jnp.pad(table_HR, ((0, missing // head_dim), (0, 0)))
    query_BIL = ids_of(query, plan.predicate, plan.query_blocks * plan.block_q, NO_QUERY)
    key_BIS = ids_of(key, plan.predicate, plan.key_blocks * plan.block_k, NO_KEY)
    operands = Operands(q_BLJ, k_BSJ, v_BSJ, query_BIL, key_BIS, tables=tables)
    out_BLJ = _attention(plan, table_HR, operands)
    return out_BLJ[..., :width] if missing else out_BLJ


def ids_of(rows: Rows, predicate: Mask, length: int, none: int) -> Array:
    """Returns int32 ids [B, I, length]: the segment and, with a prefix, the segment inside it.

    A key is visible if one of its ids equals the query's id in the same place.
    """
    segment_BL = jnp.where(rows.segment_BL > 0, rows.segment_BL, none).astype(jnp.int32)
    ids = [segment_BL]
    if predicate.prefix:
        assert rows.prefix_BL is not None
        ids.append(jnp.where(rows.prefix_BL > 0, segment_BL, none))
    padding = ((0, 0), (0, 0), (0, length - segment_BL.shape[1]))
    return jnp.pad(jnp.stack(ids, 1), padding, constant_values=none)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, table_HR: Array | None, operands: Operands) -> Array:
    return _forward(plan, table_HR, operands)[0]


def _forward(plan: Plan, table_HR: Array | None, operands: Operands) -> tuple[Array, Any]:
    vector_NTW = None if table_HR is None else plan.vectors(table_HR)
    q_BLJ = operands.q_BLJ
    batch, groups = len(q_BLJ), operands.groups(plan)
    statistic = (groups, batch, plan.heads, plan.query_blocks * plan.block_q)
    out = jax.ShapeDtypeStruct((batch, plan.length, groups * plan.lanes), q_BLJ.dtype)
    done = _call(
        forward_kernel,
        plan,
        plan.rows(batch, 4, q_BLJ.dtype.itemsize),
        "attention_forward",
        operands._replace(vector_NTW=vector_NTW),
        Operands(out_BLJ=out, normaliser=jax.ShapeDtypeStruct(statistic, jnp.float32)),
        _tiles_scratch(plan, 1),
    )
    out_BLJ, normaliser = checkpoint_name((done.out_BLJ, done.normaliser), SAVED)
    # With one key block, the backward pass computes these sums from the weights themselves.
    read_out = out_BLJ if plan.key_blocks > 1 else None
    return out_BLJ, (table_HR, operands, read_out, normaliser)


def _backward(plan: Plan, saved: Any, gradient_BLJ: Array) -> tuple[Any, ...]:
    table_HR, operands, out_BLJ, normaliser = saved
    vector_NTW, to_table = None, None
    if table_HR is not None:
        vector_NTW, to_table = jax.vjp(plan.vectors, table_HR)
    operands = operands._replace(vector_NTW=vector_NTW)
    batch, dtype = len(gradient_BLJ), gradient_BLJ.dtype
    scratch = _tiles_scratch(plan, 2)
    if plan.loops:
        blocks, block_q = plan.query_blocks, plan.block_q
        scratch += [
            pltpu.VMEM((blocks, plan.lanes, block_q), dtype),  # queries, transposed
            pltpu.VMEM((blocks, plan.lanes, block_q), dtype),  # gradients of outputs, transposed
            pltpu.VMEM((blocks, plan.heads, block_q), jnp.float32),  # their products with outputs
            pltpu.VMEM((blocks, plan.lanes, block_q), jnp.float32),  # gradients of queries
        ]
    like = (operands.q_BLJ, operands.k_BSJ, operands.v_BSJ)
    results = Operands(*(x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like))
    if vector_NTW is not None:
        vector = jax.ShapeDtypeStruct(vector_NTW.shape, jnp.float32)
        results = results._replace(vector_NTW=vector)
    gradients = _call(
        backward_kernel,
        plan,
        plan.rows(batch, 8, dtype.itemsize),
        "attention_backward",
        operands._replace(out_BLJ=out_BLJ, normaliser=normaliser, gradient_BLJ=gradient_BLJ),
        results,
        scratch,
    )
    table_gradient = to_table(gradients.vector_NTW)[0] if to_table else None
    return table_gradient, gradients._replace(vector_NTW=None)


_attention.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    plan: Plan,
    rows: int,
    name: str,
    operands: Operands,
    results: Operands,
    scratch: list[Any],
) -> Operands:
    """Runs a kernel on a 2-D grid: groups of heads, then blocks of `rows` batch rows."""
    heads = plan.heads
    longest_q, longest_k = plan.query_blocks * plan.block_q, plan.key_blocks * plan.block_k
    groups, batch = operands.groups(plan), len(operands.q_BLJ)

    def channels(length: int, array: Any) -> pl.BlockSpec | None:
        if array is None:
            return None
        shape = (rows, length, array.shape[2] // groups)
        once = {} if plan.buffers == 2 else {"pipeline_mode": pl.Buffered(plan.buffers)}
        return pl.BlockSpec(shape, lambda group, row: (row, 0, group), **once)

    ids = 2 if plan.predicate.prefix else 1
    vector = None
    if plan.bias is not None:
        shape = (None, heads * plan.tiles, 2 * plan.block_q)
        vector = pl.BlockSpec(shape, lambda group, row: (group, 0, 0))

    def specs(arrays: Operands) -> list[pl.BlockSpec]:
        each = Operands(
            channels(longest_q, arrays.q_BLJ),
            channels(longest_k, arrays.k_BSJ),
            channels(longest_k, arrays.v_BSJ),
            pl.BlockSpec((rows, ids, longest_q), lambda group, row: (row, 0, 0)),
            pl.BlockSpec((rows, ids, longest_k), lambda group, row: (row, 0, 0)),
            vector,
            _specs_of_tables(plan, arrays.tables),
            channels(longest_q, arrays.out_BLJ),
            pl.BlockSpec((None, rows, heads, longest_q), lambda group, row: (group, row, 0, 0)),
            channels(longest_q, arrays.gradient_BLJ),
        )
        pairs = zip(each, arrays, strict=True)
        return jax.tree.leaves([spec for spec, array in pairs if array is not None])

    flat, structure = jax.tree.flatten(operands)
    to_write, written = jax.tree.flatten(results)

    def run(*refs: Any) -> None:
        rest = refs[len(flat) :]
        at = jax.tree.unflatten(structure, refs[: len(flat)]).apart(plan)
        to = jax.tree.unflatten(written, rest[: len(to_write)]).apart(plan)
        kernel(plan, rows, at, to, *rest[len(to_write) :])

    done = pl.pallas_call(
        run,
        grid=(groups, batch // rows),
        in_specs=specs(operands),
        out_specs=specs(results),
        out_shape=to_write,
        scratch_shapes=scratch,
        interpret=plan.interpret,
        name=name,
        metadata=plan.metadata,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem_bytes
        ),
    )(*flat)
    return jax.tree.unflatten(written, done)


def _specs_of_tables(plan: Plan, tables: Tables | None) -> Tables | None:
    if tables is None or plan.visits is None:
        return None
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    bits = None
    if tables.bits is not None:
        by_group = plan.visits.by_group
        shape = (None, *tables.bits.shape[1:])
        bits = pl.BlockSpec(shape, lambda group, row: (group if by_group else 0, 0, 0))
    return Tables(scalars, scalars, scalars, scalars, bits)


def _tiles_scratch(plan: Plan, copies: int) -> list[Any]:
    if plan.bias is None:
        return []
    shape = (plan.heads * plan.tiles, plan.block_k, plan.block_q)
    return [pltpu.VMEM(shape, jnp.float32)] * copies
