"""An exponential moving average (EMA) of parameters, kept in the state of their optimizer.

Being part of that state, it is sharded as the parameters are, saved, restored, and left as it is by
an update that is skipped.
"""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.config.averages import AveragesConfig

Tree = Any
# Paths of an AverageState's leaves in the state of a chain.
_LEAF = re.compile(r"\d+/(average/.*|clock/count)")


class AverageState(NamedTuple):
    """The average, a float32 tree like the trained parameters, and the count of updates."""

    average: Tree
    clock: optax.ScaleByScheduleState


def is_of_average(name: str) -> bool:
    """Returns whether a leaf of an optimizer's state, named by its path, belongs to an average."""
    return _LEAF.fullmatch(name) is not None


def with_average(
    inner: optax.GradientTransformation, config: AveragesConfig
) -> optax.GradientTransformation:
    """Returns the chain `inner`; if `config` wants an average, an AverageState ends its state.

    After update n since `ema_start_step`, the average is the mean of the parameters after updates
    i = 1 to n with weights proportional to decay ** (n - i). It begins as the initial parameters.
    """
    decay, start = config.ema_decay, config.ema_start_step
    if decay is None:
        return inner

    def init(params: Tree) -> tuple[Any, ...]:
        average = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        clock = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
        return (*inner.init(params), AverageState(average, clock))

    def update(
        gradients: Tree, state: tuple[Any, ...], params: Tree | None = None
    ) -> tuple[Tree, tuple[Any, ...]]:
        *of_inner, (average, clock) = state
        updates, after = inner.update(gradients, tuple(of_inner), params)
        count = optax.safe_increment(clock.count)
        averaged = count - start
        # The power of the decay, by logarithms, so that 1 minus it is exact for long averages too.
        power = averaged.astype(jnp.float32) * math.log(decay)
        weight = (1 - decay) / -jnp.expm1(jnp.minimum(power, math.log(decay)))

        def moved(old: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(jnp.float32)
            return jnp.where(averaged > 1, old + weight * (new - old), new)

        average = jax.tree.map(moved, average, optax.apply_updates(params, updates))
        return updates, (*after, AverageState(average, optax.ScaleByScheduleState(count)))

    return optax.GradientTransformation(init, update)


def average_in(state: Any) -> Tree | None:
    """Returns the average in an optimizer's state; None if it keeps none."""
    return state[-1].average if isinstance(state[-1], AverageState) else None
