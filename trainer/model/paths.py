"""Parameter paths as text, and trees as flat dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import traverse_util


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's path in T5X's form, "decoder/layers_0/mlp/wo/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns a tree's leaves by path, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def tree_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree of path -> array; the inverse of `named`."""
    return traverse_util.unflatten_dict(arrays, sep="/")
