"""Softmax attention in Pallas kernels for GPUs, which keep no logits [B, H, L, S] in memory.

The counterpart of `fused_attention`, compiled by Triton. Four kernels: the forward pass, and the
gradients of queries, of keys and values, and of relative bias. Each recomputes its tiles of logits.
A program of the first three takes one head of one row and a block of queries or keys. Distances
are equal in all tiles on a diagonal of blocks, so a program of the last one adds the gradients of
all tiles on a diagonal, over the rows of a part of the batch. No program adds to another's results,
so sums have one order and a step repeats bit for bit.

Logits are in units of log 2, for exp2; statistics are float32. Lengths need not fill blocks: loads
are masked. Heads of queries may share a head of keys and values.

Dimensions: B batch, L query length, S key length, H heads, G heads of keys and values, K head size,
J = H * K, R relative buckets, N distances, D diagonals of blocks, I ids, P parts of the batch.
Inside kernels: q queries and k keys in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from trainer.annexes.kernels.fused_attention import NO_KEY, NO_QUERY, ids_of
from trainer.annexes.kernels.fused_kernels import LEAST
from trainer.annexes.kernels.fused_tiles import seen_blocks
from trainer.annexes.kernels.hardware import GPU_HEADS
from trainer.annexes.kernels.triton_tiles import (
    LOG2_E,
    Operands,
    Plan,
    dot,
    gradients_of,
    load_keys,
    load_queries,
    logits_of,
    store,
)
from trainer.model.attention_cores import SAVED
from trainer.model.masks import Mask, Rows
from trainer.model.positions import RelativeBias

# Queries and keys of a tile. Tensor cores need 16; more queries reuse keys and values more often.
_BLOCK_Q, _BLOCK = 128, 64
# Programs of the bias's kernel per row and head that keep a GPU with 132 processors busy.
_PROGRAMS = 512
# Products of a tile and a head's channels in each kernel.
_PRODUCTS = {"_forward": 2, "_query": 3, "_key": 4, "_bias": 2}


def triton_attention(
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
    interpret: bool = False,
    softcap: float | None = None,
) -> Array:
    """Returns values weighted by `softmax((q k + bias) * scale)`: [B, L, J] in the dtype of q.

    With `softcap` c, logits x become c * tanh(x / c) before the softmax. Keys and values may have
    fewer heads, [B, S, G * K]. A query that sees no key gets zeros. Bias, logits and all sums are
    float32; weights are rounded to the operands' dtype before the products.

    What one product projects need not be taken apart: `q_BLJ` may be [B, L, 3 * J] without the
    other two, or `k_BSJ` [B, S, 2 * G * K] without `v_BSJ`, in one piece each (see `Order`). Their
    gradients are such arrays, too.

    Args:
      head_dim: one of GPU_HEADS.
      block: queries and keys per tile, a power of two from 16 on; None chooses from lengths.
      interpret: run the kernels without a GPU, for tests.
    """
    if head_dim not in GPU_HEADS:
        raise ValueError(f"head_dim {head_dim} is not one of {GPU_HEADS}")
    if k_BSJ is None:
        length, width = q_BLJ.shape[1], q_BLJ.shape[2] // 3
        source_length, source_width = length, width
    else:
        length, width = q_BLJ.shape[1:]
        source_length, source_width = k_BSJ.shape[1], k_BSJ.shape[2] // (2 if v_BSJ is None else 1)
    small = max(16, pl.next_power_of_2(min(length, source_length)))
    # Tiles of 64 keys and 256 channels do not fit an H100's shared memory, or spill registers.
    parts = max(1, head_dim // 128)
    plan = Plan(
        length,
        source_length,
        width // head_dim,
        width // source_width,
        head_dim,
        predicate.on(query),
        relative.spec if relative else None,
        scale,
        block or min(_BLOCK_Q // parts, small),
        block or min(_BLOCK // parts, small),
        interpret,
        softcap,
    )
    query_IL = ids_of(query, plan.predicate, length, NO_QUERY).reshape(-1, length)
    key_IS = ids_of(key, plan.predicate, source_length, NO_KEY).reshape(-1, source_length)
    table_HR = relative.table_HR if relative else None
    return _attention(plan, table_HR, Operands(q_BLJ, k_BSJ, v_BSJ, query_IL, key_IS))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, table_HR: Array | None, operands: Operands) -> Array:
    return _forward(plan, table_HR, operands)[0]


def _forward(plan: Plan, table_HR: Array | None, operands: Operands) -> tuple[Array, Any]:
    vector_HN = None if table_HR is None else plan.vectors(table_HR)
    q_BLJ = operands.q_BLJ
    grid = pl.cdiv(plan.length, plan.block_q), plan.num_heads, len(q_BLJ)
    shape = len(q_BLJ), plan.length, plan.num_heads * plan.head_dim
    out = jax.ShapeDtypeStruct(shape, q_BLJ.dtype)
    statistic = jax.ShapeDtypeStruct((len(q_BLJ), plan.num_heads, plan.length), jnp.float32)
    with_bias, results = operands._replace(vector_HN=vector_HN), [out, statistic]
    out_BLJ, normaliser = _call(_forward_kernel, plan, grid, with_bias, results, plan.block_q)
    out_BLJ, normaliser = checkpoint_name((out_BLJ, normaliser), SAVED)
    return out_BLJ, (table_HR, operands, out_BLJ, normaliser)


def _backward(plan: Plan, saved: Any, gradient_BLJ: Array) -> tuple[Any, ...]:
    table_HR, operands, out_BLJ, normaliser = saved
    batch, heads = len(out_BLJ), plan.num_heads
    product_BLJ = gradient_BLJ.astype(jnp.float32) * out_BLJ.astype(jnp.float32)
    inner = jnp.sum(product_BLJ.reshape(batch, plan.length, heads, -1), 3).swapaxes(1, 2)
    operands = operands._replace(gradient_BLJ=gradient_BLJ, normaliser=normaliser, inner=inner)
    table_gradient = None
    if table_HR is not None:
        vector_HN, to_table = jax.vjp(plan.vectors, table_HR)
        operands = operands._replace(vector_HN=vector_HN)
        tiles, to_vector = jax.vjp(plan.tiles, vector_HN)
        parts = math.gcd(batch, pl.next_power_of_2(pl.cdiv(_PROGRAMS, math.prod(tiles.shape[:2]))))
        grid = tiles.shape[1], heads, parts
        part = jax.ShapeDtypeStruct((parts, *tiles.shape), jnp.float32)
        (tiles_gradient,) = _call(_bias_kernel, plan, grid, operands, [part])
        # The tiles' logits are in units of log 2.
        (table_gradient,) = to_table(*to_vector(jnp.sum(tiles_gradient, 0) / LOG2_E))
    q_BLJ, k_BSJ, v_BSJ = operands[:3]
    grid = pl.cdiv(plan.source_length, plan.block), plan.groups, batch
    sources = [x for x in (k_BSJ, v_BSJ) if x is not None] or [q_BLJ]
    of_sources = _call(_key_kernel, plan, grid, operands, sources)
    # The gradients of queries go beside those of keys and values, into the same array.
    shared = of_sources[0] if k_BSJ is None else None
    grid = pl.cdiv(plan.length, plan.block), heads, batch
    (dq,) = _call(_query_kernel, plan, grid, operands, [q_BLJ], into=shared)
    dk = None if k_BSJ is None else of_sources[0]
    dv = None if v_BSJ is None else of_sources[1]
    return table_gradient, Operands(dq, dk, dv, None, None)


_attention.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    plan: Plan,
    grid: tuple[int, ...],
    operands: Operands,
    results: list[Any],
    block: int = 0,
    into: Array | None = None,
) -> list[Array]:
    """Runs a kernel, which finds its blocks in whole arrays; `block` if it is not the plan's.

    The result is written into `into`, if given, which keeps what the kernel does not write.
    """
    flat, structure = jax.tree.flatten(operands)
    given = flat if into is None else [*flat, into]

    def run(*refs: Any) -> None:
        kernel(plan, jax.tree.unflatten(structure, refs[: len(flat)]), *refs[len(given) :])

    kind = kernel.__name__.removesuffix("_kernel")
    name = f"attention{kind}"
    run.__name__ = name
    return pl.pallas_call(
        run,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        interpret=plan.interpret,
        input_output_aliases={} if into is None else {len(flat): 0},
        name=name,
        cost_estimate=_cost(plan, kind, operands, results),
        # With fewer warps, registers of the larger tiles spill.
        compiler_params=triton.CompilerParams(
            num_warps=8 if max(plan.head_dim, block) > _BLOCK else 4, num_stages=2
        ),
    )(*given)


def _cost(plan: Plan, kind: str, operands: Operands, results: list[Any]) -> pl.CostEstimate:
    """Returns what a kernel does; no compiler reads it, but plans of runs do."""
    batch, dtype = len(operands.q_BLJ), operands.q_BLJ.dtype
    keys, bounds = plan.source_length, plan.predicate.bounds
    seen = (seen_blocks(i, 1, 1, keys, bounds) for i in range(plan.length))
    pairs = batch * plan.num_heads * sum(max(end - first, 0) for first, end in seen)
    read, written = (
        sum(array.size * array.dtype.itemsize for array in arrays)
        for arrays in (jax.tree.leaves(operands), results)
    )
    if kind == "_query":  # a part of its result, if that has keys and values as well
        written = batch * plan.length * plan.num_heads * plan.head_dim * dtype.itemsize
    if kind == "_key":
        written = 2 * batch * plan.source_length * plan.groups * plan.head_dim * dtype.itemsize
    flops = 2 * _PRODUCTS[kind] * pairs * plan.head_dim
    return pl.CostEstimate(flops=flops, transcendentals=pairs, bytes_accessed=read + written)


def _forward_kernel(plan: Plan, of: Operands, out_ref: Any, normaliser_ref: Any) -> None:
    i, head, row = (pl.program_id(axis) for axis in range(3))
    block = plan.block_q
    queries = load_queries(plan, of, row, i, block, head)

    def key_block(j: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum_q, sum_q, mixed_qK = state
        keys = load_keys(plan, of, row, j, head // plan.shared)
        logits_qk = logits_of(plan, of, head, queries, keys)
        larger_q = jnp.maximum(maximum_q, jnp.max(logits_qk, 1))
        weights_qk = jnp.exp2(logits_qk - larger_q[:, None])
        shrunk_q = jnp.exp2(maximum_q - larger_q)
        sum_q = sum_q * shrunk_q + jnp.sum(weights_qk, 1)
        added_qK = dot(weights_qk.astype(keys.v_kK.dtype), keys.v_kK)
        return larger_q, sum_q, mixed_qK * shrunk_q[:, None] + added_qK

    zero_q = jnp.zeros(block, jnp.float32)
    start = zero_q + LEAST, zero_q, jnp.zeros((block, plan.head_dim), jnp.float32)
    maximum_q, sum_q, mixed_qK = lax.fori_loop(*plan.keys_of(i, block), key_block, start)
    sum_q = jnp.where(sum_q == 0, 1.0, sum_q)
    inside_q = queries.at_q < plan.length
    statistic = normaliser_ref.at[row, head, pl.ds(i * block, block)]
    triton.store(statistic, maximum_q + jnp.log2(sum_q), mask=inside_q)
    store(plan, (out_ref, 0), row, queries.at_q, i, head, mixed_qK / sum_q[:, None])


def _query_kernel(plan: Plan, of: Operands, dq_ref: Any) -> None:
    i, head, row = (pl.program_id(axis) for axis in range(3))
    queries = load_queries(plan, of, row, i, plan.block, head)

    def key_block(j: Any, dq_qK: Array) -> Array:
        keys = load_keys(plan, of, row, j, head // plan.shared)
        _, gradient_qk = gradients_of(plan, of, head, queries, keys)
        return dq_qK + dot(gradient_qk.astype(keys.k_kK.dtype), keys.k_kK)

    start = jnp.zeros((plan.block, plan.head_dim), jnp.float32)
    dq_qK = lax.fori_loop(*plan.keys_of(i, plan.block), key_block, start)
    store(plan, (dq_ref, 0), row, queries.at_q, i, head, dq_qK * plan.scale)


def _key_kernel(plan: Plan, of: Operands, *refs: Any) -> None:
    j, group, row = (pl.program_id(axis) for axis in range(3))
    keys = load_keys(plan, of, row, j, group)
    bounds = plan.predicate.bounds[::-1]
    first, end = seen_blocks(j, plan.block, plan.block, plan.blocks[0], bounds)
    blocks = jnp.maximum(end - first, 0)

    def query_block(n: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        head = group * plan.shared + lax.div(n, blocks)
        queries = load_queries(plan, of, row, first + lax.rem(n, blocks), plan.block, head)
        weights_kq, gradient_kq = gradients_of(plan, of, head, queries, keys, keys_first=True)
        q_qK, gradient_qK = queries.q_qK, queries.gradient_qK
        dk_kK = sums[0] + dot(gradient_kq.astype(q_qK.dtype), q_qK)
        return dk_kK, sums[1] + dot(weights_kq.astype(q_qK.dtype), gradient_qK)

    start = jnp.zeros((plan.block, plan.head_dim), jnp.float32)
    dk_kK, dv_kK = lax.fori_loop(0, plan.shared * blocks, query_block, (start, start))
    # The results are arrays like those of keys and values.
    _, (_, of_keys), (_, of_values) = of.parts(plan)
    store(plan, (refs[0], of_keys), row, keys.at_k, j, group, dk_kK * plan.scale)
    store(plan, (refs[-1], of_values), row, keys.at_k, j, group, dv_kK)


def _bias_kernel(plan: Plan, of: Operands, tiles_ref: Any) -> None:
    diagonal, head, part = (pl.program_id(axis) for axis in range(3))
    rows = of.q_BLJ.shape[0] // tiles_ref.shape[0]
    later = diagonal + plan.diagonals[0]
    first = jnp.maximum(-later, 0)
    blocks = jnp.minimum(plan.blocks[0], plan.blocks[1] - later) - first

    def tile(n: Any, sum_qk: Array) -> Array:
        row, i = part * rows + lax.div(n, blocks), first + lax.rem(n, blocks)
        queries = load_queries(plan, of, row, i, plan.block, head)
        keys = load_keys(plan, of, row, i + later, head // plan.shared)
        return sum_qk + gradients_of(plan, of, head, queries, keys)[1]

    start = jnp.zeros((plan.block, plan.block), jnp.float32)
    tiles_ref[part, head, diagonal] = lax.fori_loop(0, rows * blocks, tile, start)
