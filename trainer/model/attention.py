"""Softmax attention whose logits are query-key products, and Primer's variants.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K; G heads
of keys and values, equal to H unless grouped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
from flax import linen as nn

from trainer.model.attention_cores import CORES, Attending, choose
from trainer.model.config import ModelConfig
from trainer.model.dense import Dense, Shared, project_together
from trainer.model.masks import Rows
from trainer.model.mixers import View, project_out
from trainer.model.norms import Norm
from trainer.model.parameters import SOURCE_KERNEL
from trainer.model.parametrisation import narrowed
from trainer.model.sparsity import Pattern
from trainer.model.stack_parts import CrossAttention


class ProjectedPart(Protocol):
    """A change of projected queries, keys and values; maps (x_BLJ, rows, cache) to [B, L, J]."""

    def build(self, shared: Shared, name: str) -> nn.Module: ...


class AddedLogits(Protocol):
    """Logits added to the products; maps (rows, source_rows, cached) to [B, H, L, S]."""

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module: ...


class ValuePart(Protocol):
    """A change of joined values; its module maps (v_BSJ, deterministic) to [B, S, J]."""

    def build(self, shared: Shared, name: str) -> nn.Module: ...


class MixedPart(Protocol):
    """A change of mixed values before the last projection; maps (mixed_BLJ, x_BLD) to [B, L, M].

    `value_deviation` multiplies the standard deviation of the initial value kernel.
    """

    @property
    def value_deviation(self) -> float: ...

    def build(self, shared: Shared, name: str, head_dim: int) -> nn.Module: ...


@dataclass(frozen=True)
class DotProductAttention:
    """Multi-head softmax attention with optional parts; None means that a part is absent.

    Rotary positions rotate queries and keys; relative ones add a bias to the logits before the
    parametrisation scales them. Logits and softmax are float32 or `Shared.softmax_dtype`; the
    operands of products have the model's dtype. Fused kernels never write logits to memory.

    Attributes:
      shared_query_key: queries are projected from keys, by a kernel that mixes heads.
      num_kv_heads: heads of keys and values, each serving several query heads (Ainslie et al. 2023,
        arXiv:2305.13245). None means `num_heads`.
      query_key_norm: normalises each head's queries and keys, before rotation (Dehghani et al.
        2023, arXiv:2302.05442).
      pattern: key blocks that each query block sees, in self-attention. None means all.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.
    Differences: T5X computes logits and softmax in bfloat16 when the model is bfloat16.
    """

    num_heads: int
    head_dim: int
    convolution: ProjectedPart | None = None
    shared_query_key: bool = False
    learned_logits: AddedLogits | None = None
    num_kv_heads: int | None = None
    query_key_norm: Norm | None = None
    value_part: ValuePart | None = None
    mixed_part: MixedPart | None = None
    pattern: Pattern | None = None

    @property
    def products_per_pair(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _DotProductAttention(self, shared, name=name)


class _DotProductAttention(nn.Module):
    spec: DotProductAttention
    shared: Shared

    @nn.compact
    def __call__(
        self, x_BLD: jax.Array, source_BSD: jax.Array, view: View, deterministic: bool
    ) -> jax.Array:
        attending = self._attending(x_BLD, view, deterministic)
        core = choose(attending, view)
        together = core == "pallas" and not self._changes(attending, view)
        q_BLJ, k_BSJ, v_BSJ = self._project(x_BLD, source_BSD, view, together)
        spec, shared = self.spec, self.shared
        if spec.query_key_norm is not None:
            q_BLJ, k_BSJ = self._normalise(q_BLJ, "query"), self._normalise(k_BSJ, "key")
        if spec.value_part is not None:
            v_BSJ = spec.value_part.build(shared, "values")(v_BSJ, deterministic)
        view.watch(key_BSJ=k_BSJ, value_BSJ=v_BSJ)
        mixed_BLJ = CORES[core](attending, q_BLJ, k_BSJ, v_BSJ, view)
        if spec.mixed_part is not None:
            mixed_BLJ = spec.mixed_part.build(shared, "mixed", spec.head_dim)(mixed_BLJ, x_BLD)
        return project_out(shared, mixed_BLJ)

    def _attending(self, x_BLD: jax.Array, view: View, deterministic: bool) -> Attending:
        spec, shared, pattern = self.spec, self.shared, self.spec.pattern
        # A row of one block needs no pattern: the block sees itself.
        length = x_BLD.shape[1] if view.cache is None else view.cache.slots
        if pattern is not None and pattern.block >= length:
            pattern = None

        def added(view: View) -> jax.Array:
            assert spec.learned_logits is not None
            learned = spec.learned_logits.build(shared, spec.num_heads, "learned_logits")
            logits_BHLS: jax.Array = learned(view.rows, view.source_rows, view.cache is not None)
            return logits_BHLS

        return Attending(
            self,
            shared,
            spec.num_heads,
            spec.head_dim,
            pattern,
            None if spec.learned_logits is None else added,
            deterministic,
        )

    def _changes(self, attending: Attending, view: View) -> bool:
        """Returns whether other operations lie between the projections and the fused kernels."""
        spec = self.spec
        parts = (spec.convolution, spec.query_key_norm, spec.value_part, view.positions.angle_BLC)
        return attending.drops or any(part is not None for part in parts)

    def _project(
        self, x_BLD: jax.Array, source_BSD: jax.Array, view: View, together: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values; `together` uses one product per input."""
        spec = self.spec
        query, key, value = self._projections()
        if spec.shared_query_key:
            k_BSJ = self._convolve(query(x_BLD), "query", view.rows, view)
            width, axes = spec.num_heads * spec.head_dim, ("unmodeled", "joined_kv")
            initializer = self.shared.parametrisation.feed_forward()
            q_BLJ = self.shared.dense(width, axes, initializer, "query_from_key")(k_BSJ)
            v_BSJ = value(source_BSD)
        elif not together:
            q_BLJ, k_BSJ, v_BSJ = query(x_BLD), key(source_BSD), value(source_BSD)
        elif source_BSD is x_BLD and query.features == key.features:
            q_BLJ, k_BSJ, v_BSJ = project_together([query, key, value], x_BLD)
        else:
            q_BLJ = query(x_BLD)
            k_BSJ, v_BSJ = project_together([key, value], source_BSD)
        if not spec.shared_query_key:
            q_BLJ = self._convolve(q_BLJ, "query", view.rows, view)
            k_BSJ = self._convolve(k_BSJ, "key", view.source_rows, view)
        return q_BLJ, k_BSJ, self._convolve(v_BSJ, "value", view.source_rows, view)

    def _projections(self) -> tuple[Dense, Dense, Dense]:
        spec, parametrisation = self.spec, self.shared.parametrisation
        project = partial(self.shared.dense, axes=("embed", "joined_kv"))
        width, start = spec.num_heads * spec.head_dim, parametrisation.query(spec.head_dim)
        query = project(width, initializer=start, name="query")
        groups, start = spec.num_kv_heads or spec.num_heads, parametrisation.attention()
        source = partial(project, groups * spec.head_dim, use=SOURCE_KERNEL)
        deviation = 1.0 if spec.mixed_part is None else spec.mixed_part.value_deviation
        value = source(name="value", initializer=narrowed(start, deviation))
        if spec.shared_query_key:
            return query, query, value
        return query, source(name="key", initializer=start), value

    def _convolve(self, projected: jax.Array, name: str, rows: Rows, view: View) -> jax.Array:
        if self.spec.convolution is None:
            return projected
        module = self.spec.convolution.build(self.shared, f"{name}_convolution")
        # The cache keeps only keys and values of earlier positions, not their inputs.
        return module(projected, rows if view.cache is None else view.rows, view.cache)

    def _normalise(self, projected: jax.Array, name: str) -> jax.Array:
        assert self.spec.query_key_norm is not None
        norm = self.spec.query_key_norm.build(self.shared, f"{name}_norm", "kv")
        heads = projected.reshape(*projected.shape[:2], -1, self.spec.head_dim)
        normalised: jax.Array = norm(heads).reshape(projected.shape)
        return normalised


def attention(config: ModelConfig, **changes: Any) -> DotProductAttention:
    """Returns a configuration's attention to all keys, with `changes` of its fields."""
    return DotProductAttention(
        config.num_heads,
        config.head_dim,
        num_kv_heads=config.num_kv_heads,
        query_key_norm=config.build("norm") if config.query_key_norm else None,
        **changes,
    )


def self_attention(config: ModelConfig, options: Any = None, **changes: Any) -> DotProductAttention:
    """Returns a configuration's attention to the keys of its pattern."""
    pattern = config.build("attention_pattern")
    return replace(attention(config, **changes), pattern=pattern)


def cross_attention(config: ModelConfig, options: Any) -> CrossAttention:
    """Returns attention to the encoder's last states."""
    return CrossAttention(attention(config))
