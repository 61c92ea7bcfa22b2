"""The static part of a fused attention call: tiles, blocks and memory.

Dimensions: see `fused_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from trainer.annexes.kernels.hardware import group_width
from trainer.model.attention_cores import VISITED
from trainer.model.masks import Mask
from trainer.model.positions import T5RelativePosition

# A masked logit.
MASKED = -1e30
# Relative cost of a tile element by block length: smaller blocks leave the matrix unit waiting.
# Blocks must be powers of two for the gradients of the bias to be folded.
COST_OF_BLOCK = {512: 1.0, 256: 1.1, 128: 1.4}
# Most tile elements per head that a kernel unrolls instead of looping over. Unrolling twice as
# many gains 4% and doubles compile time.
_UNROLLED_FORWARD, _UNROLLED_BACKWARD = 4 * 512 * 512, 2 * 512 * 512
# Bytes of a grid step's blocks, which the pipeline holds twice. A step has 0.35 us of overhead.
_BLOCK_BYTES = 3 << 20


@dataclass(frozen=True)
class Visits:
    """The tiles that a layout visits: the static part of `fused_sparsity.Tables`.

    `tile` is the number of queries and keys in a tile, `part` the tokens per masking bit;
    `most_keys` is the most key blocks per query block, `most_queries` the reverse. With `by_group`
    each group of heads has its own tables; `tiles` is the mean number of tiles per group.
    """

    tile: int
    part: int
    most_keys: int
    most_queries: int
    by_group: bool
    tiles: float


@dataclass(frozen=True)
class Plan:
    """The static part of a call. L is `length`, S `source_length` and K `head_dim`.

    `head_dim` divides 128 or is a multiple of it. `bias` says how distances share the bias table.
    `scale` multiplies query-key products; `softcap` limits the logits. Kernels may use `vmem_bytes`
    of core memory, in which they hold each block of a row `buffers` times. `interpret` runs without
    a TPU. `visits` None means all tiles that the predicate does not rule out.
    """

    length: int
    source_length: int
    head_dim: int
    predicate: Mask
    bias: T5RelativePosition | None
    scale: float
    block_q: int
    block_k: int
    vmem_bytes: int
    interpret: bool
    visits: Visits | None = None
    softcap: float | None = None
    buffers: int = 2

    @property
    def heads(self) -> int:
        """Heads per group."""
        return self.lanes // self.head_dim

    @property
    def lanes(self) -> int:
        """Channels per group."""
        return group_width(self.head_dim)

    @property
    def query_blocks(self) -> int:
        return pl.cdiv(self.length, self.block_q)

    @property
    def key_blocks(self) -> int:
        return pl.cdiv(self.source_length, self.block_k)

    @property
    def metadata(self) -> dict[str, str] | None:
        """Kernel metadata for facts that the program text does not show: `VISITED`."""
        if self.visits is None and self.predicate.window is None:
            return None
        tiles = len(self.pairs) if self.visits is None else self.visits.tiles
        return {VISITED: f"{tiles / (self.query_blocks * (self.query_blocks + 1) / 2):.6f}"}

    @property
    def skips(self) -> bool:
        """True if kernels skip tiles in which every key comes after every query."""
        return self.predicate.skips

    @property
    def causal_bias(self) -> bool:
        """True if the bias tiles mask keys after their query, which a cap would undo."""
        return self.skips and self.bias is not None and self.softcap is None

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The (query block, key block) of each tile, ordered by key block."""
        return [(i, j) for j in range(self.key_blocks) for i in range(*self.queries_of(j))]

    def keys_of(self, i: Any) -> tuple[Any, Any]:
        """Returns the first key block that query block i sees, and the one after the last."""
        return seen_blocks(i, self.block_q, self.block_k, self.key_blocks, self.predicate.bounds)

    def queries_of(self, j: Any) -> tuple[Any, Any]:
        """Returns the first query block that sees key block j, and the one after the last."""
        bounds = self.predicate.bounds[::-1]
        return seen_blocks(j, self.block_k, self.block_q, self.query_blocks, bounds)

    @property
    def area(self) -> int:
        """Tile elements per row and group."""
        return len(self.pairs) * self.block_q * self.block_k * self.heads

    @property
    def loops(self) -> bool:
        """True if kernels loop over tiles because a row has too many to unroll."""
        return self.visits is not None or self.area > _UNROLLED_FORWARD

    def rows(self, batch: int, arrays: int, itemsize: int) -> int:
        """Returns the number of rows per grid step that has `arrays` blocks of queries or keys."""
        longest = max(self.query_blocks * self.block_q, self.key_blocks * self.block_k)
        fitting = _BLOCK_BYTES // (arrays * longest * self.lanes * itemsize)
        return 1 if self.loops else _divisor(batch, fitting)

    def unrolled(self, rows: int, backward: bool = False) -> int:
        """Returns how many rows of a grid step a kernel unrolls."""
        area = _UNROLLED_BACKWARD if backward else _UNROLLED_FORWARD
        return _divisor(rows, area // self.area)

    # Bias tiles by block distance.

    @property
    def farthest(self) -> int:
        """Block distance from which on all bias tiles are equal."""
        assert self.bias is not None
        alike = pl.cdiv(self.bias.max_distance + self.block_q - 1, self.block_q)
        return min(alike, max(self.query_blocks, self.key_blocks) - 1)

    @property
    def tiles(self) -> int:
        """Bias tiles per head, T."""
        return self.farthest + 1 if self.skips else 2 * self.farthest + 1

    def tile(self, head: int, i: Any, j: Any) -> Any:
        """Returns the bias tile's index for a group's `head`, query block i and key block j."""
        nearest = 0 if self.skips else -self.farthest
        distance: Any
        if isinstance(i, int) and isinstance(j, int):
            distance = min(max(i - j, nearest), self.farthest)
        else:
            distance = jnp.clip(i - j, nearest, self.farthest)
        return head * self.tiles + distance - nearest

    def vectors(self, table_HR: Array) -> Array:
        """Returns the vectors of the bias tiles, [N, G * T, W] float32.

        Tile t holds `vector[(q - k) mod W]` at (k, q). A matrix product computes them, so the
        gradient is one, too.
        """
        assert self.bias is not None
        period = 2 * self.block_q
        nearest = 0 if self.skips else -self.farthest
        inside = np.arange(period)
        inside = np.where(inside < self.block_q, inside, inside - period)
        distance_TW = -(np.arange(nearest, self.farthest + 1)[:, None] * self.block_q + inside)
        bucket_TW = self.bias.bucket(distance_TW)
        choice_TWR = jax.nn.one_hot(bucket_TW, table_HR.shape[1], dtype=jnp.float32)
        vector_HTW = jnp.einsum(
            "hr,twr->htw", table_HR * self.scale, choice_TWR, precision=lax.Precision.HIGHEST
        )
        if self.causal_bias:
            vector_HTW = jnp.where(distance_TW > 0, MASKED, vector_HTW)
        return vector_HTW.reshape(-1, self.heads * self.tiles, period)


def seen_blocks(
    index: Any, block: int, other: int, blocks: int, bounds: tuple[int | None, int | None]
) -> tuple[Any, Any]:
    """Returns the first of the other side's blocks that block `index` sees, and the end.

    Blocks have `block` positions on this side and `other` on the other, which has `blocks` of them.
    `bounds` is `Mask.bounds`; unless both are None, `other` must divide `block`.
    """
    back, ahead = bounds
    low, high = (min, max) if isinstance(index, int) else (jnp.minimum, jnp.maximum)
    at = index * (block // other)
    first = 0 if back is None else high(at + -back // other, 0)
    return first, blocks if ahead is None else low(at + (block - 1 + ahead) // other + 1, blocks)


def _divisor(number: int, most: int) -> int:
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def blocks_of(
    length: int,
    source_length: int,
    predicate: Mask,
    head_dim: int | None,
    vmem_bytes: int,
    block: int | None,
) -> tuple[int, int]:
    """Returns the lengths of query and key blocks; `head_dim` is None without a bias.

    The lengths are equal with a bias, causal mask or window, whose tiles follow the diagonal.
    """
    if block:
        return block, block
    if head_dim is None and not predicate.causal and predicate.window is None:
        both = length, source_length
        queries, keys = (_block(each, predicate, lambda _: True) for each in both)
        return queries, keys
    longest, skips = max(length, source_length), predicate.skips
    same = _block(longest, predicate, partial(bias_fits, longest, skips, head_dim, vmem_bytes))
    return same, same


def bias_fits(length: int, skips: bool, head_dim: int | None, vmem_bytes: int, block: int) -> bool:
    """Returns True if the bias tiles and their gradients fit; `head_dim` is None without a bias."""
    if head_dim is None:
        return True
    distances = min(pl.cdiv(length, block) - 1, 2)
    tiles = group_width(head_dim) // head_dim * (distances + 1 if skips else 2 * distances + 1)
    return 2 * tiles * 4 * block**2 <= 0.4 * vmem_bytes


def _block(length: int, predicate: Mask, fits: Callable[[int], bool]) -> int:
    def cost(block: int) -> float:
        blocks = pl.cdiv(length, block)
        seen = (seen_blocks(i, block, block, blocks, predicate.bounds) for i in range(blocks))
        return sum(end - first for first, end in seen) * block**2 * COST_OF_BLOCK[block]

    return min(filter(fits, COST_OF_BLOCK), key=cost, default=min(COST_OF_BLOCK))
