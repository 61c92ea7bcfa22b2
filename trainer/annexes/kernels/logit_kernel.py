"""Statistics of logits for the loss, computed in one pass by a Pallas kernel for TPUs.

XLA finds a row's maximum and sums its exponentials in two passes over [B, L, V]. The kernel keeps
whole rows in the core's own memory, so it reads logits once.

Dimensions: B batch, L length, V vocabulary; l rows in a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.annexes.kernels.hardware import kernel_bytes
from trainer.engine.loss import Statistics
from trainer.model.device import LANES, SUBLANES, Device

# Maximum number of rows in a block: enough to pipeline the additions of one column of registers.
_MOST_ROWS = 64
# Columns of registers per loop iteration.
_UNROLLED = 8


def kernel(device: Device, length: int, vocab_size: int) -> Callable[..., Statistics] | None:
    """Returns `statistics` for logits of a shape; None if rows are too long."""
    memory = kernel_bytes(device)
    rows = rows_of_block(length, vocab_size, memory)
    return partial(statistics, rows=rows, memory=memory) if rows else None


def rows_of_block(length: int, vocab_size: int, memory: int) -> int:
    """Returns the number of rows per block, or 0 if `memory`, in bytes, holds too few.

    Memory holds two blocks, because the next one is prefetched.
    """
    row = 4 * LANES * pl.cdiv(vocab_size, LANES)
    fitting = min(_MOST_ROWS, memory // (3 * row) // SUBLANES * SUBLANES)
    if not fitting:
        return 0
    groups = pl.cdiv(length, SUBLANES)
    blocks = pl.cdiv(groups, fitting // SUBLANES)
    return pl.cdiv(groups, blocks) * SUBLANES


def statistics(
    logits_BLV: jax.Array, targets_BL: jax.Array, rows: int, memory: int, interpret: bool = False
) -> Statistics:
    """Returns the statistics of float32 logits.

    `rows` comes from `rows_of_block`; `memory` is the core memory in bytes that the kernel may use;
    `interpret` runs the kernel without a TPU, for tests.
    """
    batch, length, vocab_size = logits_BLV.shape
    found = pl.pallas_call(
        partial(_kernel, vocab_size),
        grid=(batch, pl.cdiv(length, rows)),
        in_specs=[
            pl.BlockSpec((None, rows, vocab_size), lambda row, block: (row, block, 0)),
            pl.BlockSpec((None, rows, 1), lambda row, block: (row, block, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, 4), lambda row, block: (row, block, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, length, 4), jnp.float32),
        interpret=interpret,
        name="logit_statistics",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=memory
        ),
    )(logits_BLV, targets_BL[..., None].astype(jnp.int32))
    return Statistics(*(found[..., number] for number in range(4)))


def _kernel(vocab_size: int, logits_ref: Any, targets_ref: Any, out_ref: Any) -> None:
    rows = logits_ref.shape[0]
    whole, rest = divmod(vocab_size, LANES)
    lane_lV = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    # The target is where this equals the index of the first column.
    distance_lV = targets_ref[...] - lane_lV

    def columns(number: Any) -> jax.Array:
        return logits_ref[:, pl.ds(number * LANES, LANES)]

    def over(step: Any, start: Any) -> Any:
        """Runs `step(number, logits, state)` on all whole columns of registers."""
        together = whole // _UNROLLED

        def some(group: Any, state: Any) -> Any:
            for number in range(_UNROLLED):
                at = group * _UNROLLED + number
                state = step(at, columns(at), state)
            return state

        state = lax.fori_loop(0, together, some, start) if together else start
        for at in range(together * _UNROLLED, whole):
            state = step(at, columns(at), state)
        return state

    def look(number: Any, x_lV: jax.Array, state: Any) -> Any:
        target_lV, rival_lV, total_lV = state
        is_target_lV = distance_lV == number * LANES
        return (
            jnp.where(is_target_lV, x_lV, target_lV),
            jnp.where(is_target_lV, rival_lV, jnp.maximum(rival_lV, x_lV)),
            total_lV + x_lV,
        )

    zeros_lV = jnp.zeros((rows, LANES), jnp.float32)
    state = over(look, (zeros_lV, zeros_lV - jnp.inf, zeros_lV))
    if rest:
        inside_lV = lane_lV < rest
        last_lV = jnp.where(inside_lV, _last(logits_ref, whole, rest), 0.0)
        target_lV, rival_lV, total_lV = look(whole, last_lV, state)
        rival_lV = jnp.where(inside_lV, rival_lV, state[1])
        state = target_lV, rival_lV, total_lV
    target_l1 = jnp.sum(state[0], 1, keepdims=True)
    rival_l1 = jnp.max(state[1], 1, keepdims=True)
    total_l1 = jnp.sum(state[2], 1, keepdims=True)
    maximum_l1 = jnp.maximum(target_l1, rival_l1)

    def add(_: Any, x_lV: jax.Array, sum_lV: jax.Array) -> jax.Array:
        return sum_lV + jnp.exp(x_lV - maximum_l1)

    sum_lV = over(add, zeros_lV)
    if rest:
        last_lV = _last(logits_ref, whole, rest) - maximum_l1
        sum_lV += jnp.where(inside_lV, jnp.exp(jnp.where(inside_lV, last_lV, 0.0)), 0.0)
    log_z_l1 = jnp.log(jnp.sum(sum_lV, 1, keepdims=True)) + maximum_l1
    out_ref[...] = jnp.concatenate([log_z_l1, target_l1, rival_l1, total_l1], 1)


def _last(logits_ref: Any, whole: int, rest: int) -> jax.Array:
    x_lV = logits_ref[:, whole * LANES : whole * LANES + rest]
    return jnp.pad(x_lV, ((0, 0), (0, LANES - rest)))
