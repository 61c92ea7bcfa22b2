"""Updates that must not be made: no finite numbers, or a spike of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax

from trainer.config import Config
from trainer.engine.nonfinite import first_nonfinite, leaf_name

# What `Guard.cause` is besides the index of a gradient.
NONE, SPIKE = -1, -2

# Steps that the running mean of the loss looks back on, about; before as many no loss is a spike.
_MEMORY_STEPS = 100

State = TypeVar("State")


@flax.struct.dataclass
class Guard:
    """What is remembered of refused updates, a part of the state; scalars.

    `cause` int32: why the run stands still: SPIKE or the index of the first gradient that is not
    finite (one more than the last: the loss alone is not); NONE where it does not. `skipped` int32:
    updates left out since step 0. `mean_loss` float32: of the updates made, in nats a token, all of
    the first `_MEMORY_STEPS`, exponentially forgotten from then on.
    """

    cause: jax.Array
    skipped: jax.Array
    mean_loss: jax.Array


def new_guard() -> Guard:
    """The guard of step 0."""
    return Guard(jnp.int32(NONE), jnp.int32(0), jnp.float32(0))


def checked(
    before: State,
    after: State,
    gradients: Any,
    loss: tuple[jax.Array, jax.Array],
    config: Config,
) -> State:
    """Returns the state `after` an update, or the one that stays where it must not be made.

    Under "stop" that is the state `before`, and so it is for every update that follows, until
    someone reads `guard.cause`: the device works ahead of the one who reads. Under "skip" it is
    the state before but for `step` and `guard.skipped`, each one more; counts inside the optimizer,
    and with them the schedule, stay. Both states have `step` and `guard`; `loss` is (sum, weight)
    of the batch.

    A gradient whose sum of squares overflows float32 counts as not finite: no second moment could
    hold it.
    """
    guard, step = before.guard, before.step  # type: ignore[attr-defined]
    mean_loss = loss[0] / jnp.maximum(loss[1], 1e-30)
    # Norms, which the step takes anyway, so that no gradient is read once more.
    bad = first_nonfinite(
        {"gradients": jax.tree.map(optax.global_norm, gradients), "loss": loss[0]}
    )
    spike = jnp.asarray(False)
    if config.spike_factor is not None:
        spike = (step >= _MEMORY_STEPS) & (mean_loss > config.spike_factor * guard.mean_loss)
    cause = jnp.where(bad >= 0, bad, jnp.where(spike, SPIKE, NONE)).astype(jnp.int32)
    stops = config.on_nan == "stop"
    if stops:
        cause = jnp.where(guard.cause != NONE, guard.cause, cause)
    refused = cause != NONE
    weight = 1.0 / jnp.minimum(step + 1, _MEMORY_STEPS)
    kept = dataclasses.replace(
        after,  # type: ignore[type-var]
        guard=dataclasses.replace(
            guard, mean_loss=guard.mean_loss + weight * (mean_loss - guard.mean_loss)
        ),
    )
    kept = jax.tree.map(lambda old, new: jnp.where(refused, old, new), before, kept)
    if stops:
        return dataclasses.replace(kept, guard=dataclasses.replace(kept.guard, cause=cause))
    return dataclasses.replace(
        kept,
        step=step + 1,
        guard=dataclasses.replace(kept.guard, skipped=guard.skipped + refused),
    )


def explained(guard: Guard, params: Any, factor: float | None) -> str:
    """Says why the next update of these parameters was refused: "gradients/… is not finite"."""
    name = leaf_name(params, int(jax.jit(first_nonfinite)(params)))
    if name:
        return f"parameters/{name} is not finite before it"
    if int(guard.cause) == SPIKE:
        return (
            f"its loss is above {factor:g} times the mean before it, {float(guard.mean_loss):.3f}"
        )
    named = leaf_name({"gradients": params, "loss": 0}, int(guard.cause))
    return f"{named} is not finite"


def released(guard: Guard) -> Guard:
    """The guard without its cause: that of a state which goes on."""
    # As an array of the same devices, which may be those of several processes.
    return dataclasses.replace(guard, cause=jnp.full_like(guard.cause, NONE))
