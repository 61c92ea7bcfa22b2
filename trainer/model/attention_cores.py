"""Attention cores: interchangeable ways to compute attention from queries, keys and values.

Dimensions: B batch, L query length, S key length, H heads, G heads of keys and values, K head size,
J = H * K, C channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes
from jax import Array
from jax.sharding import PartitionSpec

from trainer.model.dense import Built, Order, Shared, tracing_device
from trainer.model.device import LANES, fills_tiles, group_width
from trainer.model.fused_attention import buffers_of, fused_attention
from trainer.model.fused_sparsity import tables_of
from trainer.model.fused_tiles import bias_fits
from trainer.model.masks import Mask, Rows
from trainer.model.mixers import MASKED_LOGIT, View, compare_heads, split_heads, weigh_heads
from trainer.model.positions import rotate, rotate_joined
from trainer.model.sparse_attention import Dropping, block_sparse_attention
from trainer.model.sparsity import Pattern, visited
from trainer.model.triton_attention import triton_attention


class Attending(NamedTuple):
    """One attention operation as the cores see it.

    `module` keeps the cache and draws dropout. `pattern` is None if all keys are visible.
    `added_logits` returns what is added to the products; only einsum supports it.
    """

    module: Built
    view: View
    num_heads: int
    head_dim: int
    pattern: Pattern | None
    added_logits: Callable[[], Array] | None
    deterministic: bool

    @property
    def shared(self) -> Shared:
        return self.module.shared

    @property
    def drops(self) -> bool:
        return not self.deterministic and self.shared.dropout_rate > 0

    @property
    def scale(self) -> float:
        return self.shared.parametrisation.attention_scale(self.head_dim)

    @property
    def predicate(self) -> Mask:
        """The mask; it ignores prefixes if the batch marks none."""
        if self.view.predicate is None:
            raise ValueError("a pattern needs a mask that kernels support")
        return self.view.predicate.on(self.view.rows)

    @property
    def angles(self) -> tuple[Array, Array] | None:
        """The angles that rotate queries and keys."""
        own, source = self.view.positions.angle_BLC, self.view.positions.source_angle_BSC
        if own is None:
            return None
        return own, own if source is None else source

    @property
    def amplitude(self) -> float | None:
        """Factor of rotated channels."""
        return self.view.positions.amplitude

    def heads(self, joined: Array) -> Array:
        return split_heads(joined, self.head_dim)

    def rotated(self, q_BLJ: Array, k_BSJ: Array) -> tuple[Array, Array]:
        """Returns rotated queries and keys, split into heads."""
        q_BLHK, k_BSGK = self.heads(q_BLJ), self.heads(k_BSJ)
        if self.angles is None:
            return q_BLHK, k_BSGK
        own, source = self.angles
        return rotate(q_BLHK, own, self.amplitude), rotate(k_BSGK, source, self.amplitude)

    def repeated(self, joined: Array) -> Array:
        """Returns keys or values with one head per query head."""
        heads = self.heads(joined)
        if heads.shape[2] == self.num_heads:
            return joined
        heads = jnp.repeat(heads, self.num_heads // heads.shape[2], axis=2)
        return heads.reshape(*joined.shape[:2], -1)

    def drop_values(self, v_BSJ: Array) -> Array:
        """Returns values [B, S, J] with dropout per head and key.

        All queries share a draw, so dropping values is the same as dropping weights.
        """
        shared = self.shared
        ones_BH1S = jnp.ones((len(v_BSJ), self.num_heads, 1, v_BSJ.shape[1]), v_BSJ.dtype)
        kept_BSH = shared.dropout()(ones_BH1S, False)[:, :, 0].swapaxes(1, 2)
        # Divided like weights, not multiplied by a rounded inverse.
        scaled_BSJ = v_BSJ / (1.0 - shared.dropout_rate)
        return jnp.where(jnp.repeat(kept_BSH > 0, self.head_dim, axis=2), scaled_BSJ, 0)


# Maps queries [B, L, J], keys and values [B, S, G * K], not yet rotated, to mixed values [B, L, J].
# In an order of `order_of_joined`, "pallas" also maps [B, L, 3 * J], None, None, or keys and values
# [B, S, 2 * G * K] as keys and None as values.
Core = Callable[..., Array]


def choose(at: Attending) -> str:
    """Returns the key in CORES of the core that computes an attention."""
    shared, pattern, view, device = at.shared, at.pattern, at.view, tracing_device()
    if view.cache is not None:
        return "einsum"
    name = device.attention(shared.attention, shared.dtype, at.head_dim)
    if name == "pallas":
        itemsize = jnp.dtype(shared.dtype).itemsize
        longest = max(side.segment_BL.shape[1] for side in (view.rows, view.source_rows))
        fits = (
            view.predicate is not None
            and (view.predicate.window is None or not device.is_gpu)
            and not view.watches("weights_BHLS")
            and at.added_logits is None
            and shared.attention_weights == "softmax"
            and (shared.attention_softcap is None or not device.is_gpu)
            and (pattern is None or (not device.is_gpu and _tiles(at, pattern)))
            # Kernels look biases up in a table of buckets.
            and (view.positions.bias_HLS is None or view.positions.relative is not None)
            and (shared.broadcast_dropout or not at.drops)
            and (device.is_gpu or buffers_of(longest, device.kernel_bytes, itemsize) > 0)
            and device.fits(at.head_dim)
            # Initialisation traces the model on one token, for any device.
            and not at.module.is_initializing()
        )
        name = name if fits else "einsum"
    return "sparse" if pattern is not None and name != "pallas" else name


def order_of_joined(at: Attending, groups: int) -> Order | None:
    """Returns how queries, keys and values share an array; None if kernels need separate ones.

    `groups` are the heads of keys and values.
    """
    devices = _dividing_heads()
    if tracing_device().is_gpu:
        return Order(devices, 1) if groups % devices == 0 else None
    pieces, rest = divmod(groups * at.head_dim, devices * group_width(at.head_dim))
    return Order(devices, pieces) if groups == at.num_heads and rest == 0 else None


def _tiles(at: Attending, pattern: Pattern) -> bool:
    """Returns True if kernels can compute a pattern: each device needs whole groups of heads."""
    devices = _dividing_heads()
    whole = devices == 1 or at.num_heads * at.head_dim % (devices * LANES) == 0
    return whole and fills_tiles(pattern.block)


def _dividing_heads() -> int:
    """Returns the number of devices that share the heads of a row."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return 1
    (axis,) = logical_to_mesh_axes(("joined_kv",)) or (None,)
    return mesh.shape[axis] if isinstance(axis, str) else 1


def _einsum(at: Attending, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    q_BLHK, k_BSGK = at.rotated(q_BLJ, k_BSJ)
    v_BSGK = at.heads(v_BSJ)
    if at.view.cache is not None:
        k_BSGK, v_BSGK = at.view.cache.keys_and_values(at.module, k_BSGK, v_BSGK)
    logits_BHLS = compare_heads(q_BLHK, k_BSGK)
    if at.added_logits is not None:
        logits_BHLS += at.added_logits()
    if at.pattern is not None:
        logits_BHLS = jnp.where(_visited(at, at.pattern), logits_BHLS, MASKED_LOGIT)
    return weigh_heads(at.shared, logits_BHLS, v_BSGK, at.view, at.deterministic)


def _visited(at: Attending, pattern: Pattern) -> Array:
    """Returns the pairs that a pattern visits among a cache's slots, bool [B, H or 1, L, S]."""
    known, view = at.predicate, at.view
    length = view.cache.slots if view.cache else view.rows.segment_BL.shape[1]
    layout_PNN = visited(pattern, at.num_heads, length, known.causal, known.prefix)
    query_BL, key_BS = view.rows.position_BL, view.source_rows.position_BL
    assert query_BL is not None
    assert key_BS is not None
    block_BL, block_BS = query_BL // pattern.block, key_BS // pattern.block
    return jnp.asarray(layout_PNN)[:, block_BL[..., None], block_BS[:, None]].swapaxes(0, 1)


def _sparse(at: Attending, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    shared, dropping = at.shared, None
    assert at.pattern is not None
    if at.view.rows is not at.view.source_rows:
        raise ValueError("a pattern needs self-attention")
    if at.drops and shared.broadcast_dropout:
        # Heads that share values drop different values.
        k_BSJ, v_BSJ = at.repeated(k_BSJ), at.repeated(v_BSJ)
        v_BSJ = at.drop_values(v_BSJ)
    elif at.drops:
        dropping = Dropping(shared.dropout_rate, at.module.make_rng("dropout"))
    mixed_BLHK = block_sparse_attention(
        *at.rotated(q_BLJ, k_BSJ),
        at.heads(v_BSJ),
        at.view.rows,
        at.predicate,
        at.pattern,
        at.view.positions.bias_HN,
        at.scale,
        tracing_device().softmax_dtype(shared.softmax_dtype, shared.dtype),
        dropping,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)


def _library(implementation: Any, at: Attending, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    q_BLHK, k_BSGK = at.rotated(q_BLJ, k_BSJ)
    bias_BHLS = None
    if at.view.positions.bias_HLS is not None:
        # JAX adds the bias after scaling the logits.
        scaled_HLS = at.view.positions.bias_HLS * at.scale
        bias_BHLS = scaled_HLS[None].astype(at.shared.dtype)
    mixed_BLHK = jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        at.heads(v_BSJ),
        bias=bias_BHLS,
        mask=at.view.mask_BLS[:, None],
        scale=at.scale,
        implementation=implementation,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)


def _fused(at: Attending, q_BLJ: Array, k_BSJ: Array | None, v_BSJ: Array | None) -> Array:
    """Calls the kernels on each device for that device's rows and heads."""
    device, relative = tracing_device(), at.view.positions.relative
    if k_BSJ is not None and v_BSJ is not None:
        groups = k_BSJ.shape[-1] // at.head_dim
        whole = device.is_gpu and groups % _dividing_heads() == 0
        k_BSJ, v_BSJ = _changed(at, k_BSJ, v_BSJ, whole)
        if at.angles is not None:
            q_BLJ = rotate_joined(q_BLJ, at.angles[0], at.head_dim, at.amplitude)
    visits, tables = None, None
    if at.pattern is not None:
        visits, tables = _tables(at, at.pattern, q_BLJ.shape[1])
    run: Callable[..., Array] = triton_attention
    if not device.is_gpu:
        memory, interpret = device.kernel_bytes, not device.is_tpu
        softcap = at.shared.attention_softcap
        run = partial(fused_attention, vmem_bytes=memory, interpret=interpret, softcap=softcap)
    run = partial(run, head_dim=at.head_dim, predicate=at.predicate, scale=at.scale)
    sides = [Rows(side.segment_BL, side.prefix_BL) for side in (at.view.rows, at.view.source_rows)]
    table_HR = None if relative is None else relative.table_HR

    def attend(*operands: Any) -> Array:
        *others, table_HR, tables = operands
        own = None if relative is None else relative._replace(table_HR=table_HR)
        layout = {} if visits is None else {"layout": (visits, tables)}
        return run(*others, relative=own, **layout)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        attend = _divided(attend, visits is not None and visits.by_group)
    return attend(q_BLJ, k_BSJ, v_BSJ, *sides, table_HR, tables)


def _changed(at: Attending, k_BSJ: Array, v_BSJ: Array, whole: bool) -> tuple[Array, Array]:
    """Returns rotated keys, and values with dropout; not repeated if the kernels take groups."""
    # Heads that share values drop different values.
    if not whole or at.drops:
        k_BSJ, v_BSJ = at.repeated(k_BSJ), at.repeated(v_BSJ)
    if at.drops:
        v_BSJ = at.drop_values(v_BSJ)
    if at.angles is not None:
        k_BSJ = rotate_joined(k_BSJ, at.angles[1], at.head_dim, at.amplitude)
    return k_BSJ, v_BSJ


def _tables(at: Attending, pattern: Pattern, length: int) -> Any:
    known, memory = at.predicate, tracing_device().kernel_bytes
    biased_dim = at.head_dim if at.view.positions.relative else None
    fits = partial(bias_fits, length, known.skips, biased_dim, memory)
    return tables_of(pattern, at.num_heads, at.head_dim, length, known, fits)


def _divided(attend: Callable[..., Array], by_group: bool) -> Callable[..., Array]:
    """Runs `attend` on each device for that device's rows and heads."""
    batch, heads = logical_to_mesh_axes(("batch", "joined_kv")) or (None, None)
    joined, rows = PartitionSpec(batch, None, heads), PartitionSpec(batch)
    of_tables = PartitionSpec(heads if by_group else None)
    return jax.shard_map(
        attend,
        in_specs=(joined, joined, joined, rows, rows, PartitionSpec(heads), of_tables),
        out_specs=joined,
        # Kernels do not declare the axes over which their results vary.
        check_vma=False,
    )


CORES: Mapping[str, Core] = MappingProxyType(
    {
        "cudnn": partial(_library, "cudnn"),
        "dot_product": partial(_library, "xla"),
        "einsum": _einsum,
        "pallas": _fused,
        "sparse": _sparse,
    }
)
