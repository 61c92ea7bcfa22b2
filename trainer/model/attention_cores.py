"""Attention cores: interchangeable computations of attention from queries, keys and values.

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
from flax import linen as nn
from jax.sharding import PartitionSpec

from trainer.model.dense import Shared, tracing_device
from trainer.model.device import LANES, fills_tiles
from trainer.model.fused_attention import fits_memory, fused_attention
from trainer.model.fused_sparsity import tables_of
from trainer.model.fused_tiles import bias_fits
from trainer.model.masks import Predicate, Rows
from trainer.model.mixers import MASKED_LOGIT, View, compare_heads, weigh_heads
from trainer.model.positions import rotate, rotate_joined
from trainer.model.sparse_attention import Dropping, block_sparse_attention
from trainer.model.sparsity import Pattern, visited


class Attending(NamedTuple):
    """An attention as its cores see it.

    `module` keeps the cache and draws dropout. `pattern` is None if all keys are visible.
    `added_logits` are added to the products; only einsum supports them.
    """

    module: nn.Module
    shared: Shared
    num_heads: int
    head_dim: int
    pattern: Pattern | None
    added_logits: Callable[[View], jax.Array] | None
    deterministic: bool

    @property
    def drops(self) -> bool:
        return not self.deterministic and self.shared.dropout_rate > 0

    @property
    def scale(self) -> float:
        return self.shared.parametrisation.attention_scale(self.head_dim)

    def heads(self, joined: jax.Array) -> jax.Array:
        return joined.reshape(*joined.shape[:2], -1, self.head_dim)

    def repeated(self, joined: jax.Array) -> jax.Array:
        """Returns keys or values with one head per query head."""
        heads = self.heads(joined)
        if heads.shape[2] == self.num_heads:
            return joined
        heads = jnp.repeat(heads, self.num_heads // heads.shape[2], axis=2)
        return heads.reshape(*joined.shape[:2], -1)


# Maps queries [B, L, J], keys and values [B, S, G * K], not yet rotated, to mixed values [B, L, J].
Core = Callable[[Attending, jax.Array, jax.Array, jax.Array, View], jax.Array]


def choose(attending: Attending, view: View) -> str:
    """Returns the name of the core for an attention, a key of CORES."""
    if view.cache is not None:
        return "cached"
    shared, pattern = attending.shared, attending.pattern
    device = tracing_device()
    name = device.attention(shared.attention, shared.dtype, attending.head_dim)
    if name == "pallas":
        longest = max(side.segment_BL.shape[1] for side in (view.rows, view.source_rows))
        fits = (
            view.predicate is not None
            and not view.watches("weights_BHLS")
            and attending.added_logits is None
            and shared.attention_weights == "softmax"
            and (pattern is None or _tiles(attending, pattern))
            # Kernels look biases up in a table of buckets.
            and (view.positions.bias_HLS is None or view.positions.relative is not None)
            and (shared.broadcast_dropout or not attending.drops)
            and fits_memory(longest, device.kernel_bytes)
            # Initialisation traces the model on one token, for any device.
            and not attending.module.is_initializing()
        )
        name = name if fits else "einsum"
    return "sparse" if pattern is not None and name != "pallas" else name


def _tiles(attending: Attending, pattern: Pattern) -> bool:
    """Returns whether kernels can compute a pattern: each device needs whole groups of heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if not fills_tiles(pattern.block):
        return False
    if mesh.empty or mesh.size == 1:
        return True
    (axis,) = nn.logical_to_mesh_axes(("joined_kv",)) or (None,)
    devices = mesh.shape[axis] if isinstance(axis, str) else 1
    return devices == 1 or attending.num_heads * attending.head_dim % (devices * LANES) == 0


def _angles(view: View) -> tuple[jax.Array, jax.Array] | None:
    angle_BLC, source_angle_BSC = view.positions.angle_BLC, view.positions.source_angle_BSC
    if angle_BLC is None:
        return None
    return angle_BLC, angle_BLC if source_angle_BSC is None else source_angle_BSC


def _rotated(
    attending: Attending, q_BLJ: jax.Array, k_BSJ: jax.Array, view: View
) -> tuple[jax.Array, jax.Array]:
    q_BLHK, k_BSGK = attending.heads(q_BLJ), attending.heads(k_BSJ)
    if (angles := _angles(view)) is not None:
        q_BLHK, k_BSGK = rotate(q_BLHK, angles[0]), rotate(k_BSGK, angles[1])
    return q_BLHK, k_BSGK


def _drop_values(attending: Attending, v_BSJ: jax.Array) -> jax.Array:
    """Returns values [B, S, J] with dropout per head and key.

    All queries share a draw, so dropping values equals dropping weights.
    """
    shared = attending.shared
    ones_BH1S = jnp.ones((len(v_BSJ), attending.num_heads, 1, v_BSJ.shape[1]), v_BSJ.dtype)
    kept_BSH = shared.dropout()(ones_BH1S, False)[:, :, 0].swapaxes(1, 2)
    # Divided like weights, not multiplied by a rounded inverse.
    scaled_BSJ = v_BSJ / (1.0 - shared.dropout_rate)
    return jnp.where(jnp.repeat(kept_BSH > 0, attending.head_dim, axis=2), scaled_BSJ, 0)


def _einsum(
    attending: Attending, q_BLJ: jax.Array, k_BSJ: jax.Array, v_BSJ: jax.Array, view: View
) -> jax.Array:
    q_BLHK, k_BSGK = _rotated(attending, q_BLJ, k_BSJ, view)
    return _weighed(attending, q_BLHK, k_BSGK, attending.heads(v_BSJ), view)


def _cached(
    attending: Attending, q_BLJ: jax.Array, k_BSJ: jax.Array, v_BSJ: jax.Array, view: View
) -> jax.Array:
    assert view.cache is not None
    q_BLHK, k_BSGK = _rotated(attending, q_BLJ, k_BSJ, view)
    kept = view.cache.keys_and_values(attending.module, k_BSGK, attending.heads(v_BSJ))
    return _weighed(attending, q_BLHK, *kept, view)


def _weighed(
    attending: Attending, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, view: View
) -> jax.Array:
    logits_BHLS = compare_heads(q_BLHK, k_BSGK)
    if attending.added_logits is not None:
        logits_BHLS += attending.added_logits(view)
    if attending.pattern is not None:
        visited_BHLS = _visited(attending, attending.pattern, view)
        logits_BHLS = jnp.where(visited_BHLS, logits_BHLS, MASKED_LOGIT)
    return weigh_heads(attending.shared, logits_BHLS, v_BSGK, view, attending.deterministic)


def _visited(attending: Attending, pattern: Pattern, view: View) -> jax.Array:
    """Returns where a pattern visits pairs, bool [B, H or 1, L, S], for a cache's slots."""
    known = _known(view)
    length = view.cache.slots if view.cache else view.rows.segment_BL.shape[1]
    prefix = known.prefix and view.rows.prefix_BL is not None
    layout_PNN = visited(pattern, attending.num_heads, length, known.causal, prefix)
    query_BL, key_BS = view.rows.position_BL, view.source_rows.position_BL
    assert query_BL is not None
    assert key_BS is not None
    block_BL, block_BS = query_BL // pattern.block, key_BS // pattern.block
    return jnp.asarray(layout_PNN)[:, block_BL[..., None], block_BS[:, None]].swapaxes(0, 1)


def _known(view: View) -> Predicate:
    if view.predicate is None:
        raise ValueError("a pattern needs a mask that kernels know")
    return view.predicate


def _sparse(
    attending: Attending, q_BLJ: jax.Array, k_BSJ: jax.Array, v_BSJ: jax.Array, view: View
) -> jax.Array:
    shared, pattern, dropping = attending.shared, attending.pattern, None
    assert pattern is not None
    if view.rows is not view.source_rows:
        raise ValueError("a pattern needs self-attention")
    if attending.drops and shared.broadcast_dropout:
        # Heads that share values drop different ones.
        k_BSJ, v_BSJ = attending.repeated(k_BSJ), attending.repeated(v_BSJ)
        v_BSJ = _drop_values(attending, v_BSJ)
    elif attending.drops:
        dropping = Dropping(shared.dropout_rate, attending.module.make_rng("dropout"))
    mixed_BLHK = block_sparse_attention(
        *_rotated(attending, q_BLJ, k_BSJ, view),
        attending.heads(v_BSJ),
        view.rows,
        _known(view),
        pattern,
        view.positions.bias_HN,
        attending.scale,
        tracing_device().softmax_dtype(shared.softmax_dtype, shared.dtype),
        dropping,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)


def _library(
    implementation: Any,
    attending: Attending,
    q_BLJ: jax.Array,
    k_BSJ: jax.Array,
    v_BSJ: jax.Array,
    view: View,
) -> jax.Array:
    q_BLHK, k_BSGK = _rotated(attending, q_BLJ, k_BSJ, view)
    # JAX adds the bias after scaling the logits.
    bias_BHLS = None
    if view.positions.bias_HLS is not None:
        scaled_HLS = view.positions.bias_HLS * attending.scale
        bias_BHLS = scaled_HLS[None].astype(attending.shared.dtype)
    mixed_BLHK = jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        attending.heads(v_BSJ),
        bias=bias_BHLS,
        mask=view.mask_BLS[:, None],
        scale=attending.scale,
        implementation=implementation,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)


def _fused(
    attending: Attending, q_BLJ: jax.Array, k_BSJ: jax.Array, v_BSJ: jax.Array, view: View
) -> jax.Array:
    """Calls `fused_attention` on each device, for its own rows and heads."""
    k_BSJ, v_BSJ = attending.repeated(k_BSJ), attending.repeated(v_BSJ)
    if attending.drops:
        v_BSJ = _drop_values(attending, v_BSJ)
    if (angles := _angles(view)) is not None:
        q_BLJ = rotate_joined(q_BLJ, angles[0], attending.head_dim)
        k_BSJ = rotate_joined(k_BSJ, angles[1], attending.head_dim)
    device, relative = tracing_device(), view.positions.relative
    assert view.predicate is not None, "the table of cores chose another"
    visits, tables = None, None
    if attending.pattern is not None:
        visits, tables = _tables(attending, attending.pattern, q_BLJ.shape[1], view)
    run = partial(
        fused_attention,
        head_dim=attending.head_dim,
        predicate=view.predicate,
        scale=attending.scale,
        vmem_bytes=device.kernel_bytes,
        interpret=not device.is_tpu,
    )
    sides = [Rows(side.segment_BL, side.prefix_BL) for side in (view.rows, view.source_rows)]
    table_HR = None if relative is None else relative.table_HR

    def attend(*operands: Any) -> jax.Array:
        *others, table_HR, tables = operands
        own = None if relative is None else relative._replace(table_HR=table_HR)
        return run(*others, relative=own, layout=None if visits is None else (visits, tables))

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        attend = _divided(attend, visits is not None and visits.by_group)
    return attend(q_BLJ, k_BSJ, v_BSJ, *sides, table_HR, tables)


def _tables(attending: Attending, pattern: Pattern, length: int, view: View) -> Any:
    known = _known(view)
    known = known._replace(prefix=known.prefix and view.rows.prefix_BL is not None)
    biased_dim = attending.head_dim if view.positions.relative else None
    skips, memory = known.causal and not known.prefix, tracing_device().kernel_bytes
    fits = partial(bias_fits, length, skips, biased_dim, memory)
    return tables_of(pattern, attending.num_heads, attending.head_dim, length, known, fits)


def _divided(attend: Callable[..., jax.Array], by_group: bool) -> Callable[..., jax.Array]:
    """Runs `attend` on each device for its own rows and heads."""
    batch, heads = nn.logical_to_mesh_axes(("batch", "joined_kv")) or (None, None)
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
        "cached": _cached,
        "cudnn": partial(_library, "cudnn"),
        "dot_product": partial(_library, "xla"),
        "einsum": _einsum,
        "pallas": _fused,
        "sparse": _sparse,
    }
)
