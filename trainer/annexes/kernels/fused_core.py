"""Runs the kernels on each device, for that device's rows and heads.

Dimensions as in `trainer.model.attention_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.spmd import logical_to_mesh_axes
from jax import Array
from jax.sharding import PartitionSpec

from trainer.annexes.kernels.fused_attention import fused_attention
from trainer.annexes.kernels.fused_sparsity import tables_of
from trainer.annexes.kernels.fused_tiles import bias_fits
from trainer.annexes.kernels.hardware import group_width, kernel_bytes
from trainer.annexes.kernels.triton_attention import triton_attention
from trainer.model.attention_call import AttentionCall, devices_of_heads
from trainer.model.dense import Order, tracing_device
from trainer.model.masks import Rows
from trainer.model.positions import waves
from trainer.model.sparsity import Pattern


def run(call: AttentionCall, q_BLJ: Array, k_BSJ: Array | None, v_BSJ: Array | None) -> Array:
    """Calls the kernels on each device for that device's rows and heads."""
    device, relative = tracing_device(), call.view.positions.relative
    if k_BSJ is not None and v_BSJ is not None:
        groups = k_BSJ.shape[-1] // call.head_dim
        whole = device.is_gpu and groups % devices_of_heads() == 0
        k_BSJ, v_BSJ = _changed(call, k_BSJ, v_BSJ, whole)
        if call.angles is not None:
            q_BLJ = rotate_joined(q_BLJ, call.angles[0], call.head_dim, call.amplitude)
    visits, tables = None, None
    if call.pattern is not None:
        visits, tables = _tables(call, call.pattern, q_BLJ.shape[1])
    core: Callable[..., Array] = triton_attention
    if not device.is_gpu:
        memory, interpret = kernel_bytes(device), not device.is_tpu
        core = partial(fused_attention, vmem_bytes=memory, interpret=interpret)
    core = partial(core, head_dim=call.head_dim, predicate=call.predicate, scale=call.scale)
    core = partial(core, softcap=call.shared.attention_softcap)
    both = call.view.rows, call.view.source_rows
    sides = [Rows(side.segment_BL, side.prefix_BL) for side in both]
    table_HR = None if relative is None else relative.table_HR

    def attend(*operands: Any) -> Array:
        *others, table_HR, tables = operands
        own = None if relative is None else relative._replace(table_HR=table_HR)
        layout = {} if visits is None else {"layout": (visits, tables)}
        return core(*others, relative=own, **layout)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        attend = _divided(attend, visits is not None and visits.by_group)
    return attend(q_BLJ, k_BSJ, v_BSJ, *sides, table_HR, tables)


def _changed(call: AttentionCall, k_BSJ: Array, v_BSJ: Array, whole: bool) -> tuple[Array, Array]:
    """Returns rotated keys, and values with dropout; not repeated if the kernels take groups."""
    # Heads that share values drop different values.
    if not whole or call.drops:
        k_BSJ, v_BSJ = call.repeated(k_BSJ), call.repeated(v_BSJ)
    if call.drops:
        v_BSJ = call.drop_values(v_BSJ)
    if call.angles is not None:
        k_BSJ = rotate_joined(k_BSJ, call.angles[1], call.head_dim, call.amplitude)
    return k_BSJ, v_BSJ


def rotate_joined(
    x_BLJ: Array, angle_BLC: Array, head_dim: int, amplitude: float | None = None
) -> Array:
    """`rotate` for heads that stay joined: splitting them would copy arrays around TPU kernels."""
    pairs, heads = angle_BLC.shape[-1], x_BLJ.shape[-1] // head_dim
    channel_J = np.arange(x_BLJ.shape[-1]) % head_dim
    rest = head_dim - 2 * pairs

    def joined(first_BLC: Array, second_BLC: Array, other: float) -> Array:
        other_BLC = jnp.full((*angle_BLC.shape[:2], rest), other, angle_BLC.dtype)
        head_BLK = jnp.concatenate([first_BLC, second_BLC, other_BLC], axis=-1)
        return jnp.tile(head_BLK, (1, 1, heads))

    cos_BLC, sin_BLC = waves(angle_BLC, amplitude)
    partner_BLJ = jnp.where(
        channel_J < pairs, jnp.roll(x_BLJ, -pairs, axis=-1), jnp.roll(x_BLJ, pairs, axis=-1)
    )
    rotated_BLJ = x_BLJ.astype(jnp.float32) * joined(cos_BLC, cos_BLC, 1.0)
    rotated_BLJ += partner_BLJ.astype(jnp.float32) * joined(-sin_BLC, sin_BLC, 0.0)
    return rotated_BLJ.astype(x_BLJ.dtype)


def _tables(call: AttentionCall, pattern: Pattern, length: int) -> Any:
    known, memory = call.predicate, kernel_bytes(tracing_device())
    biased_dim = call.head_dim if call.view.positions.relative else None
    fits = partial(bias_fits, length, known.skips, biased_dim, memory)
    return tables_of(pattern, call.num_heads, call.head_dim, length, known, fits)


def _divided(attend: Callable[..., Array], by_group: bool) -> Callable[..., Array]:
    """Runs `attend` on each device for that device's rows and heads."""
    batch, heads = logical_to_mesh_axes(("batch", "joined_kv")) or (None, None)
    joined, rows = PartitionSpec(batch, None, heads), PartitionSpec(batch)
    of_tables = PartitionSpec(heads if by_group else None)
    return jax.shard_map(
        attend,
        in_specs=(joined, joined, joined, rows, rows, PartitionSpec(heads), of_tables),
        out_specs=joined,
        # Kernels do not declare the axes over which their results vary.
        check_vma=False,
    )


def order(call: AttentionCall, groups: int) -> Order | None:
    """Returns how queries, keys and values share an array; None if kernels need separate ones.

    `groups` are the heads of keys and values.
    """
    devices = devices_of_heads()
    if tracing_device().is_gpu:
        return Order(devices, 1) if groups % devices == 0 else None
    pieces, rest = divmod(groups * call.head_dim, devices * group_width(call.head_dim))
    return Order(devices, pieces) if groups == call.num_heads and rest == 0 else None
