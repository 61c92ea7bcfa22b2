"""Attention with learned or projected logits instead of query-key products.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.attention import DotProductAttention, attention
from trainer.model.dense import Shared, einsum_float32
from trainer.model.masks import Rows
from trainer.model.mixers import View, mix_heads
from trainer.model.parameters import KERNEL, SOURCE_KERNEL, TABLE, parameter


def _check_length(length: int, max_positions: int) -> None:
    if length > max_positions:
        raise ValueError(
            f"rows have {length} tokens, but the Synthesizer has {max_positions} positions: raise "
            "max_positions"
        )


@dataclass(frozen=True)
class LearnedLogits:
    """A learned logit per head and pair of positions, the same for all inputs.

    With `reset` positions count within packed examples, otherwise along the row as upstream.

    Source: Tay et al. 2020 (arXiv:2005.00743), section 3.1, "random".
    """

    max_positions: int
    reset: bool = True

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _LearnedLogits(self, shared, num_heads, name=name)


class _LearnedLogits(nn.Module):
    spec: LearnedLogits
    shared: Shared
    num_heads: int

    @nn.compact
    def __call__(self, rows: Rows, source_rows: Rows, cached: bool = False) -> jax.Array:
        """Returns float32 logits, broadcastable to [B, H, L, S].

        With `cached` rows hold one example each, in the slots of a `Cache`.
        """
        places = self.spec.max_positions
        lengths = [side.segment_BL.shape[1] for side in (rows, source_rows)]
        _check_length(max(lengths), places)
        table_PHP = parameter(
            self,
            TABLE,
            "table",
            self.shared.parametrisation.relative_bias(),
            ("query", "heads", "key"),
            (places, self.num_heads, places),
        )
        query_BL, key_BS = rows.position_BL, source_rows.position_BL
        if not (self.spec.reset or cached) or query_BL is None or key_BS is None:
            return table_PHP[: lengths[0], :, : lengths[1]].swapaxes(0, 1)[None]
        table_PPH = table_PHP.swapaxes(1, 2)
        return table_PPH[query_BL[:, :, None], key_BS[:, None, :]].transpose(0, 3, 1, 2)


@dataclass(frozen=True)
class DenseSynthesizer:
    """Attention in which each position computes its logits from its own state alone.

    The state is projected to heads, activated by ReLU, and projected to `max_positions` logits. Key
    positions count as in `LearnedLogits`.

    Source: Tay et al. 2020 (arXiv:2005.00743), section 3.1, "dense".
    """

    num_heads: int
    head_dim: int
    max_positions: int
    reset: bool = True

    @property
    def products_per_pair(self) -> int:
        return self.num_heads * self.head_dim

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _DenseSynthesizer(self, shared, name=name)


class _DenseSynthesizer(nn.Module):
    spec: DenseSynthesizer
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        source_BSD: jax.Array,
        view: View,
        deterministic: bool,
    ) -> jax.Array:
        spec, shared, parametrisation = self.spec, self.shared, self.shared.parametrisation
        num_heads, head_dim, places = spec.num_heads, spec.head_dim, spec.max_positions
        _check_length(source_BSD.shape[1], places)
        initializer = parametrisation.feed_forward()
        joined, axes = num_heads * head_dim, ("embed", "joined_kv")
        hidden = shared.dense(joined, axes, initializer, "hidden", bias=True)
        hidden_BLHK = nn.relu(hidden(x_BLD)).reshape(*x_BLD.shape[:2], num_heads, head_dim)
        # XLA's CPU runtime supports this bfloat16 product only with heads as the first axis.
        hidden_HBLK = jnp.moveaxis(hidden_BLHK, 2, 0)
        kernel_HKP = parameter(
            self,
            KERNEL,
            "kernel",
            nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,)),
            ("heads", "kv", "unmodeled"),
            (num_heads, head_dim, places),
        ).astype(shared.dtype)
        bias_HP = parameter(
            self, TABLE, "bias", nn.initializers.zeros, ("heads", "unmodeled"), (num_heads, places)
        )
        logits_BHLP = einsum_float32("hblk,hkp->hblp", hidden_HBLK, kernel_HKP).swapaxes(0, 1)
        logits_BHLP += bias_HP[:, None]
        key_BS = view.source_rows.position_BL
        if (spec.reset or view.cache is not None) and key_BS is not None:
            logits_BHLS = jnp.take_along_axis(logits_BHLP, key_BS[:, None, None], axis=3)
        else:
            logits_BHLS = logits_BHLP[..., : source_BSD.shape[1]]

        initializer = parametrisation.attention()
        value = shared.dense(joined, axes, initializer, "value", use=SOURCE_KERNEL)
        v_BSHK = value(source_BSD).reshape(*source_BSD.shape[:2], num_heads, head_dim)
        if view.cache is not None:
            v_BSHK = view.cache.kept(self, "value", v_BSHK)
        return mix_heads(shared, logits_BHLS, v_BSHK, view, deterministic)


def dense(config: Any, options: Any) -> DenseSynthesizer:
    """Returns the dense Synthesizer."""
    return DenseSynthesizer(
        config.num_heads, config.head_dim, config.max_positions, not config.upstream_compat
    )


def random(config: Any, options: Any) -> DotProductAttention:
    """Returns the random Synthesizer, "random plus": learned logits added to the products."""
    learned = LearnedLogits(config.max_positions, not config.upstream_compat)
    return attention(config, learned_logits=learned)
