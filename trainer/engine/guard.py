"""Guard against bad updates: non-finite gradients or loss, and loss spikes."""

import dataclasses
import math
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.config import Config
from trainer.engine.each_array import of_each
from trainer.model.paths import path_name

# Values of `Guard.cause` that are not a gradient's index.
NONE, SPIKE = -1, -2

# Approximate number of updates in the running mean of the loss. Before this many updates, no loss
# counts as a spike.
_MEMORY = 100
# Elements that NumPy looks at together.
_CHUNK = 1 << 16

State = TypeVar("State")


@flax.struct.dataclass
class Guard:
    """The guard's part of the training state.

    Attributes:
      cause: int32 scalar, why updates are rejected: SPIKE, or the index of the first non-finite
        gradient (one past the last if only the loss is not finite); NONE while updates are applied.
      skipped: int32 scalar, number of updates skipped since step 0.
      mean_loss: float32 scalar, mean loss of the applied updates in nats per token: a plain mean
        for the first `_MEMORY`, then an exponential moving average.
      updates: int32 scalar, number of updates in that mean; not the step, since a run started from
        another run's checkpoint has a new guard, and skipped updates count as steps.
    """

    cause: jax.Array
    skipped: jax.Array
    mean_loss: jax.Array
    updates: jax.Array


def new_guard() -> Guard:
    """Returns the guard of a run before its first update."""
    return Guard(jnp.int32(NONE), jnp.int32(0), jnp.float32(0), jnp.int32(0))


def checked(
    before: State, after: State, gradients: Any, loss: tuple[jax.Array, jax.Array], config: Config
) -> State:
    """Returns the state `after` an update if the update is good, otherwise the state to keep.

    With `on_nan` "stop", the kept state is `before`, for all later updates too until the host,
    which lags behind the device, reads `guard.cause`. With "skip" it is `before` with `step` and
    `guard.skipped` increased by one; the optimizer's own counts, and so the learning rate schedule,
    do not advance.

    A gradient whose sum of squares overflows float32 counts as non-finite: its second moment would
    overflow too. `loss` is the (sum, weight) of the batch's loss.
    """
    guard, step = before.guard, before.step  # type: ignore[attr-defined]
    mean_loss = loss[0] / jnp.maximum(loss[1], 1e-30)
    # The step computes gradient norms anyway: no gradient is read a second time.
    bad = first_nonfinite({"gradients": jax.tree.map(optax.tree.norm, gradients), "loss": loss[0]})
    spike = jnp.asarray(False)
    if config.spike_factor is not None:
        spike = (guard.updates >= _MEMORY) & (mean_loss > config.spike_factor * guard.mean_loss)
    cause = jnp.where(bad >= 0, bad, jnp.where(spike, SPIKE, NONE)).astype(jnp.int32)
    stops = config.on_nan == "stop"
    if stops:
        cause = jnp.where(guard.cause != NONE, guard.cause, cause)
    rejected = cause != NONE
    weight = 1.0 / jnp.minimum(guard.updates + 1, _MEMORY)
    mean_loss = guard.mean_loss + weight * (mean_loss - guard.mean_loss)
    seen = dataclasses.replace(guard, mean_loss=mean_loss, updates=guard.updates + 1)
    kept = dataclasses.replace(after, guard=seen)  # type: ignore[type-var]
    kept = jax.tree.map(lambda old, new: jnp.where(rejected, old, new), before, kept)
    if stops:
        return dataclasses.replace(kept, guard=dataclasses.replace(kept.guard, cause=cause))
    skips = dataclasses.replace(kept.guard, skipped=guard.skipped + rejected)
    return dataclasses.replace(kept, step=step + 1, guard=skips)


def explain(guard: Guard, params: Any, factor: float | None, learned: Any = None) -> str:
    """Returns why the next update of `params` was rejected, such as "gradients/… is not finite"."""
    name = _nonfinite_leaf(params)
    if name:
        return f"parameters/{name} was not finite before it"
    if int(guard.cause) == SPIKE:
        return f"its loss is above {factor:g} times the recent mean, {float(guard.mean_loss):.3f}"
    tree = {"gradients": params if learned is None else learned, "loss": 0}
    return f"{leaf_name(tree, int(guard.cause))} is not finite"


def advice(guard: Guard, config: Config) -> str:
    """Returns what to try after an update was rejected, given what was seen."""
    skip = "skip such updates with --on_nan=skip"
    if int(guard.cause) == SPIKE:
        return f"Lower --optimizer.learning_rate, raise --spike_factor, or {skip}"
    half = config.model.dtype != "float32"
    if int(guard.updates):
        further = " train with --model.dtype=float32," if half else ""
        return f"Lower --optimizer.learning_rate,{further} or {skip}"
    of = f"the parameters of --init_from={config.init_from}" if config.init_from else "the model"
    causes = f"{of} or its batch overflow{'' if half else ' even in float32'}"
    further = "train with --model.dtype=float32, " if half else ""
    return (
        f"It is the first update, so no learning rate has had an effect: {causes}; {further}choose "
        "others, or see with --on_nan=skip if later batches are sound"
    )


def nonfinite(state: Any) -> str | None:
    """Returns the name of a TrainState's first array that is not finite, or None.

    A look at all parameters in every update would take 4 % of a step (T5 1.1 small on v5e:2x2, by
    its compiler), so states are looked at when they are saved and read.
    """
    return _nonfinite_leaf({"opt_state": state.opt_state, "params": state.params})


def _nonfinite_leaf(tree: Any) -> str | None:
    # Not one program for all leaves, which would take XLA seconds to compile.
    finite = of_each(jax.tree.leaves(tree), _finite_on_host, _finite_on_devices, math.inf)
    return leaf_name(tree, finite.index(False) if False in finite else NONE)


def _finite_on_host(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    # In chunks that stay in a processor's caches.
    return all(np.isfinite(flat[i : i + _CHUNK]).all() for i in range(0, flat.size, _CHUNK))


@jax.jit
def _finite_on_devices(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array))


def cleared(guard: Guard) -> Guard:
    """Returns the guard without its cause, so that training can continue."""
    # `full_like` keeps the sharding, which may span several processes.
    return dataclasses.replace(guard, cause=jnp.full_like(guard.cause, NONE))


def first_nonfinite(tree: Any) -> jax.Array:
    """Returns the int32 index of the first leaf with NaN or infinity, or -1; traceable."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.int32(-1)
    bad = jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in leaves])
    return jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32)


def leaf_name(tree: Any, index: int) -> str | None:
    """Returns the path of leaf `index`, such as "decoder/decoder_norm/scale"; None for -1."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return path_name(paths[index][0]) if index >= 0 else None
