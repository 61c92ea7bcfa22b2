"""Ways to run the layers of a stack: one by one or as a scan, rematerialised or not.

A scan compiles one layer and runs it for all. It stacks the layers' parameters along a new axis
"layers": `encoder/layers_0/mlp/wo/kernel` [F, D] and its like become
`encoder/encoder/mlp/wo/kernel` [F, layers, D].

Source: T5X, `examples/scalable_t5`, for the names and the axis.
Differences: in T5X each layer has a `relpos_bias`; here a stack has one, unless the model's
position is "relative_per_layer".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import lift
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from trainer.model import scanned
from trainer.model.attention_cores import SAVED
from trainer.model.dense import tracing_device
from trainer.model.device import SUBLANES
from trainer.model.feedforward import SOWN

Tree = dict[str, Any]
# Maps a layer's module and input states to its output states and whatever else it leaves.
_RunLayer = Callable[..., tuple[Any, Any]]

# Index and logical name of a stacked parameter's layer axis. Source: T5X, `scalable_t5`,
# `param_scan_axis`.
LAYERS_AXIS = 1
_LAYERS_NAME = "layers"
_STACKS = ("encoder", "decoder")

# Activations that `jax.checkpoint` may keep for the backward pass. "dots" is T5X's "minimal":
# outputs of products with a kernel, not of products between activations, plus the outputs of
# fused attention, which are as large as its queries.
_REMAT_POLICIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "dots": jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(SAVED),
        ),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
)


def rematerialised(run: _RunLayer, remat: str, scanned: bool) -> _RunLayer:
    """Returns `run`, which keeps for its backward pass only what `ModelConfig.remat` allows."""
    if remat not in _REMAT_POLICIES:
        return run
    # Outside a loop, the compiler would merge the repeated work with the original.
    return nn.remat(run, policy=_REMAT_POLICIES[remat], prevent_cse=not scanned)


def scan(run: _RunLayer, layer: nn.Module, states: Any, length: int, period: int = 1) -> Any:
    """Applies `run(layer, states, place)` to the states `length` times.

    Each time has its own parameters and dropout, and the next place of a `period`, which a turn of
    the scan goes through once.
    """
    return nn.transforms.lift_transform(_lifted_scan, run, length, period)(layer, states)


def _lifted_scan(run: _RunLayer, length: int, period: int) -> Callable[..., Any]:
    """Returns a function of a scope, as `flax.core.lift.scan` does, that runs `scanned.scan`."""

    def scan_all(scope_of: Any, repacked: Any, variables: Any, keys: Any, states: Any) -> Any:
        def one(states: Any, own: Any, place: int = 0) -> tuple[Any, Any]:
            scope = scope_of(*own)
            return run(scope, states, place)[0], repacked(scope)

        def several(states: Any, own: Any, count: int = period) -> tuple[Any, Any]:
            left = []
            for place in range(count):
                own_of_one = jax.tree.map(lambda x, at=place: x[at], own)
                states, each = one(states, own_of_one, place)
                left.append(each)
            return states, jax.tree.map(lambda *each: jnp.stack(each), *left)

        front = jax.tree.map(_layers_first, variables)
        keys = lift.tree_map_rngs(lambda key: jax.random.split(key, length), keys)
        own = front, keys
        # Flax counts in a layer's keys how often it was traced. `nn.scan`, which trained older
        # checkpoints, traces it twice.
        jax.eval_shape(lambda *inputs: one(*inputs), states, jax.tree.map(lambda x: x[0], own))
        if period == 1:
            return scanned.scan(one, states, own, length)
        turns, rest = divmod(length, period)
        whole = jax.tree.map(lambda x: x[: length - rest].reshape(turns, period, *x.shape[1:]), own)
        states, left = scanned.scan(several, states, whole, turns)
        left = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), left)
        if rest:
            last = jax.tree.map(lambda x: x[length - rest :], own)
            states, more = several(states, last, rest)
            left = jax.tree.map(lambda *both: jnp.concatenate(both), left, more)
        return states, left

    return lift.pack(scan_all, ("params",), (SOWN,), ("dropout",), name="scan")


def _layers_first(stacked: Array) -> Array:
    """Moves the layers' axis to the front."""
    pieces = stacked.ndim > 2 and stacked.shape[LAYERS_AXIS] % SUBLANES == 0
    if pieces and tracing_device().is_tpu:
        return _in_pieces(stacked)
    return jnp.moveaxis(stacked, LAYERS_AXIS, 0)


@jax.custom_vjp
def _in_pieces(stacked: Array) -> Array:
    """Moves the layers' axis to the front, and each layer's parameters into a piece of memory.

    Where the layers fill a TPU's tiles, its compiler otherwise leaves them side by side there, and
    a scan reads and writes a layer in pieces of a few hundred bytes. Gradients return in the order
    of the parameters.
    """
    return _in_order(jnp.moveaxis(stacked, LAYERS_AXIS, 0))


def _in_order(x: Array) -> Array:
    """Keeps the compiler from permuting the axes of `x` in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


_in_pieces.defvjp(
    lambda stacked: (_in_pieces(stacked), None),
    lambda _, gradient: (_in_order(jnp.moveaxis(gradient, 0, LAYERS_AXIS)),),
)


def stack_layers(tree: Tree) -> Tree:
    """Converts an unscanned model's parameters to a scanned model's, with the same values.

    `tree` has the leaves of `init_params` or leaves of their shapes (gradients, Adam's moments).
    Parameters outside layers are unchanged. Raises ValueError if a stack's layers differ.
    """
    return _joined(tree, lambda *leaves: jnp.stack(leaves, LAYERS_AXIS))


def stack_facts(tree: Tree) -> Tree:
    """Stacks a tree of `ParameterFacts` in the same way."""
    return _joined(tree, lambda *facts: facts[0].stacked(LAYERS_AXIS, _LAYERS_NAME, len(facts)))


def unstack_layers(tree: Tree) -> Tree:
    """Inverts `stack_layers` exactly."""
    tree = dict(tree)
    for stack in _STACKS:
        if stack not in tree.get(stack, {}):
            continue
        rest = dict(tree[stack])
        joined = rest.pop(stack)
        if not jax.tree.leaves(joined):  # none of its parameters learns
            continue
        (length,) = {leaf.shape[LAYERS_AXIS] for leaf in jax.tree.leaves(joined)}
        layers = {
            f"layers_{index}": jax.tree.map(
                lambda leaf, index=index: jnp.take(leaf, index, LAYERS_AXIS), joined
            )
            for index in range(length)
        }
        tree[stack] = {**rest, **layers}
    return tree


def _joined(tree: Tree, join: Callable[..., Any]) -> Tree:
    tree = dict(tree)
    for stack in _STACKS:
        inside = tree.get(stack, {})
        names = [f"layers_{index}" for index in range(len(inside))]
        layers = [inside[name] for name in names if name in inside]
        if layers:
            rest = {name: node for name, node in inside.items() if name not in names}
            tree[stack] = {**rest, stack: jax.tree.map(join, *layers)}
    return tree
