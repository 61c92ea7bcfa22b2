"""Attention to a window and to the blocks of the whole row.

Dimensions: B batch, L length, G blocks of a row, S = L + G keys, D model, H heads.

Source: LongT5 (arXiv:2112.07916), section 3.1.2; transformers, `modeling_longt5.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from trainer.model.attention import DotProductAttention
from trainer.model.dense import Built, einsum_float32
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.norms import Norm
from trainer.model.positions import Indices, Positions, T5RelativePosition


class Blocks(NamedTuple):
    """The full blocks of each packed example, numbered along the row.

    Attributes:
      number_BL: int, the block of each position; -1 if its example has none. Tokens after an
        example's last full block belong to it.
      seen_BLG: bool, True where a block belongs to the example of a position.
    """

    number_BL: Array
    seen_BLG: Array


def blocks_of(rows: Rows, size: int) -> Blocks:
    """Returns the blocks of `size` tokens, at most L // size, but at least one."""
    segment_BL, position_BL = rows.segment_BL, rows.position_BL
    length = segment_BL.shape[1]
    if position_BL is None:
        position_BL = jnp.arange(length)[None]
    ends_BL = (segment_BL > 0) & (position_BL % size == size - 1)
    number_BL = jnp.cumsum(ends_BL, axis=1) - ends_BL
    number_G = jnp.arange(_count(length, size))
    ends_BLG = ends_BL[..., None] & (number_BL[..., None] == number_G)
    segment_BG = jnp.sum(ends_BLG * segment_BL[..., None], axis=1)
    seen_BLG = (segment_BL[..., None] == segment_BG[:, None]) & (segment_BL > 0)[..., None]
    last_BL = jnp.max(jnp.where(seen_BLG, number_G, -1), axis=-1)
    return Blocks(jnp.minimum(number_BL, last_BL), seen_BLG)


def _count(length: int, size: int) -> int:
    return max(length // size, 1)


@dataclass(frozen=True, kw_only=True)
class TransientGlobalAttention(DotProductAttention):
    """Attention whose keys are the row's positions, and the normalised sums of its blocks.

    Blocks are projected by the kernels of positions.
    """

    block: int
    block_norm: Norm

    @property
    def products_per_pair(self) -> int:
        return round(super().products_per_pair * (1 + 1 / self.block))

    def run(
        self, module: Built, x_BLD: Array, source_BSD: Array, view: View, deterministic: bool
    ) -> Array:
        number_BL, seen_BLG = blocks_of(view.rows, self.block)
        belongs_BLG = jax.nn.one_hot(number_BL, seen_BLG.shape[-1], dtype=x_BLD.dtype)
        sums_BGD = einsum_float32("blg,bld->bgd", belongs_BLG, x_BLD)
        norm = self.block_norm.build(module.shared, "global_input_layer_norm")
        source_BSD = jnp.concatenate([source_BSD, norm(sums_BGD)], axis=1)
        positions = view.positions
        assert positions.bias_HLS is not None
        assert positions.block_bias_HGG is not None
        keys, blocks = view.mask_BLS.shape[-1], seen_BLG.shape[-1]
        bias_BHLG = positions.block_bias_HGG[:, jnp.maximum(number_BL, 0)].swapaxes(0, 1)
        positions = Positions(
            bias_HLS=jnp.pad(positions.bias_HLS, ((0, 0), (0, 0), (0, blocks))),
            bias_BHLS=jnp.pad(bias_BHLG, ((0, 0), (0, 0), (0, 0), (keys, 0))),
        )
        mask_BLS = jnp.broadcast_to(view.mask_BLS, (*seen_BLG.shape[:2], keys))
        mask_BLS = jnp.concatenate([mask_BLS, seen_BLG], axis=-1)
        view = view._replace(mask_BLS=mask_BLS, positions=positions, predicate=None)
        return super().run(module, x_BLD, source_BSD, view, deterministic)


@dataclass(frozen=True, kw_only=True)
class BlockPosition(T5RelativePosition):
    """T5's biases, and biases from a second table by the distance between blocks."""

    block: int

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        own = super().run(module, heads, length, keys, at_BL)
        fields = {name: getattr(self, name) for name in T5RelativePosition.__dataclass_fields__}
        between, count = T5RelativePosition(**fields), _count(keys, self.block)
        blocks: Positions = between.build(module.shared, heads, "blocks")(count, count, None)
        return own._replace(block_bias_HGG=blocks.bias_HLS)


def transient_global(config: Any, options: Any, stack: Any) -> Any:
    """Returns a bidirectional stack with this attention; other stacks as they are."""
    if stack.mask.causal:
        return stack
    block, norm = options.block, config.build("norm")
    return replace(
        stack,
        layers=tuple(
            replace(
                layer,
                mixer=TransientGlobalAttention(**vars(layer.mixer), block=block, block_norm=norm),
            )
            for layer in stack.layers
        ),
        position=BlockPosition(**vars(stack.position), block=block),
        mask=stack.mask._replace(window=1 + options.window // 2),
    )
