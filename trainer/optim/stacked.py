"""Tensors that stack several layers' tensors, and their stack axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from trainer.model.paths import named, path_name

# Logical axes that index layers.
# Source: T5X, `adafactor.standard_logical_factor_rules`, names with rule BATCH.
STACK_AXES = ("layers", "stack")

# Leaf path from jax.tree_util -> axes along which the leaf stacks layers.
StackAxes = Callable[[tuple], tuple[int, ...]]


def stack_axes(logical_axes: Any) -> StackAxes:
    """Returns the stack axes given by a tree of PartitionSpecs of logical axis names."""
    leaves = named(logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    axes = {
        path: tuple(axis for axis, name in enumerate(names) if name in STACK_AXES)
        for path, names in leaves.items()
    }
    return lambda path: axes[path_name(path)]


def no_stack(path: tuple) -> tuple[int, ...]:
    """Returns no axes: the StackAxes of a model without stacks."""
    return ()


def over_tensor(
    reduction: Callable[..., jax.Array], x: jax.Array, stack: tuple[int, ...]
) -> jax.Array:
    """Reduces all axes except the stack's; reduced axes keep size 1."""
    own = tuple(axis for axis in range(x.ndim) if axis not in stack)
    return reduction(x, axis=own, keepdims=True)
