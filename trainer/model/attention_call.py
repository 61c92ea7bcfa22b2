"""One attention operation as the cores see it, and the cores that XLA and cuDNN compute.

Dimensions: B batch, L query length, S key length, H heads, G heads of keys and values, K head size,
J = H * K, C channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes
from jax import Array

from trainer.model.attention_cores import Core, Request, select
from trainer.model.dense import Built, Shared, tracing_device
from trainer.model.masks import Mask
from trainer.model.mixers import MASKED_LOGIT, View, compare_heads, split_heads, weigh_heads
from trainer.model.positions import rotate
from trainer.model.sparsity import Pattern, visited


class AttentionCall(NamedTuple):
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


def select_core(call: AttentionCall) -> Core:
    """Returns the core that computes an attention."""
    return select(call.shared.attention, _request(call))


def _request(call: AttentionCall) -> Request:
    shared, view = call.shared, call.view
    return Request(
        dtype=shared.dtype,
        num_heads=call.num_heads,
        head_dim=call.head_dim,
        device=tracing_device(),
        devices=devices_of_heads(),
        longest=max(side.segment_BL.shape[1] for side in (view.rows, view.source_rows)),
        weights=shared.attention_weights,
        masked=view.predicate is not None,
        capped=shared.attention_softcap is not None,
        by_distance=view.positions.bias_HLS is None or view.positions.relative is not None,
        added=call.added_logits is not None,
        watched=view.watches("weights_BHLS"),
        drops=call.drops,
        drops_by_query=call.drops and not shared.broadcast_dropout,
        pattern=call.pattern,
        cached=view.cache is not None,
        initial=call.module.is_initializing(),
    )


def devices_of_heads() -> int:
    """Returns the number of devices that share the heads of a row."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return 1
    (axis,) = logical_to_mesh_axes(("joined_kv",)) or (None,)
    return mesh.shape[axis] if isinstance(axis, str) else 1


def run_einsum(call: AttentionCall, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    q_BLHK, k_BSGK = call.rotated(q_BLJ, k_BSJ)
    v_BSGK = call.heads(v_BSJ)
    if call.view.cache is not None:
        k_BSGK, v_BSGK = call.view.cache.keys_and_values(call.module, k_BSGK, v_BSGK)
    logits_BHLS = compare_heads(q_BLHK, k_BSGK)
    if call.added_logits is not None:
        logits_BHLS += call.added_logits()
    if call.pattern is not None:
        logits_BHLS = jnp.where(_visited(call, call.pattern), logits_BHLS, MASKED_LOGIT)
    return weigh_heads(call.shared, logits_BHLS, v_BSGK, call.view, call.deterministic)


def _visited(call: AttentionCall, pattern: Pattern) -> Array:
    """Returns the pairs that a pattern visits among a cache's slots, bool [B, H or 1, L, S]."""
    known, view = call.predicate, call.view
    length = view.cache.slots if view.cache else view.rows.segment_BL.shape[1]
    layout_PNN = visited(pattern, call.num_heads, length, known.causal, known.prefix)
    query_BL, key_BS = view.rows.position_BL, view.source_rows.position_BL
    assert query_BL is not None
    assert key_BS is not None
    block_BL, block_BS = query_BL // pattern.block, key_BS // pattern.block
    return jnp.asarray(layout_PNN)[:, block_BL[..., None], block_BS[:, None]].swapaxes(0, 1)


def _library(
    implementation: Any, call: AttentionCall, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array
) -> Array:
    q_BLHK, k_BSGK = call.rotated(q_BLJ, k_BSJ)
    bias_BHLS = None
    if call.view.positions.bias_HLS is not None:
        # JAX adds the bias after scaling the logits.
        scaled_HLS = call.view.positions.bias_HLS * call.scale
        bias_BHLS = scaled_HLS[None].astype(call.shared.dtype)
    mixed_BLHK = jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        call.heads(v_BSJ),
        bias=bias_BHLS,
        mask=call.view.mask_BLS[:, None],
        scale=call.scale,
        implementation=implementation,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)


run_dot_product, run_cudnn = partial(_library, "xla"), partial(_library, "cudnn")
