"""Mixers: sublayers through which positions exchange information.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.convolution import HeadConvolution
from trainer.model.dense import Shared, einsum_float32, sum_leading
from trainer.model.masks import Rows
from trainer.model.positions import Positions, rotate

if TYPE_CHECKING:
    from trainer.model.synthesizer import LearnedLogits

# What a masked logit becomes. Finite, so that a row which sees nothing (padding) gets uniform
# weights and zero gradients, not NaN; T5X's value.
MASKED_LOGIT = -1e10


@jax.custom_vjp
def add_bias(logits_BHLS: jax.Array, bias_HLS: jax.Array) -> jax.Array:
    """The sum; the gradient of the bias is summed by `sum_leading`."""
    return logits_BHLS + bias_HLS


def _add_bias_forward(logits_BHLS, bias_HLS):
    return logits_BHLS + bias_HLS, None


def _add_bias_backward(_, gradient_BHLS):
    return gradient_BHLS, sum_leading(gradient_BHLS, 1)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


class Mixer(Protocol):
    """The mixer slot.

    Its module maps (x_BLD, source_BSD, mask_BLS, positions, rows of both sides) to [B, L, D].
    `products_per_pair`: channels that are multiplied for each query and key.
    """

    @property
    def num_heads(self) -> int: ...
    @property
    def products_per_pair(self) -> int: ...

    def build(self, shared: Shared, name: str) -> nn.Module: ...


@dataclass(frozen=True)
class DotProductAttention:
    """Multi-head softmax attention; the parametrisation says how its logits are scaled.

    Positions, where the stack has them there, turn queries and keys or add to the logits before
    these are scaled. Logits and softmax are float32, the products' operands have the model's dtype.

    `convolution` runs over projected queries, keys and values, Primer's multi-dconv-head attention.
    With `shared_query_key` keys are what queries are projected from, by a kernel that mixes heads.
    `learned_logits` are added to the products, as in the Synthesizer's "random plus".

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; So et al. 2021 (arXiv:2109.08668).
    Differences: T5X computes logits and softmax in bfloat16 when the model is bfloat16.
    """

    num_heads: int
    head_dim: int
    convolution: HeadConvolution | None = None
    shared_query_key: bool = False
    learned_logits: LearnedLogits | None = None

    @property
    def products_per_pair(self) -> int:
        """Those of the logits and those of the mix."""
        return 2 * self.num_heads * self.head_dim

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
        mask_BLS: jax.Array,
        positions: Positions,
        rows: Rows,
        source_rows: Rows,
        deterministic: bool,
    ) -> jax.Array:
        spec, num_heads, head_dim = self.spec, self.spec.num_heads, self.spec.head_dim
        parametrisation = self.shared.parametrisation
        project = partial(self.shared.dense, num_heads * head_dim, ("embed", "joined_kv"))

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(*projected.shape[:2], num_heads, head_dim)

        def convolve(projected: jax.Array, name: str, rows: Rows) -> jax.Array:
            if spec.convolution is None:
                return projected
            return spec.convolution.build(self.shared, f"{name}_convolution")(projected, rows)

        query = project(parametrisation.query(head_dim), name="query")
        value = project(parametrisation.attention(), name="value")
        q_BLJ = convolve(query(x_BLD), "query", rows)
        if spec.shared_query_key:
            k_BSJ = q_BLJ
            axes, initializer = ("unmodeled", "joined_kv"), parametrisation.feed_forward()
            turn = self.shared.dense(num_heads * head_dim, axes, initializer, "query_from_key")
            q_BLJ = turn(k_BSJ)
        else:
            key = project(parametrisation.attention(), name="key")
            k_BSJ = convolve(key(source_BSD), "key", source_rows)
        v_BSHK = heads(convolve(value(source_BSD), "value", source_rows))
        q_BLHK, k_BSHK = heads(q_BLJ), heads(k_BSJ)
        if positions.angle_BLC is not None:
            q_BLHK = rotate(q_BLHK, positions.angle_BLC)
            k_BSHK = rotate(k_BSHK, positions.angle_BLC)

        if self.shared.attention != "einsum":
            # There the bias is added to logits that are scaled already.
            scale, bias_BHLS = parametrisation.attention_scale(head_dim), None
            if positions.bias_HLS is not None:
                bias_BHLS = (positions.bias_HLS * scale)[None].astype(self.shared.dtype)
            mixed_BLHK = jax.nn.dot_product_attention(
                q_BLHK,
                k_BSHK,
                v_BSHK,
                bias=bias_BHLS,
                mask=mask_BLS[:, None],
                scale=scale,
                implementation="cudnn" if self.shared.attention == "cudnn" else "xla",
            )
            return project_out(self.shared, mixed_BLHK)
        logits_BHLS = einsum_float32("blhk,bshk->bhls", q_BLHK, k_BSHK)
        if spec.learned_logits is not None:
            learned = spec.learned_logits.build(self.shared, num_heads, "learned_logits")
            logits_BHLS += learned(rows, source_rows)
        return mix_heads(self.shared, logits_BHLS, v_BSHK, mask_BLS, positions, deterministic)


def mix_heads(
    shared: Shared,
    logits_BHLS: jax.Array,
    v_BSHK: jax.Array,
    mask_BLS: jax.Array,
    positions: Positions,
    deterministic: bool,
) -> jax.Array:
    """The end of every attention, inside its module: values weighed by logits and projected."""
    if positions.bias_HLS is not None:
        logits_BHLS = add_bias(logits_BHLS, positions.bias_HLS)
    logits_BHLS *= shared.parametrisation.attention_scale(v_BSHK.shape[-1])
    logits_BHLS = jnp.where(mask_BLS[:, None], logits_BHLS, MASKED_LOGIT)
    weights_BHLS = jax.nn.softmax(logits_BHLS).astype(shared.dtype)
    weights_BHLS = shared.dropout()(weights_BHLS, deterministic)
    return project_out(shared, jnp.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK))


def project_out(shared: Shared, mixed_BLHK: jax.Array) -> jax.Array:
    """Heads side by side, projected, inside an attention's module: [B, L, H, K] to [B, L, D]."""
    axes, initializer = ("joined_kv", "embed"), shared.parametrisation.attention_out()
    out = shared.dense(shared.emb_dim, axes, initializer, "out")
    return out(mixed_BLHK.reshape(*mixed_BLHK.shape[:2], -1))
