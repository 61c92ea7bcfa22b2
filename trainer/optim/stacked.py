"""Tensors that are stacks of tensors, one a layer: which axes count layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from trainer.model.paths import named, path_name

# Source: T5X, `adafactor.standard_logical_factor_rules`, the names whose rule is BATCH.
STACK_AXES = ("layers", "stack")

# The path of a leaf, as jax.tree_util gives it, to the axes along which the leaf is a stack.
StackAxes = Callable[[tuple], tuple[int, ...]]


def stack_axes(logical_axes: Any) -> StackAxes:
    """Reads the axes of stacks off a tree of PartitionSpecs of logical names."""
    leaves = named(logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    axes = {
        path: tuple(axis for axis, name in enumerate(names) if name in STACK_AXES)
        for path, names in leaves.items()
    }
    return lambda path: axes[path_name(path)]


def no_stack(path: tuple) -> tuple[int, ...]:
    """The axes of stacks in a model that has none."""
    return ()


def over_tensor(
    reduction: Callable[..., jax.Array], x: jax.Array, stack: tuple[int, ...]
) -> jax.Array:
    """Reduces all axes but those of the stack; every axis stays, of size 1 where reduced."""
    own = tuple(axis for axis in range(x.ndim) if axis not in stack)
    return reduction(x, axis=own, keepdims=True)
