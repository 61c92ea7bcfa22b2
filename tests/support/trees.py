"""Comparisons of trees of arrays, which name the first leaf that differs."""

from typing import Any

import jax
import numpy as np

from trainer.model.paths import named


def assert_equal(found: Any, expected: Any) -> None:
    """Compares structure and every element."""
    assert_close(found, expected)


def assert_close(found: Any, expected: Any, rtol=0.0, atol=0.0, scale=0.0) -> None:
    """Compares leaf by leaf; `scale` is a tolerance in each expected leaf's largest element."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, mine), theirs in zip(named(found).items(), jax.tree.leaves(expected), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert mine.shape == theirs.shape, path
        if not (rtol or atol or scale):
            np.testing.assert_array_equal(mine, theirs, err_msg=path)
            continue
        most = np.abs(theirs).max(initial=0) if scale else 0.0
        np.testing.assert_allclose(mine, theirs, rtol, atol + scale * most, err_msg=path)


def same(one: Any, other: Any) -> bool:
    """Returns whether names and all leaves are equal, bit for bit."""
    if named(one).keys() != named(other).keys():
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
