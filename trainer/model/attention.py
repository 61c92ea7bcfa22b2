"""Softmax attention whose logits are query-key products, and Primer's variants.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K; G heads
of keys and values, which equals H unless heads are grouped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax import Array

from trainer.model.attention_call import AttentionCall, select_core
from trainer.model.config import ModelConfig
from trainer.model.dense import Buildable, Built, Dense, Order, Shared, project_joined
from trainer.model.masks import Rows
from trainer.model.mixers import View, project_out, split_heads
from trainer.model.norms import Norm
from trainer.model.parameters import SOURCE_KERNEL
from trainer.model.parametrisation import narrowed
from trainer.model.registry import JOINED
from trainer.model.sparsity import Pattern
from trainer.model.stack_parts import CrossAttention


class MixedPart(Buildable):
    """A change to mixed values before the last projection; maps (mixed_BLJ, x_BLD) to [B, L, M].

    Its setting is the head size. `value_deviation` multiplies the standard deviation of the initial
    value kernel.
    """

    @property
    def value_deviation(self) -> float:
        return 1.0


@dataclass(frozen=True)
class DotProductAttention(Buildable):
    """Multi-head softmax attention with optional parts; a part that is None is absent.

    Rotary positions rotate queries and keys; relative ones add a bias to the logits before the
    parametrisation scales them. Logits and softmax are float32 or `Shared.softmax_dtype`; the
    operands of products have the model's dtype. Fused kernels never write logits to memory.

    Attributes:
      convolution: changes projected queries, keys and values; maps (x_BLJ, rows, cache) to [B, L,
        J].
      shared_query_key: project queries from keys, with a kernel that mixes heads.
      learned_logits: added to the products; maps (rows, source_rows, cached) to [B, H, L, S]. Its
        setting is the number of heads.
      num_kv_heads: heads of keys and values, each used by several query heads (Ainslie et al. 2023,
        arXiv:2305.13245). None means `num_heads`.
      query_key_norm: normalises each head's queries and keys, before rotation (Dehghani et al.
        2023, arXiv:2302.05442); `joined_norm`: all heads' together, as in OLMo 2.
      value_part: changes joined values; maps (v_BSJ, deterministic) to [B, S, J].
      pattern: key blocks that each query block sees, in self-attention. None means all.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.
    Differences: T5X computes logits and softmax in bfloat16 when the model is bfloat16.
    """

    num_heads: int
    head_dim: int
    convolution: Buildable | None = None
    shared_query_key: bool = False
    learned_logits: Buildable | None = None
    num_kv_heads: int | None = None
    query_key_norm: Norm | None = None
    joined_norm: bool = False
    value_part: Buildable | None = None
    mixed_part: MixedPart | None = None
    pattern: Pattern | None = None

    @property
    def _groups(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def products_per_pair(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def run(
        self, module: Built, x_BLD: Array, source_BSD: Array, view: View, deterministic: bool
    ) -> Array:
        shared = module.shared
        call = self._call(module, x_BLD, view, deterministic)
        core = select_core(call)
        order = None
        if not self._changes(call) and not view.watched:
            order = core.order(call, self._groups)
        operands: tuple[Array, Array | None, Array | None]
        if order is not None:
            operands = self._project_joined(shared, x_BLD, source_BSD, order)
        else:
            q_BLJ, k_BSJ, v_BSJ = self._project(shared, x_BLD, source_BSD, view)
            if self.query_key_norm is not None:
                q_BLJ = self._normalise(shared, q_BLJ, "query")
                k_BSJ = self._normalise(shared, k_BSJ, "key")
            if self.value_part is not None:
                v_BSJ = self.value_part.build(shared, "values")(v_BSJ, deterministic)
            view.watch(key_BSJ=k_BSJ, value_BSJ=v_BSJ)
            operands = q_BLJ, k_BSJ, v_BSJ
        mixed_BLJ = core(call, *operands)
        if self.mixed_part is not None:
            mixed_BLJ = self.mixed_part.build(shared, "mixed", self.head_dim)(mixed_BLJ, x_BLD)
        return project_out(shared, mixed_BLJ)

    def _call(self, module: Built, x_BLD: Array, view: View, deterministic: bool) -> AttentionCall:
        pattern, learned = self.pattern, self.learned_logits
        # A row of one block needs no pattern: the block sees itself.
        length = x_BLD.shape[1] if view.cache is None else view.cache.slots
        if pattern is not None and pattern.block >= length:
            pattern = None

        def added() -> Array:
            assert learned is not None
            logits = learned.build(module.shared, "learned_logits", self.num_heads)
            return logits(view.rows, view.source_rows, view.cache is not None)

        extra = None if learned is None else added
        return AttentionCall(
            module, view, self.num_heads, self.head_dim, pattern, extra, deterministic
        )

    def _changes(self, call: AttentionCall) -> bool:
        """Returns True if other operations come between the projections and the fused kernels."""
        parts = (self.convolution, self.query_key_norm, self.value_part, call.angles)
        between = any(part is not None for part in parts)
        return call.drops or self.shared_query_key or between

    def _project(
        self, shared: Shared, x_BLD: Array, source_BSD: Array, view: View
    ) -> tuple[Array, Array, Array]:
        query, key, value = self._projections(shared)
        convolve = partial(self._convolve, shared, view)
        if self.shared_query_key:
            k_BSJ = convolve(query(x_BLD), "query", view.rows)
            width, axes = self.num_heads * self.head_dim, ("unmodeled", "joined_kv")
            initializer = shared.parametrisation.feed_forward()
            q_BLJ = shared.dense(width, axes, initializer, "query_from_key")(k_BSJ)
            v_BSJ = value(source_BSD)
        else:
            q_BLJ, k_BSJ, v_BSJ = query(x_BLD), key(source_BSD), value(source_BSD)
            q_BLJ = convolve(q_BLJ, "query", view.rows)
            k_BSJ = convolve(k_BSJ, "key", view.source_rows)
        return q_BLJ, k_BSJ, convolve(v_BSJ, "value", view.source_rows)

    def _project_joined(
        self, shared: Shared, x_BLD: Array, source_BSD: Array, order: Order
    ) -> tuple[Array, Array | None, None]:
        """Returns what kernels take: one array per input, in this order."""
        query, key, value = self._projections(shared)
        if source_BSD is x_BLD and query.features == key.features:
            return project_joined([query, key, value], x_BLD, order), None, None
        return query(x_BLD), project_joined([key, value], source_BSD, order), None

    def _projections(self, shared: Shared) -> tuple[Dense, Dense, Dense]:
        parametrisation = shared.parametrisation
        project = partial(shared.dense, axes=("embed", "joined_kv"))
        width, start = self.num_heads * self.head_dim, parametrisation.query(self.head_dim)
        query = project(width, initializer=start, name="query")
        start = parametrisation.attention()
        source = partial(project, self._groups * self.head_dim, use=SOURCE_KERNEL)
        deviation = 1.0 if self.mixed_part is None else self.mixed_part.value_deviation
        value = source(name="value", initializer=narrowed(start, deviation))
        if self.shared_query_key:
            return query, query, value
        return query, source(name="key", initializer=start), value

    def _convolve(
        self, shared: Shared, view: View, projected: Array, name: str, rows: Rows
    ) -> Array:
        if self.convolution is None:
            return projected
        module = self.convolution.build(shared, f"{name}_convolution")
        # The cache keeps only keys and values of earlier positions, not their inputs.
        return module(projected, rows if view.cache is None else view.rows, view.cache)

    def _normalise(self, shared: Shared, projected: Array, name: str) -> Array:
        assert self.query_key_norm is not None
        if self.joined_norm:
            return self.query_key_norm.build(shared, f"{name}_norm", "joined_kv")(projected)
        norm = self.query_key_norm.build(shared, f"{name}_norm", "kv")
        return norm(split_heads(projected, self.head_dim)).reshape(projected.shape)


def attention(config: ModelConfig, **changes: Any) -> DotProductAttention:
    """Returns a configuration's attention to all keys, with `changes` to its fields."""
    return DotProductAttention(
        config.num_heads,
        config.head_dim,
        num_kv_heads=config.num_kv_heads,
        query_key_norm=config.build("norm") if config.query_key_norm else None,
        joined_norm=config.query_key_norm_over == JOINED,
        **changes,
    )


def self_attention(config: ModelConfig, options: Any = None, **changes: Any) -> DotProductAttention:
    """Returns a configuration's attention to the keys of its pattern."""
    pattern = config.build("attention_pattern")
    return replace(attention(config, **changes), pattern=pattern)


def cross_attention(config: ModelConfig, options: Any) -> CrossAttention:
    """Returns attention to the encoder's last states."""
    return CrossAttention(attention(config))
