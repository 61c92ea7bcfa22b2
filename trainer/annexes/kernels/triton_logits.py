"""Statistics of logits for the loss, computed in one pass by a Pallas kernel for GPUs.

The counterpart of `logit_kernel`: a program reads one row of logits once, where XLA reads it twice.

Dimensions: B batch, L length, V vocabulary, N = B * L; C columns of a step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from trainer.annexes.kernels.hardware import is_faster
from trainer.engine.loss import Statistics
from trainer.model.device import Device

# Columns per step: four warps read 16 bytes a thread, four times.
_COLUMNS = 2048
# Below all logits, and finite: the difference of two of them is 0.
_LEAST = -1e30


def kernel(device: Device, length: int, vocab_size: int) -> Callable[..., Statistics] | None:
    """Returns `triton_statistics`; None where it is not expected to be faster."""
    return triton_statistics if is_faster(device) else None


def triton_statistics(
    logits_BLV: jax.Array, targets_BL: jax.Array, interpret: bool = False
) -> Statistics:
    """Returns the statistics of float32 logits; `interpret` runs without a GPU, for tests."""
    batch, length, vocab_size = logits_BLV.shape
    shape = jax.ShapeDtypeStruct((batch * length,), jnp.float32)
    found = pl.pallas_call(
        partial(_kernel, vocab_size),
        grid=(batch * length,),
        out_shape=[shape] * 4,
        interpret=interpret,
        name="logit_statistics",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(logits_BLV.reshape(-1, vocab_size), targets_BL.reshape(-1).astype(jnp.int32))
    return Statistics(*(each_N.reshape(batch, length) for each_N in found))


def _kernel(vocab_size: int, logits_ref: Any, targets_ref: Any, *out_refs: Any) -> None:
    row = pl.program_id(0)
    columns = min(_COLUMNS, pl.next_power_of_2(vocab_size))
    own = targets_ref[row]

    def step(number: Any, state: Any) -> Any:
        target_C, rival_C, total_C, maximum_C, sum_C = state
        at_C = number * columns + jnp.arange(columns)
        inside_C = at_C < vocab_size
        places = logits_ref.at[row, pl.ds(number * columns, columns)]
        x_C = triton.load(places, mask=inside_C, other=-jnp.inf)
        larger_C = jnp.maximum(maximum_C, x_C)
        return (
            jnp.where(at_C == own, x_C, target_C),
            jnp.where(at_C == own, rival_C, jnp.maximum(rival_C, x_C)),
            total_C + jnp.where(inside_C, x_C, 0.0),
            larger_C,
            sum_C * jnp.exp(maximum_C - larger_C) + jnp.exp(x_C - larger_C),
        )

    zeros_C = jnp.zeros(columns, jnp.float32)
    start = zeros_C, zeros_C - jnp.inf, zeros_C, zeros_C + _LEAST, zeros_C
    steps = pl.cdiv(vocab_size, columns)
    target_C, rival_C, total_C, maximum_C, sum_C = lax.fori_loop(0, steps, step, start)
    maximum = jnp.max(maximum_C)
    log_z = jnp.log(jnp.sum(sum_C * jnp.exp(maximum_C - maximum))) + maximum
    found = log_z, jnp.sum(target_C), jnp.max(rival_C), jnp.sum(total_C)
    for ref, each in zip(out_refs, found, strict=True):
        ref[row] = each
