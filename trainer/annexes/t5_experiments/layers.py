"""Attention whose queries depend on each head's summary of the row (cdQ); and memory tokens.

Dimensions: B batch, L query length, S key length, D model, H conditional heads, G heads of keys and
values, K head size, Q queries per summary: L if rows are packed, otherwise 1; N memory tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.dense import Buildable, Built, Shared, einsum_float32
from trainer.model.masks import Mask, Rows
from trainer.model.mixers import MASKED_LOGIT, View, compare_heads, mix_heads, split_heads
from trainer.model.parameters import SOURCE_KERNEL, TABLE, Use, parameter
from trainer.model.positions import rotate
from trainer.model.stack_parts import StackPart

# A kernel that is multiplied by another kernel, not by positions.
_MULTIPLIED_ONCE = Use(None, decays=True)


@dataclass(frozen=True)
class ConditionalQueryAttention(Buildable):
    """Multi-head softmax attention with conditional queries in some of its heads.

    A conditional head h pools the states of a row, P_h = sum_j a_hj x_j with the weights a_h =
    softmax_j(T_h relu(W_t x_j)), and its query at position i is C_q C_w [P_h; x_i]. `num_heads`
    counts the heads of keys and values, all with conditional queries; `plain_heads`, 0 or equally
    many, share the keys and values of the conditional head of the same number and come first in
    `out`. States are pooled over a whole packed example, so only encoders can use it.

    Source: t5-experiments, `modeling_t5.py`, `T5CDQAttention`.
    Differences: C_q and C_w are multiplied first, and states are projected before they are pooled,
    which is the same except for rounding and takes K instead of D channels per head.
    """

    num_heads: int
    plain_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        assert self.plain_heads in (0, self.num_heads), self

    @property
    def products_per_pair(self) -> int:
        return 2 * (self.num_heads + self.plain_heads) * self.head_dim

    def run(
        self, module: Built, x_BLD: Array, source_BSD: Array, view: View, deterministic: bool
    ) -> Array:
        shared, positions = module.shared, view.positions
        parametrisation, joined = shared.parametrisation, self.num_heads * self.head_dim
        project = partial(shared.dense, joined, ("embed", "joined_kv"))
        start = parametrisation.attention()
        key = project(start, "key", use=SOURCE_KERNEL)
        value = project(start, "value", use=SOURCE_KERNEL)
        k_BSGK = split_heads(key(source_BSD), self.head_dim)
        v_BSGK = split_heads(value(source_BSD), self.head_dim)
        queries = [self._conditional(shared, x_BLD, view.rows, deterministic)]
        if self.plain_heads:
            query = project(parametrisation.query(self.head_dim), "query")
            queries.insert(0, split_heads(query(x_BLD), self.head_dim))
        if positions.angle_BLC is not None:
            turns = positions.angle_BLC, positions.amplitude
            k_BSGK = rotate(k_BSGK, *turns)
            queries = [rotate(q_BLGK, *turns) for q_BLGK in queries]
        logits_BHLS = jnp.concatenate([compare_heads(q, k_BSGK) for q in queries], axis=1)
        if self.plain_heads:
            v_BSGK = jnp.concatenate([v_BSGK, v_BSGK], axis=2)
            if positions.bias_HLS is not None:
                bias_HLS = jnp.concatenate([positions.bias_HLS, positions.bias_HLS])
                view = view._replace(positions=positions._replace(bias_HLS=bias_HLS))
        return mix_heads(shared, logits_BHLS, v_BSGK, view, deterministic)

    def _conditional(self, shared: Shared, x_BLD: Array, rows: Rows, deterministic: bool) -> Array:
        width, start = x_BLD.shape[-1], shared.parametrisation.conditional_query()
        dense = partial(shared.dense, initializer=start, bias=False)
        hidden = dense(width, ("embed", "mlp"), name="pool_hidden")
        pool = dense(self.num_heads, ("embed", "heads"), name="pool", float32_output=True)
        condition = dense(width, ("embed", "mlp"), name="condition", use=_MULTIPLIED_ONCE)
        query = dense(self.head_dim, ("embed", "kv"), name="conditional_query")
        both_ED, _ = condition.weights(2 * width)
        query_DK, _ = query.weights(width)
        # Nothing comes between the two kernels, so multiply them once, not at every position.
        kernel_EK = einsum_float32("ed,dk->ek", both_ED, query_DK).astype(shared.dtype)
        pooled_BSK, own_BLK = x_BLD @ kernel_EK[:width], x_BLD @ kernel_EK[width:]
        # A row of one example has a single summary, which padding uses, too.
        packed = rows.position_BL is not None
        seen = rows if packed else Rows((rows.segment_BL > 0).any(1, keepdims=True).astype(int))
        mask_BQS = Mask()(seen, rows)
        pool_BHS = pool(nn.relu(hidden(x_BLD))).swapaxes(1, 2)
        logits_BHQS = jnp.where(mask_BQS[:, None], pool_BHS[:, :, None], MASKED_LOGIT)
        weights_BHQS = jax.nn.softmax(logits_BHQS).astype(shared.dtype)
        weights_BHQS = shared.dropout()(weights_BHQS, deterministic)
        summary_BQHK = jnp.einsum("bhqs,bsk->bqhk", weights_BHQS, pooled_BSK)
        return own_BLK[:, :, None] + summary_BQHK


def mixer(config: Any, options: Any) -> ConditionalQueryAttention:
    heads = options.conditional_heads or config.num_heads
    return ConditionalQueryAttention(heads, config.num_heads - heads, config.head_dim)


@dataclass(frozen=True)
class MemoryTokens(Buildable):
    """Learned vectors [count, D] put before a stack's embedded tokens, the same in every row.

    Rows must not be packed: the vectors would pass information between examples.

    Source: Burtsev et al. 2020 (arXiv:2006.11527); t5-experiments, `num_memory_tokens`.
    """

    count: int

    def run(self, module: Built, x_BLD: Array, rows: Rows) -> tuple[Array, Rows]:
        if rows.position_BL is not None:
            raise ValueError("memory_tokens need rows of one example, so rows cannot be packed")
        batch, width = len(x_BLD), x_BLD.shape[-1]
        start, axes = module.shared.parametrisation.embedding(), ("unmodeled", "embed")
        vectors_ND = parameter(module, TABLE, "embedding", start, axes, (self.count, width))
        memory_BND = jnp.broadcast_to(vectors_ND.astype(x_BLD.dtype), (batch, self.count, width))
        ones_BN = jnp.ones((batch, self.count), rows.segment_BL.dtype)
        segment_BL = jnp.concatenate([ones_BN, rows.segment_BL], axis=1)
        return jnp.concatenate([memory_BND, x_BLD], axis=1), Rows(segment_BL)


def memory_tokens(config: Any, options: Any) -> StackPart:
    count = options.count
    front = MemoryTokens(count)
    return StackPart("memory_embedder", front=front, lengthening=count, encoder_only=True)
