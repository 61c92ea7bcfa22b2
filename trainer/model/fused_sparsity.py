"""Layouts of attention as tables that kernels read: which tiles to visit, and what of them to mask.

A tile has 128 to 512 queries and keys, so tiles may be smaller or larger than the blocks of a
layout. A tile is visited if any of its blocks is, for any head of a group. What no block of it
visits is masked by bits: bit s of a query's number for a tile of keys tells whether it sees part s
of that tile.

Dimensions: see `fused_attention`; U queries of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trainer.model.device import LANES
from trainer.model.fused_tiles import COST_OF_BLOCK, SUBLANES, Visits
from trainer.model.masks import Predicate
from trainer.model.sparsity import Pattern, visited

# Parts of a tile that an int32 has bits for.
_PARTS = 32


class Tables(NamedTuple):
    """Tables that kernels read, int32; groups have tables of their own or share one.

    Attributes:
      keys: blocks of keys that each block of queries visits, `Visits.most_keys` for each, flat.
      key_counts: how many of them count.
      queries: blocks of queries that visit each block of keys, `Visits.most_queries` each, flat.
      query_counts: how many of them count.
      bits: [N, heads * key blocks, U], with rows up to a multiple of SUBLANES; None if visited
        tiles are seen whole.
    """

    keys: Any
    key_counts: Any
    queries: Any
    query_counts: Any
    bits: Any


def tables_of(
    pattern: Pattern,
    num_heads: int,
    head_dim: int,
    length: int,
    predicate: Predicate,
    fits: Callable[[int], bool] = lambda tile: True,
    tile: int | None = None,
) -> tuple[Visits, Tables]:
    """Returns the tables of a layout.

    Args:
      pattern: the layout.
      num_heads: heads of the model.
      head_dim: width of a head.
      length: tokens of a row.
      predicate: the mask.
      fits: whether memory holds what tiles of this length need.
      tile: length of tiles; None: the one with the least work.
    """
    skips = predicate.causal and not predicate.prefix
    layout_PNN = visited(pattern, num_heads, length, predicate.causal, predicate.prefix)
    differ = len(layout_PNN) > 1
    heads = max(1, LANES // head_dim) if differ else 1
    # Heads that fill up the last group visit nothing.
    layout_PNN = np.pad(layout_PNN, ((0, -len(layout_PNN) % heads), (0, 0), (0, 0)))

    def tiles_of(tile: int) -> np.ndarray:
        """Returns the visited tiles of each group, bool [groups, blocks, blocks]."""
        parts_PUU = _parts(layout_PNN, pattern.block, tile, length, skips)
        per = tile // min(pattern.block, tile)
        blocks = parts_PUU.shape[1] // per
        split = parts_PUU.reshape(-1, heads, blocks, per, blocks, per)
        return np.asarray(split.any(axis=(1, 3, 5)))

    def cost(tile: int) -> float:
        return tiles_of(tile).sum() * tile**2 * COST_OF_BLOCK[tile]

    def divides(tile: int) -> bool:
        whole = tile % pattern.block == 0 or pattern.block % tile == 0
        return whole and tile <= _PARTS * pattern.block

    if tile is None:
        known = [tile for tile in COST_OF_BLOCK if divides(tile)]
        tile = min(filter(fits, known), key=cost, default=min(known))
    tiles = tiles_of(tile)
    part = min(pattern.block, tile)
    keys, key_counts = _table(tiles)
    queries, query_counts = _table(tiles.swapaxes(1, 2))
    visits = Visits(
        tile, part, keys.shape[2], queries.shape[2], differ, float(tiles.sum()) / len(tiles)
    )
    bits = None
    if part < tile or heads > 1:
        bits = _bits(_parts(layout_PNN, pattern.block, tile, length, skips), tile // part, part)
        bits = bits.reshape(-1, heads * tiles.shape[1], bits.shape[2])
        bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % SUBLANES), (0, 0)))
    return visits, Tables(
        keys.reshape(-1),
        key_counts.reshape(-1),
        queries.reshape(-1),
        query_counts.reshape(-1),
        bits,
    )


def _parts(layout_PNN: np.ndarray, block: int, tile: int, length: int, skips: bool) -> np.ndarray:
    """Returns the layout of parts of tiles, of whole tiles in each row."""
    per = max(block // tile, 1)
    parts_PUU = layout_PNN.repeat(per, axis=1).repeat(per, axis=2)
    size = min(block, tile)
    whole = -(-length // tile) * tile // size
    parts_PUU = parts_PUU[:, :whole, :whole]
    missing = whole - parts_PUU.shape[1]
    parts_PUU = np.pad(parts_PUU, ((0, 0), (0, missing), (0, missing)))
    return np.tril(parts_PUU) if skips else parts_PUU


def _table(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = tiles.sum(axis=2)
    table = np.argsort(~tiles, axis=2, kind="stable")[:, :, : counts.max()]
    return table.astype(np.int32), counts.astype(np.int32)


def _bits(parts_PUU: np.ndarray, per: int, part: int) -> np.ndarray:
    """Returns the bits of each query for each block of keys, int32 [P, blocks, queries]."""
    split = parts_PUU.reshape(*parts_PUU.shape[:2], -1, per).astype(np.uint32)
    number = (split << np.arange(per, dtype=np.uint32)).sum(axis=3, dtype=np.uint32)
    return number.view(np.int32).swapaxes(1, 2).repeat(part, axis=2)
