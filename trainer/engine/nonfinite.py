"""Which tensor of a tree went wrong first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trainer.model.paths import path_name


def first_nonfinite(tree: Any) -> jax.Array:
    """The index of the first leaf that holds a NaN or an infinity, int32; -1: all are finite.

    Leaves count in the tree's order, `jax.tree.leaves`. It can be traced: a step returns it as a
    metric, and `leaf_name` names the leaf once it is read.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.int32(-1)
    bad = jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in leaves])
    return jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32)


def leaf_name(tree: Any, index: int) -> str | None:
    """The path of the leaf of that index, "decoder/decoder_norm/scale"; None for -1.

    `tree` may hold arrays or anything else in their places; only its structure is read.
    """
    if index < 0:
        return None
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return path_name(paths[index][0])
