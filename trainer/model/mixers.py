"""The mixer slot, and what attention mixers share.

Dimensions: B batch, L query length, S key length, D model, H heads, G heads of keys and values,
R = H / G, K head size.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared, device_kind, einsum_float32, sum_leading
from trainer.model.facts import MixerFacts, softmax_dtype_on
from trainer.model.masks import Predicate, Rows
from trainer.model.positions import Positions

# Value of a masked logit. Finite, so that a row which sees nothing (padding) gets uniform weights
# and zero gradients instead of NaN. T5X's value.
MASKED_LOGIT = -1e10


@jax.custom_vjp
def add_bias(logits_BHLS: jax.Array, bias_HLS: jax.Array) -> jax.Array:
    """Returns the sum; the gradient of the bias is summed by `sum_leading`."""
    return logits_BHLS + bias_HLS.astype(logits_BHLS.dtype)


def _add_bias_forward(logits_BHLS, bias_HLS):
    return add_bias(logits_BHLS, bias_HLS), None


def _add_bias_backward(_, gradient_BHLS):
    return gradient_BHLS, sum_leading(gradient_BHLS, 1)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


class View(NamedTuple):
    """The masks, positions and rows that a sublayer reads.

    Attributes:
      mask_BLS: bool, True where a query may look at a key; broadcastable to [B, L, S].
      positions: effects of positions on queries, keys and logits.
      rows: facts about the positions that look.
      source_rows: facts about the positions that are looked at.
      predicate: the mask, as kernels compute it; None if they do not know it.
    """

    mask_BLS: jax.Array
    positions: Positions
    rows: Rows
    source_rows: Rows
    predicate: Predicate | None = None


class Mixer(Protocol):
    """The mixer slot: a sublayer through which positions exchange information.

    Its module maps (x_BLD, source_BSD, view, deterministic) to [B, L, D]; `source_BSD` is `x_BLD`
    except in cross attention. It draws its parameters by `parameters.parameter`, which records how
    FLOPs are counted and where weight decay applies.

    Attributes:
      num_heads: heads for which relative positions make biases.
      products_per_pair: channels multiplied for each pair of query and key.
      facts: what configuration and export need to know.
    """

    @property
    def num_heads(self) -> int: ...
    @property
    def products_per_pair(self) -> int: ...
    @property
    def facts(self) -> MixerFacts: ...

    def build(self, shared: Shared, name: str) -> nn.Module: ...


def compare_heads(q_BLHK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
    """Returns the products of queries and keys, float32 [B, H, L, S].

    Each of the G heads of keys serves H / G heads of queries, one after the other.
    """
    if q_BLHK.shape[2] == k_BSGK.shape[2]:
        return einsum_float32("blhk,bshk->bhls", q_BLHK, k_BSGK)
    batch, length, heads, _ = q_BLHK.shape
    q_BLGRK = q_BLHK.reshape(batch, length, k_BSGK.shape[2], -1, q_BLHK.shape[-1])
    logits_BGRLS = einsum_float32("blgrk,bsgk->bgrls", q_BLGRK, k_BSGK)
    return logits_BGRLS.reshape(batch, heads, length, -1)


def _weigh_heads(weights_BHLS: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """Returns values weighted, [B, L, H, K]; heads of values are shared as those of keys."""
    if weights_BHLS.shape[1] == v_BSGK.shape[2]:
        return jnp.einsum("bhls,bshk->blhk", weights_BHLS, v_BSGK)
    batch, heads, length, sources = weights_BHLS.shape
    weights_BGRLS = weights_BHLS.reshape(batch, v_BSGK.shape[2], -1, length, sources)
    mixed_BLGRK = jnp.einsum("bgrls,bsgk->blgrk", weights_BGRLS, v_BSGK)
    return mixed_BLGRK.reshape(batch, length, heads, -1)


def mix_heads(
    shared: Shared,
    logits_BHLS: jax.Array,
    v_BSGK: jax.Array,
    view: View,
    deterministic: bool,
) -> jax.Array:
    """Returns values [B, S, G, K] weighted by logits and projected: [B, L, D].

    The last step of every attention, called inside its module. Adds the bias of relative positions
    and masks the logits. All this has the type that `Shared.softmax_dtype` says.
    """
    dtype = softmax_dtype_on(device_kind(), shared.softmax_dtype, shared.dtype)
    logits_BHLS = logits_BHLS.astype(dtype)
    if view.positions.bias_HLS is not None:
        logits_BHLS = add_bias(logits_BHLS, view.positions.bias_HLS)
    logits_BHLS *= shared.parametrisation.attention_scale(v_BSGK.shape[-1])
    logits_BHLS = jnp.where(view.mask_BLS[:, None], logits_BHLS, MASKED_LOGIT)
    weights_BHLS = jax.nn.softmax(logits_BHLS).astype(shared.dtype)
    weights_BHLS = shared.dropout()(weights_BHLS, deterministic)
    mixed_BLHK = _weigh_heads(weights_BHLS, v_BSGK)
    return project_out(shared, mixed_BLHK.reshape(*mixed_BLHK.shape[:2], -1))


def project_out(shared: Shared, mixed_BLJ: jax.Array) -> jax.Array:
    """Returns the joined heads projected, [B, L, H * K] to [B, L, D].

    Called inside an attention's module.
    """
    axes, initializer = ("joined_kv", "embed"), shared.parametrisation.attention_out()
    out = shared.dense(shared.emb_dim, axes, initializer, "out")
    return out(mixed_BLJ)
