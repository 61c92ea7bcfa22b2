"""Converts attention layouts to tables for kernels: tiles to visit, and parts of tiles to mask.

A tile has 128 to 512 queries and keys, so it may be smaller or larger than a layout's blocks. It
is visited if any head of a group visits any of its blocks. Bits mask the rest: bit s of a query's
integer for a key tile is set if the query sees part s of that tile.

Dimensions: see `fused_attention`; U queries in all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trainer.annexes.kernels.fused_tiles import COST_OF_BLOCK, Visits
from trainer.model.device import LANES, SUBLANES
from trainer.model.masks import Mask
from trainer.model.sparsity import Pattern, visited

# Most parts of a tile: one bit of an int32 per part.
_PARTS = 32


class Tables(NamedTuple):
    """Tables for kernels, int32; each group has its own tables, or all share one.

    `keys` lists the key blocks that each query block visits, flat, in `Visits.most_keys` entries;
    the first `key_counts` are valid. `queries` does the same for key blocks. `bits`: [N, heads *
    key blocks, U], rows padded to a multiple of SUBLANES; None if visited tiles are fully visible.
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
    predicate: Mask,
    fits: Callable[[int], bool] = lambda tile: True,
    tile: int | None = None,
) -> tuple[Visits, Tables]:
    """Returns the tables of a layout.

    `fits` returns True if memory suffices for tiles of a given length; `tile` None chooses the
    length with the least work.
    """
    layout_PNN = visited(pattern, num_heads, length, predicate.causal, predicate.prefix)
    differ = len(layout_PNN) > 1
    heads = max(1, LANES // head_dim) if differ else 1
    # Heads that only pad the last group visit nothing.
    layout_PNN = np.pad(layout_PNN, ((0, -len(layout_PNN) % heads), (0, 0), (0, 0)))

    def tiles_of(tile: int) -> np.ndarray:
        """Returns each group's visited tiles, bool [groups, blocks, blocks]."""
        parts_PUU = _parts(layout_PNN, pattern.block, tile, length, predicate.skips)
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
        parts_PUU = _parts(layout_PNN, pattern.block, tile, length, predicate.skips)
        bits = _bits(parts_PUU, tile // part, part)
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
    """Returns the layout in units of parts of tiles, padded to whole tiles."""
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
    """Returns the bits of each query for each key block, int32 [P, blocks, queries]."""
    split = parts_PUU.reshape(*parts_PUU.shape[:2], -1, per).astype(np.uint32)
    number = (split << np.arange(per, dtype=np.uint32)).sum(axis=3, dtype=np.uint32)
    return number.view(np.int32).swapaxes(1, 2).repeat(part, axis=2)
