"""Attention with learned or projected logits instead of query-key products.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.attention import DotProductAttention, attention
from trainer.model.dense import Buildable, Built, einsum_float32
from trainer.model.masks import Rows
from trainer.model.mixers import View, mix_heads, split_heads
from trainer.model.parameters import KERNEL, SOURCE_KERNEL, TABLE, parameter


def _check_length(length: int, max_positions: int) -> None:
    if length > max_positions:
        raise ValueError(
            f"rows have {length} tokens, but the Synthesizer has {max_positions} positions: raise "
            "max_positions"
        )


@dataclass(frozen=True)
class LearnedLogits(Buildable):
    """A learned logit for each head and pair of positions, the same for all inputs.

    With `reset` positions count within packed examples; otherwise along the row, as upstream.

    Source: Tay et al. 2020 (arXiv:2005.00743), section 3.1, "random".
    """

    max_positions: int
    reset: bool = True

    def run(
        self, module: Built, num_heads: int, rows: Rows, source_rows: Rows, cached: bool = False
    ) -> Array:
        """Returns float32 logits, broadcastable to [B, H, L, S].

        With `cached`, each row holds one example, in the slots of a `Cache`.
        """
        places = self.max_positions
        length, sources = (side.segment_BL.shape[1] for side in (rows, source_rows))
        _check_length(max(length, sources), places)
        start, axes = module.shared.parametrisation.relative_bias(), ("query", "heads", "key")
        shape = (places, num_heads, places)
        table_PHP = parameter(module, TABLE, "table", start, axes, shape)
        query_BL, key_BS = rows.position_BL, source_rows.position_BL
        if not (self.reset or cached) or query_BL is None or key_BS is None:
            return table_PHP[:length, :, :sources].swapaxes(0, 1)[None]
        table_PPH = table_PHP.swapaxes(1, 2)
        return table_PPH[query_BL[:, :, None], key_BS[:, None, :]].transpose(0, 3, 1, 2)


@dataclass(frozen=True)
class DenseSynthesizer(Buildable):
    """Attention in which each position computes its logits from its own state alone.

    The state is projected to heads, activated by ReLU, and projected to `max_positions` logits. Key
    positions are counted as in `LearnedLogits`.

    Source: Tay et al. 2020 (arXiv:2005.00743), section 3.1, "dense".
    """

    num_heads: int
    head_dim: int
    max_positions: int
    reset: bool = True

    @property
    def products_per_pair(self) -> int:
        return self.num_heads * self.head_dim

    def run(
        self, module: Built, x_BLD: Array, source_BSD: Array, view: View, deterministic: bool
    ) -> Array:
        shared, parametrisation = module.shared, module.shared.parametrisation
        heads, head_dim, places = self.num_heads, self.head_dim, self.max_positions
        _check_length(source_BSD.shape[1], places)
        project = partial(shared.dense, heads * head_dim, ("embed", "joined_kv"))
        hidden = project(parametrisation.feed_forward(), "hidden", bias=True)
        # XLA's CPU runtime supports this bfloat16 product only with heads as the first axis.
        hidden_HBLK = jnp.moveaxis(split_heads(nn.relu(hidden(x_BLD)), head_dim), 2, 0)
        start = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        axes = ("heads", "kv", "unmodeled")
        kernel_HKP = parameter(module, KERNEL, "kernel", start, axes, (heads, head_dim, places))
        kernel_HKP = kernel_HKP.astype(shared.dtype)
        zeros = nn.initializers.zeros
        bias_HP = parameter(module, TABLE, "bias", zeros, ("heads", "unmodeled"), (heads, places))
        logits_BHLP = einsum_float32("hblk,hkp->hblp", hidden_HBLK, kernel_HKP).swapaxes(0, 1)
        logits_BHLP += bias_HP[:, None]
        key_BS = view.source_rows.position_BL
        if (self.reset or view.cache is not None) and key_BS is not None:
            logits_BHLS = jnp.take_along_axis(logits_BHLP, key_BS[:, None, None], axis=3)
        else:
            logits_BHLS = logits_BHLP[..., : source_BSD.shape[1]]

        value = project(parametrisation.attention(), "value", use=SOURCE_KERNEL)
        v_BSHK = split_heads(value(source_BSD), head_dim)
        if view.cache is not None:
            v_BSHK = view.cache.kept(module, "value", v_BSHK)
        return mix_heads(shared, logits_BHLS, v_BSHK, view, deterministic)


def dense(config: Any, options: Any) -> DenseSynthesizer:
    return DenseSynthesizer(
        config.num_heads, config.head_dim, config.max_positions, not config.upstream_compat
    )


def random(config: Any, options: Any) -> DotProductAttention:
    """Returns the random Synthesizer, "random plus": learned logits added to the products."""
    learned = LearnedLogits(config.max_positions, not config.upstream_compat)
    return attention(config, learned_logits=learned)
