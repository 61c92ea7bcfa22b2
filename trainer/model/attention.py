"""Softmax attention with logits that are products of queries and keys, and Primer's variants.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K; G heads
of keys and values, which are H unless they are grouped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from trainer.model.attention_parts import MixedPart, ValuePart
from trainer.model.convolution import HeadConvolution
from trainer.model.dense import Shared, device_kind, project_together
from trainer.model.facts import (
    ATTENTION_NAMES,
    AUTO,
    LANES,
    T5X,
    TRANSFORMERS,
    MixerFacts,
    attention_on,
    fills_tiles,
    softmax_dtype_on,
)
from trainer.model.fused_attention import fits_memory, fused_attention
from trainer.model.fused_layouts import tables_of
from trainer.model.fused_tiles import bias_fits
from trainer.model.layouts import Pattern, visited
from trainer.model.masks import Predicate, Rows
from trainer.model.mixers import MASKED_LOGIT, View, compare_heads, mix_heads, project_out
from trainer.model.norms import Norm
from trainer.model.options import NoOptions
from trainer.model.parameters import SOURCE_KERNEL
from trainer.model.parametrisation import narrowed
from trainer.model.positions import rotate, rotate_joined
from trainer.model.sparse_attention import Dropping, block_sparse_attention
from trainer.model.synthesizer import LearnedLogits


@dataclass(frozen=True)
class DotProductAttention:
    """Multi-head softmax attention, with Primer's and the Synthesizer's changes as options.

    Rotary positions rotate queries and keys; relative ones add a bias to the logits before the
    parametrisation scales them. Logits and softmax are float32, or what `Shared.softmax_dtype`
    says; the operands of the products have the model's dtype. Fused kernels never write logits to
    memory.

    Attributes:
      convolution: applied to projected queries, keys and values: Primer's multi-dconv-head
        attention. None: not there.
      shared_query_key: queries are projected from keys, by a kernel that mixes heads.
      learned_logits: added to the products, as in the Synthesizer's "random plus". None: not there.
      num_kv_heads: heads of keys and values, each for several heads of queries (Ainslie et al.
        2023, arXiv:2305.13245). None: `num_heads`.
      query_key_norm: normalises each head's queries and keys, before rotation (Dehghani et al.
        2023, arXiv:2302.05442). None: not there.
      value_part: changes projected values. None: not there.
      mixed_part: changes mixed values before the last projection. None: not there.
      pattern: the blocks of keys that a block of queries looks at, in self-attention. None: all.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; So et al. 2021 (arXiv:2109.08668).
    Differences: T5X computes logits and softmax in bfloat16 when the model is bfloat16.
    """

    num_heads: int
    head_dim: int
    convolution: HeadConvolution | None = None
    shared_query_key: bool = False
    learned_logits: LearnedLogits | None = None
    num_kv_heads: int | None = None
    query_key_norm: Norm | None = None
    value_part: ValuePart | None = None
    mixed_part: MixedPart | None = None
    pattern: Pattern | None = None

    @property
    def products_per_pair(self) -> int:
        """Channels multiplied for each query and key, in the logits and in the mix."""
        return 2 * self.num_heads * self.head_dim

    @property
    def facts(self) -> MixerFacts:
        """Facts for configuration and export."""
        learns, convolves = self.learned_logits is not None, self.convolution is not None
        exports: tuple[str, ...] = ()
        part = self.value_part or self.mixed_part
        if not learns and part is None:
            exports = (TRANSFORMERS,) if convolves or self.shared_query_key else (TRANSFORMERS, T5X)
        return MixerFacts(
            # Fused kernels compute logits from queries and keys alone.
            attentions=(AUTO, "einsum") if learns else ATTENTION_NAMES,
            queries=True,
            # Where queries are projected from keys, there are as many.
            groups=not learns and not self.shared_query_key,
            sparse=not learns,
            convolves=convolves,
            counts_positions=learns,
            caches=True,
            selects=not (learns or convolves or self.shared_query_key),
            exports=exports,
            options=NoOptions if part is None else part.options,
        )

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _DotProductAttention(self, shared, name=name)


class _DotProductAttention(nn.Module):
    spec: DotProductAttention
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        source_BSD: jax.Array,
        view: View,
        deterministic: bool,
    ) -> jax.Array:
        spec, num_heads, head_dim = self.spec, self.spec.num_heads, self.spec.head_dim
        groups = spec.num_kv_heads or num_heads
        # A row of one block looks at all of it.
        pattern = spec.pattern
        length = x_BLD.shape[1] if view.cache is None else view.cache.slots
        if pattern is not None and pattern.block >= length:
            pattern = None
        parametrisation, positions = self.shared.parametrisation, view.positions
        project = partial(self.shared.dense, axes=("embed", "joined_kv"))
        drops = not deterministic and self.shared.dropout_rate > 0
        angle_BLC, source_angle_BSC = positions.angle_BLC, positions.source_angle_BSC
        if source_angle_BSC is None:
            source_angle_BSC = angle_BLC
        # What fused kernels return as gradients is not yet the gradient of the projections.
        rotates, convolves = angle_BLC is not None, spec.convolution is not None
        changes = drops or rotates or convolves or spec.query_key_norm is not None
        changes = changes or spec.value_part is not None

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(*projected.shape[:2], -1, head_dim)

        def convolve(projected: jax.Array, name: str, rows: Rows) -> jax.Array:
            if spec.convolution is None:
                return projected
            module = spec.convolution.build(self.shared, f"{name}_convolution")
            # Only keys and values of earlier positions are kept, not what they are made from.
            return module(projected, rows if view.cache is None else view.rows, view.cache)

        def normalise(projected: jax.Array, name: str) -> jax.Array:
            if spec.query_key_norm is None:
                return projected
            norm = spec.query_key_norm.build(self.shared, f"{name}_norm", "kv")
            return norm(heads(projected)).reshape(projected.shape)

        def change(mixed_BLJ: jax.Array) -> jax.Array:
            if spec.mixed_part is None:
                return mixed_BLJ
            return spec.mixed_part.build(self.shared, "mixed", head_dim)(mixed_BLJ, x_BLD)

        query = project(
            num_heads * head_dim, initializer=parametrisation.query(head_dim), name="query"
        )
        source = partial(
            project, groups * head_dim, initializer=parametrisation.attention(), use=SOURCE_KERNEL
        )
        deviation = 1.0 if spec.mixed_part is None else spec.mixed_part.value_deviation
        value_start = narrowed(parametrisation.attention(), deviation)
        value = source(name="value", initializer=value_start)
        implementation = self._implementation(view, deterministic)
        if spec.shared_query_key:
            k_BSJ = convolve(query(x_BLD), "query", view.rows)
            axes, initializer = ("unmodeled", "joined_kv"), parametrisation.feed_forward()
            mix = self.shared.dense(num_heads * head_dim, axes, initializer, "query_from_key")
            q_BLJ = mix(k_BSJ)
            v_BSJ = convolve(value(source_BSD), "value", view.source_rows)
        else:
            key = source(name="key")
            if implementation != "pallas" or changes:
                q_BLJ, k_BSJ, v_BSJ = query(x_BLD), key(source_BSD), value(source_BSD)
            elif source_BSD is x_BLD and groups == num_heads:
                q_BLJ, k_BSJ, v_BSJ = project_together([query, key, value], x_BLD)
            else:
                q_BLJ = query(x_BLD)
                k_BSJ, v_BSJ = project_together([key, value], source_BSD)
            q_BLJ = convolve(q_BLJ, "query", view.rows)
            k_BSJ = convolve(k_BSJ, "key", view.source_rows)
            v_BSJ = convolve(v_BSJ, "value", view.source_rows)
        q_BLJ, k_BSJ = normalise(q_BLJ, "query"), normalise(k_BSJ, "key")
        if spec.value_part is not None:
            v_BSJ = spec.value_part.build(self.shared, "values")(v_BSJ, deterministic)
        view.watch(key_BSJ=k_BSJ, value_BSJ=v_BSJ)
        if implementation == "pallas":
            k_BSJ, v_BSJ = (
                jnp.repeat(heads(each), num_heads // groups, axis=2).reshape(*each.shape[:2], -1)
                if groups != num_heads
                else each
                for each in (k_BSJ, v_BSJ)
            )
            if drops:
                v_BSJ = self._drop_values(v_BSJ)
            if angle_BLC is not None and source_angle_BSC is not None:
                q_BLJ = rotate_joined(q_BLJ, angle_BLC, head_dim)
                k_BSJ = rotate_joined(k_BSJ, source_angle_BSC, head_dim)
            scale = parametrisation.attention_scale(head_dim)
            mixed_BLJ = _fused(q_BLJ, k_BSJ, v_BSJ, view, head_dim, scale, pattern)
            return project_out(self.shared, change(mixed_BLJ))
        if pattern is not None and drops and self.shared.broadcast_dropout:
            # Heads that share values drop others of them.
            k_BSJ, v_BSJ = (
                jnp.repeat(heads(each), num_heads // groups, axis=2).reshape(q_BLJ.shape)
                for each in (k_BSJ, v_BSJ)
            )
            v_BSJ = self._drop_values(v_BSJ)
        q_BLHK, k_BSGK, v_BSGK = heads(q_BLJ), heads(k_BSJ), heads(v_BSJ)
        if angle_BLC is not None and source_angle_BSC is not None:
            q_BLHK = rotate(q_BLHK, angle_BLC)
            k_BSGK = rotate(k_BSGK, source_angle_BSC)
        if view.cache is not None:
            k_BSGK, v_BSGK = view.cache.keys_and_values(self, k_BSGK, v_BSGK)
        if pattern is not None and view.cache is None:
            mixed_BLHK = self._visit(pattern, q_BLHK, k_BSGK, v_BSGK, view, drops)
            return project_out(self.shared, change(mixed_BLHK.reshape(*q_BLJ.shape)))
        if implementation != "einsum":
            # JAX adds the bias after scaling the logits.
            scale, bias_BHLS = parametrisation.attention_scale(head_dim), None
            if positions.bias_HLS is not None:
                bias_BHLS = (positions.bias_HLS * scale)[None].astype(self.shared.dtype)
            mixed_BLHK = jax.nn.dot_product_attention(
                q_BLHK,
                k_BSGK,
                v_BSGK,
                bias=bias_BHLS,
                mask=view.mask_BLS[:, None],
                scale=scale,
                implementation="cudnn" if implementation == "cudnn" else "xla",
            )
            return project_out(self.shared, change(mixed_BLHK.reshape(*q_BLJ.shape)))
        logits_BHLS = compare_heads(q_BLHK, k_BSGK)
        if spec.learned_logits is not None:
            learned = spec.learned_logits.build(self.shared, num_heads, "learned_logits")
            logits_BHLS += learned(view.rows, view.source_rows, view.cache is not None)
        if pattern is not None:
            visited_BHLS = self._visited(pattern, length, view)
            logits_BHLS = jnp.where(visited_BHLS, logits_BHLS, MASKED_LOGIT)
        return mix_heads(self.shared, logits_BHLS, v_BSGK, view, deterministic, change)

    def _drop_values(self, v_BSJ: jax.Array) -> jax.Array:
        """Returns values [B, S, H * K] of which each head drops some in training.

        All queries share a draw: keys dropped from the weights are values dropped.
        """
        num_heads, rate = self.spec.num_heads, self.shared.dropout_rate
        ones_BH1S = jnp.ones((len(v_BSJ), num_heads, 1, v_BSJ.shape[1]), v_BSJ.dtype)
        kept_BSH = self.shared.dropout()(ones_BH1S, False)[:, :, 0].swapaxes(1, 2)
        # Divided as weights are, not multiplied by a rounded inverse.
        scaled_BSJ = v_BSJ / (1.0 - rate)
        return jnp.where(jnp.repeat(kept_BSH > 0, self.spec.head_dim, axis=2), scaled_BSJ, 0)

    def _visit(
        self,
        pattern: Pattern,
        q_BLHK: jax.Array,
        k_BLGK: jax.Array,
        v_BLGK: jax.Array,
        view: View,
        drops: bool,
    ) -> jax.Array:
        """Returns `block_sparse_attention`, with weights that each query drops itself if any do."""
        shared = self.shared
        if view.rows is not view.source_rows:
            raise ValueError("a pattern needs self-attention")
        dropping = None
        if drops and not shared.broadcast_dropout:
            dropping = Dropping(shared.dropout_rate, self.make_rng("dropout"))
        return block_sparse_attention(
            q_BLHK,
            k_BLGK,
            v_BLGK,
            view.rows,
            _known(view),
            pattern,
            view.positions.bias_HN,
            shared.parametrisation.attention_scale(self.spec.head_dim),
            softmax_dtype_on(device_kind(), shared.softmax_dtype, shared.dtype),
            dropping,
        )

    def _visited(self, pattern: Pattern, length: int, view: View) -> jax.Array:
        """Returns where a pattern visits pairs of positions, bool [B, H or 1, L, S].

        For what a cache holds, which is not at the places of a row of `length`.
        """
        known = _known(view)
        prefix = known.prefix and view.rows.prefix_BL is not None
        layout_PNN = visited(pattern, self.spec.num_heads, length, known.causal, prefix)
        query_BL, key_BS = view.rows.position_BL, view.source_rows.position_BL
        assert query_BL is not None
        assert key_BS is not None
        block_BL, block_BS = query_BL // pattern.block, key_BS // pattern.block
        return jnp.asarray(layout_PNN)[:, block_BL[..., None], block_BS[:, None]].swapaxes(0, 1)

    def _implementation(self, view: View, deterministic: bool) -> str:
        """Returns one of ATTENTION_NAMES, not "auto"."""
        shared = self.shared
        if view.cache is not None:
            return "einsum"
        name = attention_on(device_kind(), shared.attention, shared.dtype, self.spec.head_dim)
        if name != "pallas":
            return name
        drops = not deterministic and shared.dropout_rate > 0
        longest = max(side.segment_BL.shape[1] for side in (view.rows, view.source_rows))
        fits = (
            view.predicate is not None
            and not view.watches("weights_BHLS")
            and self.spec.learned_logits is None
            and shared.attention_weights == "softmax"
            and (self.spec.pattern is None or _tiles(self.spec, self.spec.pattern))
            # Kernels look biases up in a table of buckets.
            and (view.positions.bias_HLS is None or view.positions.relative is not None)
            and (shared.broadcast_dropout or not drops)
            and fits_memory(longest, kernel_memory(device_kind()))
            # The model is not run, only traced, on one token, and for any device.
            and not self.is_initializing()
        )
        return name if fits else "einsum"


def _known(view: View) -> Predicate:
    """Returns the mask of a view, whose pattern it is to go with."""
    if view.predicate is None:
        raise ValueError("a pattern needs a mask that kernels know")
    return view.predicate


def _fused(
    q_BLJ: jax.Array,
    k_BSJ: jax.Array,
    v_BSJ: jax.Array,
    view: View,
    head_dim: int,
    scale: float,
    pattern: Pattern | None,
) -> jax.Array:
    """Returns `fused_attention`, by each device for its own rows and heads."""
    kind = device_kind()
    assert view.predicate is not None
    relative = view.positions.relative
    visits, tables = None, None
    if pattern is not None:
        length, prefix = q_BLJ.shape[1], view.rows.prefix_BL is not None
        known = view.predicate._replace(prefix=view.predicate.prefix and prefix)
        skips, biased_dim = known.causal and not known.prefix, head_dim if relative else None
        fits = partial(bias_fits, length, skips, biased_dim, kernel_memory(kind))
        num_heads = q_BLJ.shape[2] // head_dim
        visits, tables = tables_of(pattern, num_heads, head_dim, length, known, fits)
    run = partial(
        fused_attention,
        head_dim=head_dim,
        predicate=view.predicate,
        scale=scale,
        vmem_bytes=kernel_memory(kind),
        interpret=not kind.startswith("TPU"),
    )
    sides = [Rows(side.segment_BL, side.prefix_BL) for side in (view.rows, view.source_rows)]
    table_HR = None if relative is None else relative.table_HR

    def attend(*operands: Any) -> jax.Array:
        *others, table_HR, tables = operands
        own = None if relative is None else relative._replace(table_HR=table_HR)
        return run(*others, relative=own, layout=None if visits is None else (visits, tables))

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        batch, heads = nn.logical_to_mesh_axes(("batch", "joined_kv")) or (None, None)
        joined, rows = PartitionSpec(batch, None, heads), PartitionSpec(batch)
        of_tables = PartitionSpec(heads if visits is not None and visits.by_group else None)
        attend = jax.shard_map(
            attend,
            in_specs=(joined, joined, joined, rows, rows, PartitionSpec(heads), of_tables),
            out_specs=joined,
            # Kernels do not say over which axes their results vary.
            check_vma=False,
        )
    return attend(q_BLJ, k_BSJ, v_BSJ, *sides, table_HR, tables)


def _tiles(spec: DotProductAttention, pattern: Pattern) -> bool:
    """Returns whether kernels can compute a pattern: each device has whole groups of its heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if not fills_tiles(pattern.block):
        return False
    if mesh.empty or mesh.size == 1:
        return True
    (axis,) = nn.logical_to_mesh_axes(("joined_kv",)) or (None,)
    devices = mesh.shape[axis] if isinstance(axis, str) else 1
    return devices == 1 or spec.num_heads * spec.head_dim % (devices * LANES) == 0


def kernel_memory(kind: str) -> int:
    """Returns bytes of a core's memory that a kernel may use; the compiler keeps the rest.

    Source: jax-ml.github.io/scaling-book, "How to Think About TPUs": 128 MiB, but 16 MiB in v4.
    """
    return (14 if kind.startswith("TPU v4") else 64) << 20
