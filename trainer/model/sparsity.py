"""Sparsity of attention: which key blocks each query block sees. No JAX.

A pattern's `layout` is bool [P, N, N]; masks within blocks (causal, packed examples, prefixes,
padding) apply on top of it.

Dimensions: P heads with their own layouts (1 if all share one), N blocks in a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np


class Pattern(Protocol):
    """Options of a pattern."""

    @property
    def block(self) -> int: ...

    def __hash__(self) -> int: ...

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        """Returns the visited blocks, bool [P, N, N]; each query block sees itself.

        With `causal`, random blocks are drawn from earlier blocks. Later blocks stay, since a
        prefix may see them; `visited` removes them where none does.
        """
        ...


@lru_cache(maxsize=256)
def visited(
    pattern: Pattern, num_heads: int, length: int, causal: bool, prefix: bool = False
) -> np.ndarray:
    """Returns the blocks to compute, read-only bool [P, N, N].

    The last block of a row of `length` tokens may be partly empty. With `causal` a query sees no
    key after it, except with `prefix`, where queries in the prefix see all of its keys.
    """
    layout_PNN = pattern.layout(num_heads, -(-length // pattern.block), causal)
    if causal and not prefix:
        layout_PNN = np.tril(layout_PNN)
    if (layout_PNN == layout_PNN[:1]).all():
        layout_PNN = layout_PNN[:1]
    layout_PNN.flags.writeable = False
    return layout_PNN


def visited_pairs(pattern: Pattern, num_heads: int, length: int, causal: bool) -> float:
    """Returns the number of query-key pairs in a row's visited blocks, averaged over heads."""
    layout_PNN = visited(pattern, num_heads, length, causal)
    blocks = layout_PNN.shape[1]
    size_N = np.minimum(length - pattern.block * np.arange(blocks), pattern.block)
    return float(np.einsum("pqk,q,k->", layout_PNN, size_N, size_N)) / len(layout_PNN)
