"""The mixer slot, and functions that attention mixers share.

Dimensions: B batch, L query length, S key length, D model, H heads, G heads of keys and values,
R = H / G, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.cache import Cache
from trainer.model.dense import Shared, einsum_float32, softcapped, sum_leading, tracing_device
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.masks import Mask, Rows
from trainer.model.positions import Positions

# Masked logit, T5X's value. Finite, so that a row that sees nothing (padding) gets uniform weights
# and zero gradients instead of NaN.
MASKED_LOGIT = -1e10


@jax.custom_vjp
def add_bias(logits_BHLS: Array, bias_HLS: Array) -> Array:
    """Adds the bias; its gradient is summed by `sum_leading`."""
    return logits_BHLS + bias_HLS.astype(logits_BHLS.dtype)


def _add_bias_forward(logits_BHLS: Array, bias_HLS: Array) -> tuple[Array, Any]:
    return add_bias(logits_BHLS, bias_HLS), None


def _add_bias_backward(_: Any, gradient_BHLS: Array) -> tuple[Any, ...]:
    return gradient_BHLS, sum_leading(gradient_BHLS, 1)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


class View(NamedTuple):
    """The masks, positions and rows that a sublayer reads.

    `mask_BLS` is broadcastable bool, True where a query may see a key; `predicate` is the same mask
    for kernels, None if they do not support it. `watched` names arrays that attention stores there
    for other parts: `weights_BHLS` before dropout, `key_BSJ` before rotation, `value_BSJ`. `cache`
    is set if the mixer caches these positions.
    """

    mask_BLS: Array
    positions: Positions
    rows: Rows
    source_rows: Rows
    predicate: Mask | None = None
    watched: dict[str, Array | None] | None = None
    cache: Cache | None = None

    def watches(self, name: str) -> bool:
        return self.watched is not None and name in self.watched

    def watch(self, **arrays: Array) -> None:
        for name in filter(self.watches, arrays):
            assert self.watched is not None
            self.watched[name] = arrays[name]


class Mixer(Protocol):
    """The mixer slot: a sublayer through which positions exchange information.

    Its module maps (x_BLD, source_BSD, view, deterministic) to [B, L, D]; `source_BSD` is `x_BLD`
    except in cross attention. It creates parameters with `parameters.parameter`, which records
    FLOPs and weight decay. `num_heads` is the number of heads for which relative positions make
    biases; `products_per_pair` is the number of channels multiplied per query-key pair.
    """

    @property
    def num_heads(self) -> int: ...
    @property
    def products_per_pair(self) -> int: ...

    def build(self, shared: Shared, name: str) -> nn.Module: ...


def split_heads(joined: Array, head_dim: int) -> Array:
    """Maps [B, L, H * K] to [B, L, H, K]."""
    return joined.reshape(*joined.shape[:2], -1, head_dim)


def compare_heads(q_BLHK: Array, k_BSGK: Array) -> Array:
    """Returns query-key products, float32 [B, H, L, S].

    Each key head serves H / G consecutive query heads.
    """
    if q_BLHK.shape[2] == k_BSGK.shape[2]:
        return einsum_float32("blhk,bshk->bhls", q_BLHK, k_BSGK)
    batch, length, heads, _ = q_BLHK.shape
    q_BLGRK = q_BLHK.reshape(batch, length, k_BSGK.shape[2], -1, q_BLHK.shape[-1])
    logits_BGRLS = einsum_float32("blgrk,bsgk->bgrls", q_BLGRK, k_BSGK)
    return logits_BGRLS.reshape(batch, heads, length, -1)


def _weighted(weights_BHLS: Array, v_BSGK: Array) -> Array:
    """Returns weighted values, [B, L, H, K]; value heads are shared like key heads."""
    if weights_BHLS.shape[1] == v_BSGK.shape[2]:
        return jnp.einsum("bhls,bshk->blhk", weights_BHLS, v_BSGK)
    batch, heads, length, sources = weights_BHLS.shape
    weights_BGRLS = weights_BHLS.reshape(batch, v_BSGK.shape[2], -1, length, sources)
    mixed_BLGRK = jnp.einsum("bgrls,bsgk->blgrk", weights_BGRLS, v_BSGK)
    return mixed_BLGRK.reshape(batch, length, heads, -1)


def _softmax(logits_BHLS: Array, mask_B1LS: Array) -> Array:
    return jax.nn.softmax(jnp.where(mask_B1LS, logits_BHLS, MASKED_LOGIT))


def _positive(
    function: Callable[[Array], Array], normalised: bool
) -> Callable[[Array, Array], Array]:
    """Makes weights from a nonnegative function: divided by their sum or by the visible keys."""

    def weigh(logits_BHLS: Array, mask_B1LS: Array) -> Array:
        weights_BHLS = jnp.where(mask_B1LS, function(logits_BHLS), 0)
        if normalised:
            total_BHL1 = jnp.sum(weights_BHLS, axis=-1, keepdims=True)
            return weights_BHLS / (total_BHL1 + _LEAST_SUM)
        seen_B1L1 = jnp.sum(mask_B1LS, axis=-1, keepdims=True)
        return weights_BHLS / jnp.maximum(seen_B1L1, 1).astype(weights_BHLS.dtype)

    return weigh


def _elu(x: Array) -> Array:
    return jax.nn.elu(x) + 1


# Avoids division by 0 if all weights are 0.
_LEAST_SUM = 1e-6

# Weights [B, H, L, S] from logits and mask.
# Source: Hua et al. 2022 (arXiv:2202.10447) for squared ReLU; Katharopoulos et al. 2020
# (arXiv:2006.16236) for elu + 1; Lingle 2024 (arXiv:2404.05728), appendix, for both in muP.
# Differences: Lingle divides by row length, on which packed examples must not depend.
WEIGHTS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "softmax": _softmax,
        "elu": _positive(_elu, normalised=False),
        "squared_relu": _positive(ACTIVATIONS["squared_relu"], normalised=False),
        "norm_elu": _positive(_elu, normalised=True),
        "norm_squared_relu": _positive(ACTIVATIONS["squared_relu"], normalised=True),
    }
)


def weigh_heads(
    shared: Shared, logits_BHLS: Array, v_BSGK: Array, view: View, deterministic: bool
) -> Array:
    """Returns values [B, S, G, K] weighted by logits, with heads joined: [B, L, H * K].

    Called inside an attention's module. Adds the relative bias and masks the logits, in
    `Shared.softmax_dtype`.
    """
    dtype = tracing_device().softmax_dtype(shared.softmax_dtype, shared.dtype)
    logits_BHLS = logits_BHLS.astype(dtype)
    if view.positions.bias_HLS is not None:
        logits_BHLS = add_bias(logits_BHLS, view.positions.bias_HLS)
    if view.positions.bias_BHLS is not None:
        logits_BHLS += view.positions.bias_BHLS.astype(dtype)
    logits_BHLS *= shared.parametrisation.attention_scale(v_BSGK.shape[-1])
    logits_BHLS = softcapped(logits_BHLS, shared.attention_softcap)
    weigh = WEIGHTS[shared.attention_weights]
    weights_BHLS = weigh(logits_BHLS, view.mask_BLS[:, None]).astype(shared.dtype)
    view.watch(weights_BHLS=weights_BHLS)
    weights_BHLS = shared.dropout()(weights_BHLS, deterministic)
    mixed_BLHK = _weighted(weights_BHLS, v_BSGK)
    return mixed_BLHK.reshape(*mixed_BLHK.shape[:2], -1)


def mix_heads(
    shared: Shared, logits_BHLS: Array, v_BSGK: Array, view: View, deterministic: bool
) -> Array:
    """Returns the output projection of `weigh_heads`, [B, L, D]."""
    return project_out(shared, weigh_heads(shared, logits_BHLS, v_BSGK, view, deterministic))


def project_out(shared: Shared, mixed_BLJ: Array) -> Array:
    """Projects joined heads [B, L, H * K] to [B, L, D], inside an attention's module."""
    axes, initializer = ("joined_kv", "embed"), shared.parametrisation.attention_out()
    out = shared.dense(shared.emb_dim, axes, initializer, "out", bias=shared.out_bias)
    return out(mixed_BLJ)
