"""Running the layers of a stack: one after the other or as a scan, with more or less kept.

A scan compiles one layer and runs it for all. Its parameters are those of the layers, joined along
a new axis called "layers": `encoder/layers_0/mlp/wo/kernel` [F, D], ..., of all layers are
`encoder/encoder/mlp/wo/kernel` [F, layers, D].

Source: T5X, `examples/scalable_t5`, for the names and the axis.
Differences: its layers have a `relpos_bias` each; here a stack has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from trainer.model.switch import ROUTING

Tree = dict[str, Any]
# A layer's module and [B, L, D] to [B, L, D].
RunLayer = Callable[[Any, jax.Array], jax.Array]

# Which axis of a joined parameter counts layers, and its logical name. Source: T5X,
# `scalable_t5`, `param_scan_axis`.
LAYERS_AXIS = 1
LAYERS_NAME = "layers"
_STACKS = ("encoder", "decoder")

# What `jax.checkpoint` may keep of a layer for the backward pass; absent: all of it. "dots" is
# T5X's "minimal": outputs of products with a kernel are kept, those between activations not.
_REMAT_POLICIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
)


def rematerialised(run: RunLayer, remat: str, scanned: bool) -> RunLayer:
    """`run`, keeping for its backward pass what `remat` (`ModelConfig.remat`) says."""
    if remat not in _REMAT_POLICIES:
        return run
    # Outside of a loop the compiler would find the repeated work and keep its first results.
    return nn.remat(run, policy=_REMAT_POLICIES[remat], prevent_cse=not scanned)


def scan(run: RunLayer, layer: nn.Module, x_BLD: jax.Array, length: int) -> jax.Array:
    """`run(layer, x)` `length` times over, with the parameters of one layer after the other.

    Each layer draws its own dropout; not what the layers of an unscanned stack draw.
    """
    run_all = nn.scan(
        lambda layer, x_BLD: (run(layer, x_BLD), None),
        variable_axes={"params": LAYERS_AXIS, ROUTING: 0},
        split_rngs={"params": True, "dropout": True},
        length=length,
    )
    return run_all(layer, x_BLD)[0]


def stack_layers(tree: Tree) -> Tree:
    """Parameters of an unscanned model as those of the scanned one; the values are the same.

    `tree` is a tree of `init_params`, or one whose leaves have the shapes of its leaves (gradients,
    Adam's moments). All else in it is what comes back unchanged.

    Raises:
        ValueError: if layers of a stack have parameters of different names or shapes.
    """
    return _joined(tree, lambda *leaves: jnp.stack(leaves, LAYERS_AXIS))


def stack_axes_names(tree: Tree) -> Tree:
    """The same of a tree of `PartitionSpec`s of logical names."""
    return _joined(
        tree,
        lambda first, *_: PartitionSpec(*first[:LAYERS_AXIS], LAYERS_NAME, *first[LAYERS_AXIS:]),
    )


def unstack_layers(tree: Tree) -> Tree:
    """The inverse of `stack_layers`, exactly."""
    tree = dict(tree)
    for stack in _STACKS:
        if stack not in tree.get(stack, {}):
            continue
        rest = dict(tree[stack])
        joined = rest.pop(stack)
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
            tree[stack] = {**rest, stack: jax.tree.map(join, *layers, is_leaf=_is_spec)}
    return tree


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)  # a tuple, to jax.tree, of names
