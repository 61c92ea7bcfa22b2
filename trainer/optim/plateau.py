"""Schedules that are lowered after evaluations by a factor in the optimizer's state."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.optim.schedule import Schedule

Tree = Any


class PlateauState(NamedTuple):
    """State of a transformation whose schedule is multiplied by `rate_scale`, float32 []."""

    inner: Any
    rate_scale: jax.Array


def droppable(
    make: Callable[[Schedule], optax.GradientTransformation], schedule: Schedule
) -> optax.GradientTransformation:
    """Returns `make(schedule)`, with the schedule scaled by a number in the state, initially 1."""

    def init(params: Tree) -> PlateauState:
        return PlateauState(make(schedule).init(params), jnp.ones((), jnp.float32))

    def update(
        updates: Tree, state: PlateauState, params: Tree | None = None
    ) -> tuple[Tree, PlateauState]:
        scaled = make(lambda step: schedule(step) * state.rate_scale)
        updates, inner = scaled.update(updates, state.inner, params)
        return updates, PlateauState(inner, state.rate_scale)

    return optax.GradientTransformation(init, update)


def set_rate_scale(state: Any, scale: float) -> Any:
    """Returns a TrainState with schedules scaled by `scale`; unchanged if it has none to scale."""

    def is_scaled(node: Any) -> bool:
        return isinstance(node, PlateauState)

    if not any(map(is_scaled, jax.tree.leaves(state.opt_state, is_leaf=is_scaled))):
        return state

    def put(node: Any) -> Any:
        if not is_scaled(node):
            return node
        # `full_like` keeps the sharding, which may span several processes.
        return node._replace(rate_scale=jnp.full_like(node.rate_scale, scale))

    opt_state = jax.tree.map(put, state.opt_state, is_leaf=is_scaled)
    return dataclasses.replace(state, opt_state=opt_state)
