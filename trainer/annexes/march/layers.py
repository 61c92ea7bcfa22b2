"""MARCH's parts for attention, residuals and feed-forward sublayers; and dynamic tanh, a norm.

Dimensions: B batch, L query length, M length after a layer, S key length, D model, H heads, K head
size, J = H * K, F mlp, N roles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.attention import DotProductAttention, MixedPart, self_attention
from trainer.model.dense import Buildable, Built, Dropout
from trainer.model.feedforward import FeedForward, drops_hidden
from trainer.model.masks import Rows
from trainer.model.norms import PRE_NORM, Function, Norm, NormPlacement, Placements
from trainer.model.parameters import KERNEL, SOURCE_KERNEL, TABLE, parameter
from trainer.model.spec import LayerSpec
from trainer.model.stack_parts import LayerHook, StackPart, Watched


@dataclass(frozen=True)
class DynamicTanh(Norm):
    """gain * tanh(alpha * x) + bias, with one learned alpha, initially `alpha`, for all channels.

    Source: Zhu et al. 2025 (arXiv:2503.10622), section 4; 0.5 from section 7.
    """

    alpha: float = 0.5
    gain = "vector"
    has_bias = True

    def run(self, module: Built, axis: str, x_BLD: Array) -> Array:
        ones, zeros, shape = nn.initializers.ones, nn.initializers.zeros, x_BLD.shape[-1:]
        start = nn.initializers.constant(self.alpha)
        alpha = parameter(module, TABLE, "alpha", start, ("unmodeled",), (1,))
        scale_D = parameter(module, TABLE, "scale", ones, (axis,), shape)
        bias_D = parameter(module, TABLE, "bias", zeros, (axis,), shape)
        out_BLD = jnp.tanh(alpha * x_BLD.astype(jnp.float32)) * scale_D + bias_D
        return out_BLD.astype(module.shared.dtype)


@dataclass(frozen=True)
class ValuesRelu(Buildable):
    """A ReLU feed-forward on values with `mlp_dim` hidden units; None means one square product.

    The square product itself is activated, and dropout acts on its input, not on hidden units.

    Source: "values_relu" and its "FirstFF" of MARCH (2023).
    """

    mlp_dim: int | None

    def run(self, module: Built, v_BSJ: Array, deterministic: bool) -> Array:
        shared, joined = module.shared, v_BSJ.shape[-1]
        start, dropout = shared.parametrisation.feed_forward(), shared.dropout()
        project = partial(shared.dense, initializer=start, bias=False, use=SOURCE_KERNEL)
        if self.mlp_dim is None:
            # A kernel cannot have one axis twice.
            product = project(joined, ("unmodeled", "joined_kv"), name="wi")
            return nn.relu(product(dropout(v_BSJ, deterministic)))
        hidden_BSF = nn.relu(project(self.mlp_dim, ("unmodeled", "mlp"), name="wi")(v_BSJ))
        hidden_BSF = dropout(hidden_BSF, deterministic)
        return project(joined, ("mlp", "unmodeled"), name="wo")(hidden_BSF)


@dataclass(frozen=True)
class Roles(MixedPart):
    """The element-wise product of mixed values and the querying position's role.

    A role is the position's projected state or, with `vectors`, the mean of that many learned unit
    vectors, weighted by a softmax of the projected mixed values.

    Source: "TPWeights" and "TPEmbeddings" of MARCH (2023), after Schlag et al. 2019
    (arXiv:1910.06611), section 3.2, for the product.
    """

    vectors: int = 0

    def run(self, module: Built, head_dim: int, mixed_BLJ: Array, x_BLD: Array) -> Array:
        shared, joined = module.shared, mixed_BLJ.shape[-1]
        start = shared.parametrisation.attention()
        if not self.vectors:
            axes = ("embed", "joined_kv")
            return mixed_BLJ * shared.dense(joined, axes, start, "role")(x_BLD)
        axes = ("joined_kv", "unmodeled")
        logits = shared.dense(self.vectors, axes, start, "role", float32_output=True)
        weights_BLN = jax.nn.softmax(logits(mixed_BLJ)).astype(shared.dtype)
        normal, axes = nn.initializers.normal(1.0), ("unmodeled", "joined_kv")
        vector_NJ = parameter(module, KERNEL, "vectors", normal, axes, (self.vectors, joined))
        vector_NJ = vector_NJ.astype(jnp.float32)
        # Zeros have no direction and stay zeros; their own length has no gradient there.
        known_NJ = jnp.where(jnp.any(vector_NJ, axis=-1, keepdims=True), vector_NJ, 1)
        vector_NJ /= jnp.linalg.norm(known_NJ, axis=-1, keepdims=True)
        return mixed_BLJ * jnp.einsum("bln,nj->blj", weights_BLN, vector_NJ.astype(shared.dtype))


@dataclass(frozen=True)
class SummedHeads(MixedPart):
    """Sums of `group` consecutive heads: [B, L, H * K / group].

    Values start with a smaller deviation, so that sums match the heads of other attention.

    Source: "big_heads_summed" of MARCH (2023).
    """

    group: int

    @property
    def value_deviation(self) -> float:
        return self.group**-0.5

    def run(self, module: Built, head_dim: int, mixed_BLJ: Array, x_BLD: Array) -> Array:
        batch, length, _ = mixed_BLJ.shape
        shape = (batch, length, -1, self.group, head_dim)
        return mixed_BLJ.reshape(shape).sum(axis=3).reshape(batch, length, -1)


def _without_residual(x_BLD: Array, norm: Function, sublayer: Function, dropout: Function) -> Array:
    return dropout(sublayer(norm(x_BLD)))


# Norms come before all sublayers; the mixer has no residual connection.
# Source: "sparse_seqlen" of MARCH (2023).
WITHOUT_MIXER_RESIDUAL = Placements(PRE_NORM, mixer=NormPlacement("pre", _without_residual))


def role_attention(config: Any, options: Any) -> DotProductAttention:
    return self_attention(config, mixed_part=Roles(options.vectors))


def summed_heads(config: Any, options: Any) -> DotProductAttention:
    return self_attention(config, mixed_part=SummedHeads(options.group))


def values_relu(config: Any, options: Any) -> DotProductAttention:
    part = ValuesRelu(config.mlp_dim if options.kernels == 2 else None)
    return self_attention(config, value_part=part)


@dataclass(frozen=True)
class Halves(StackPart):
    """A different number of heads in each half of a stack; the first is shorter if it is odd.

    Source: "scaling_heads" of MARCH (2023).
    """

    first: float = 1.0
    second: float = 1.0
    constant: bool = False

    def layer(self, layer: LayerSpec, index: int, count: int) -> LayerSpec:
        share = self.first if index < count // 2 else self.second
        hooks = tuple(self._with_scaled(hook, share) for hook in layer.hooks)
        mixer, cross_mixer = (
            self._scaled(each, share) for each in (layer.mixer, layer.cross_mixer)
        )
        return replace(layer, mixer=mixer, cross_mixer=cross_mixer, hooks=hooks)

    def _with_scaled(self, hook: Any, share: float) -> Any:
        if not hasattr(hook, "mixer"):
            return hook
        return replace(hook, mixer=self._scaled(hook.mixer, share))

    def _scaled(self, mixer: Any, share: float) -> Any:
        if mixer is None:
            return None
        heads = round(mixer.num_heads * share)
        width = mixer.num_heads * mixer.head_dim // heads if self.constant else mixer.head_dim
        return replace(mixer, num_heads=heads, head_dim=width)


def halves(config: Any, options: Any) -> StackPart:
    return Halves("halves", **vars(options))


@dataclass(frozen=True)
class MixedMlp(FeedForward):
    """(sigmoid(W0 x) + relu(W1 x)) / 2, projected back; without `mean` the sum is not halved.

    `sigmoid_dropout` is the dropout rate of the sigmoids before the sum; `dropout` drops hidden
    units after the sum, as in `Mlp`.

    Source: "mixed_act" of MARCH (2023).
    """

    mlp_dim: int
    mean: bool = True
    sigmoid_dropout: float = 0.0
    dropout: bool = True
    bias: bool | None = None

    def run(self, module: Built, x_BLD: Array, rows: Rows | None, deterministic: bool) -> Array:
        shared, parametrisation = module.shared, module.shared.parametrisation

        def project(name: str) -> Array:
            axes, start = ("embed", "mlp"), parametrisation.feed_forward()
            return shared.dense(self.mlp_dim, axes, start, name, bias=self.bias)(x_BLD)

        gate = Dropout(self.sigmoid_dropout, shared.broadcast_dropout)
        hidden_BLF = gate(nn.sigmoid(project("wi_0")), deterministic) + nn.relu(project("wi_1"))
        if self.mean:
            hidden_BLF /= 2
        if self.dropout:
            hidden_BLF = shared.dropout()(hidden_BLF, deterministic)
        axes, start = ("mlp", "embed"), parametrisation.feed_forward_out()
        return shared.dense(shared.emb_dim, axes, start, "wo", bias=self.bias)(hidden_BLF)


def mixed(config: Any, options: Any) -> MixedMlp:
    drops, bias = drops_hidden(config), config.value("mlp_bias")
    return MixedMlp(config.mlp_dim, options.mean, options.sigmoid_dropout, drops, bias)


@dataclass(frozen=True)
class TokenDropping(LayerHook):
    """Each layer of a stack drops `count` positions per row, after its mixer.

    A position's score is the sum of its attention weights over all heads and queries. Padding is
    dropped first, and later positions before earlier ones of equal score. A layer that would drop
    more than half of a row drops nothing. Order is kept. Packed examples compete for places.

    Source: "FCABS" of MARCH (2023). Differences: padding queries add no weights.
    """

    count: int
    watches = ("weights_BHLS",)

    def length_after(self, length: int) -> int:
        return length if 2 * self.count > length else length - self.count

    def kept(self, watched: Watched, rows: Rows) -> Array | None:
        """Returns the kept indices, or None if the row is too short to drop any."""
        kept_BM = self.most_watched(watched["weights_BHLS"], rows.segment_BL > 0)
        return None if kept_BM.shape == rows.segment_BL.shape else kept_BM

    def most_watched(self, weights_BHLL: Array, token_BL: Array) -> Array:
        """Returns the kept indices, int [B, M], ascending; `token_BL` is True at tokens."""
        mask_BL = token_BL.astype(jnp.float32)
        received_BL = jnp.einsum("bhls,bl->bs", weights_BHLL.astype(jnp.float32), mask_BL)
        worth_BL = jax.lax.stop_gradient(jnp.where(token_BL, received_BL, -1.0))
        _, index_BM = jax.lax.top_k(worth_BL, self.length_after(token_BL.shape[1]))
        return jnp.sort(index_BM, axis=1)


def dropping(config: Any, options: Any) -> StackPart:
    return StackPart("token_dropping", TokenDropping(options.count), encoder_only=True)
