"""Softmax attention that computes only the blocks of a layout.

Plain JAX for every device. Query blocks that visit similar numbers of key blocks form a group;
each gathers its blocks' keys and values, and one softmax runs over all of them. Time and memory
follow the layout's density. The backward pass gathers again; only the weights are kept for it.

Dimensions: B batch, L length, H query heads, G key heads, R = H / G, K head size, N blocks, n query
blocks of a group, M visited blocks, q and k tokens of a block, s = M * k, P heads with their own
layouts (1 if all share one), T block distances, C token distances.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from trainer.annexes.sparse_patterns.groups import Group, groups_of
from trainer.model.dense import einsum_float32
from trainer.model.masks import Mask, Rows
from trainer.model.mixers import MASKED_LOGIT, add_bias
from trainer.model.positions import spread_diagonals
from trainer.model.sparsity import Pattern, visited

_WEIGHTS = "block_sparse_weights"


class Dropping(NamedTuple):
    """The rate and random key with which each query drops weights."""

    rate: float
    key: Array


def block_sparse_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    rows: Rows,
    predicate: Mask,
    pattern: Pattern,
    bias_HC: Array | None = None,
    scale: float = 1.0,
    softmax_dtype: str = "float32",
    dropping: Dropping | None = None,
) -> Array:
    """Returns values weighted by `softmax((q k + bias) * scale)` over visited keys: [B, L, H, K].

    The result has the values' dtype. A query that sees no key gets zeros. `rows` describes
    queries and keys. `bias_HC` is indexed by distance from key to query, 1 - L to L - 1. `dropping`
    is set if each query drops its own weights.
    """
    length, num_heads, num_sources = q_BLHK.shape[1], q_BLHK.shape[2], k_BLGK.shape[2]
    predicate = predicate.on(rows)
    layout_PNN = visited(pattern, num_heads, length, predicate.causal, predicate.prefix)
    if len(layout_PNN) > 1 and num_sources != num_heads:
        k_BLGK, v_BLGK = (jnp.repeat(x, num_heads // num_sources, 2) for x in (k_BLGK, v_BLGK))
    cut = partial(_cut, block=pattern.block)

    def blocks(x_BLHK: Array) -> Array:
        """Returns [B, H, N, q, K], with contracted axes last."""
        return cut(x_BLHK).transpose(0, 3, 1, 2, 4)

    ids = [rows.segment_BL]
    if predicate.prefix:
        assert rows.prefix_BL is not None
        # These ids are above 0 only in a prefix.
        ids.append(jnp.where(rows.prefix_BL > 0, rows.segment_BL, 0))
    rate = dropping.rate if dropping else 0.0
    keep = jax.checkpoint_policies.save_only_these_names(_WEIGHTS)
    operands = blocks(q_BLHK), blocks(k_BLGK), blocks(v_BLGK), [cut(each) for each in ids]
    groups, mixed = groups_of(layout_PNN), []
    for number, group in enumerate(groups):
        tiles = None if bias_HC is None else _tiles(group, bias_HC, length, pattern.block)
        key = jax.random.fold_in(dropping.key, number) if dropping else None
        run = partial(_attend, group, predicate.causal, scale, softmax_dtype, rate)
        attend: Callable[..., Array] = jax.checkpoint(run, policy=keep)
        mixed.append(attend(*operands, tiles, key))
    order_N = np.argsort(np.concatenate([group.query_n for group in groups]))
    mixed_BHNqK = mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, 2)[:, :, order_N]
    mixed_BNqHK = mixed_BHNqK.transpose(0, 2, 3, 1, 4)
    return mixed_BNqHK.reshape(len(q_BLHK), -1, *q_BLHK.shape[2:])[:, :length]


def _cut(x_BL: Array, block: int) -> Array:
    """Reshapes [B, L, ...] to [B, N, block, ...], with zeros after the end."""
    missing = -x_BL.shape[1] % block
    x_BL = jnp.pad(x_BL, ((0, 0), (0, missing), *((0, 0),) * (x_BL.ndim - 2)))
    return x_BL.reshape(len(x_BL), -1, block, *x_BL.shape[2:])


def _visit(x_BGNkK: Array, key_PnM: np.ndarray) -> Array:
    """Concatenates the visited blocks to [B, G, n, s, ...]."""
    if len(key_PnM) == 1:
        x_BGnMkK = x_BGNkK[:, :, key_PnM[0]]
    else:
        take: Any = jax.vmap(lambda x_BNkK, key_nM: x_BNkK[:, key_nM], (1, 0), 1)
        x_BGnMkK = take(x_BGNkK, key_PnM)
    return x_BGnMkK.reshape(*x_BGnMkK.shape[:3], -1, *x_BGnMkK.shape[5:])


def _attend(
    group: Group,
    causal: bool,
    scale: float,
    softmax_dtype: str,
    rate: float,
    q_BHNqK: Array,
    k_BGNkK: Array,
    v_BGNkK: Array,
    ids: list[Array],
    bias: tuple[Array, Array] | None,
    key: Array | None,
) -> Array:
    """Returns the attention output of one group of query blocks, [B, H, n, q, K]."""
    query_n, key_PnM, real_PnM = group
    batch, num_heads, _, block, _ = q_BHNqK.shape
    q_BHnqK = q_BHNqK[:, :, query_n]
    q_BGRnqK = q_BHnqK.reshape(batch, k_BGNkK.shape[1], -1, *q_BHnqK.shape[2:])
    k_BGnsK, v_BGnsK = _visit(k_BGNkK, key_PnM), _visit(v_BGNkK, key_PnM)

    def equal(ids_BNk: Array) -> Array:
        """Returns True where a key has the query's nonzero id: [B, P, n, q, s]."""
        queries_BnQ = ids_BNk[:, query_n]
        keys_BPnMk = ids_BNk[:, key_PnM]
        keys_BPns = keys_BPnMk.reshape(*keys_BPnMk.shape[:3], -1)[:, :, :, None]
        return (queries_BnQ[:, None, :, :, None] == keys_BPns) & (keys_BPns > 0)

    visible_BPnqs = equal(ids[0])
    if causal:
        token_k = jnp.arange(block)
        key_PnMk = jnp.where(real_PnM, key_PnM, 0)[..., None] * block + token_k
        query_nq = jnp.asarray(query_n)[:, None] * block + token_k
        key_Pns = key_PnMk.reshape(*key_PnMk.shape[:2], -1)
        visible_BPnqs &= key_Pns[:, :, None] <= query_nq[..., None]
    if len(ids) > 1:
        visible_BPnqs |= equal(ids[1])
    if not real_PnM.all():
        visible_BPnqs &= jnp.repeat(jnp.asarray(real_PnM), block, axis=2)[:, :, None]
    visible = visible_BPnqs[:, :, None]

    logits_BGRnqs = einsum_float32("bgrnqc,bgnsc->bgrnqs", q_BGRnqK, k_BGnsK).astype(softmax_dtype)
    if bias is not None:
        bias_GRnqs = _bias_of(group, *bias).reshape(logits_BGRnqs.shape[1:])
        logits_BGRnqs = add_bias(logits_BGRnqs, bias_GRnqs)
    logits_BGRnqs = jnp.where(visible, logits_BGRnqs * scale, MASKED_LOGIT)
    weights = jnp.where(visible, jax.nn.softmax(logits_BGRnqs), 0).astype(v_BGNkK.dtype)
    weights = checkpoint_name(weights, _WEIGHTS)
    if key is not None:
        kept = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - rate), 0)
    mixed_BGRnqK = jnp.einsum("bgrnqs,bgnsc->bgrnqc", weights, v_BGnsK)
    return mixed_BGRnqK.reshape(batch, num_heads, *mixed_BGRnqK.shape[3:])


def _tiles(group: Group, bias_HC: Array, length: int, block: int) -> tuple[Array, Array]:
    """Returns each bias tile's index, int32 [P, n, M]; and a tile per distance, [H, T, q, k]."""
    distance_PnM = np.where(group.real_PnM, group.key_PnM - group.query_n[:, None], 0)
    distance_T, tile = np.unique(distance_PnM, return_inverse=True)
    # Tokens in partly empty blocks can be farther apart than any two tokens in a row.
    bias_HC = jnp.pad(bias_HC, ((0, 0), (block, block)))
    first_T = distance_T * block - (block - 1) + (length - 1) + block
    vector_HTC = bias_HC[:, first_T[:, None] + np.arange(2 * block - 1)]
    tiles = spread_diagonals(vector_HTC.reshape(-1, 2 * block - 1), block)
    tiles_HTqk = tiles.reshape(len(bias_HC), len(distance_T), block, block)
    return jnp.asarray(tile.reshape(distance_PnM.shape), jnp.int32), tiles_HTqk


def _bias_of(group: Group, tile_PnM: Array, tiles_HTqk: Array) -> Array:
    if len(group.key_PnM) == 1:
        bias_HnMqk = tiles_HTqk[:, tile_PnM[0]]
    else:
        bias_HnMqk = jax.vmap(lambda tiles_Tqk, tile_nM: tiles_Tqk[tile_nM])(tiles_HTqk, tile_PnM)
    bias_HnqMk = bias_HnMqk.swapaxes(2, 3)
    return bias_HnqMk.reshape(*bias_HnqMk.shape[:3], -1)
