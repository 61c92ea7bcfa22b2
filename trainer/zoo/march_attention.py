"""MARCH's changes of attention: of values, of heads, and of the residual.

Dimensions: B batch, L query length, S key length, D model, H heads, K head size, J = H * K, F mlp,
N roles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.attention import DotProductAttention, MixedPart, self_attention
from trainer.model.dense import Buildable, Built
from trainer.model.norms import PRE_NORM, Function, NormPlacement, Placements
from trainer.model.parameters import KERNEL, SOURCE_KERNEL, parameter
from trainer.model.spec import LayerSpec


@dataclass(frozen=True)
class ValuesRelu(Buildable):
    """A ReLU feed-forward on values with `mlp_dim` hidden units; None means one square product.

    The square product is itself activated, with dropout on its input instead of hidden units.

    Source: "values_relu" and its "FirstFF" of MARCH (2023).
    """

    mlp_dim: int | None

    def run(self, module: Built, v_BSJ: jax.Array, deterministic: bool) -> jax.Array:
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
    """The element-wise product of mixed values and a role of the querying position.

    A role is its projected state or, with `vectors`, the mean of that many learned unit vectors,
    weighted by a softmax of the projected mixed values.

    Source: "TPWeights" and "TPEmbeddings" of MARCH (2023), after Schlag et al. 2019
    (arXiv:1910.06611), section 3.2, for the product.
    """

    vectors: int = 0

    def run(
        self, module: Built, head_dim: int, mixed_BLJ: jax.Array, x_BLD: jax.Array
    ) -> jax.Array:
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
        vector_NJ /= jnp.linalg.norm(vector_NJ, axis=-1, keepdims=True)
        return mixed_BLJ * jnp.einsum("bln,nj->blj", weights_BLN, vector_NJ.astype(shared.dtype))


@dataclass(frozen=True)
class SummedHeads(MixedPart):
    """Sums of `group` consecutive heads: [B, L, H * K / group].

    Values start with a smaller deviation, so that sums match other attentions' heads.

    Source: "big_heads_summed" of MARCH (2023).
    """

    group: int

    @property
    def value_deviation(self) -> float:
        return self.group**-0.5

    def run(
        self, module: Built, head_dim: int, mixed_BLJ: jax.Array, x_BLD: jax.Array
    ) -> jax.Array:
        batch, length, _ = mixed_BLJ.shape
        shape = (batch, length, -1, self.group, head_dim)
        return mixed_BLJ.reshape(shape).sum(axis=3).reshape(batch, length, -1)


def _without_residual(
    x_BLD: jax.Array, norm: Function, sublayer: Function, dropout: Function
) -> jax.Array:
    return dropout(sublayer(norm(x_BLD)))


# Norms before all sublayers, with no residual around the mixer.
# Source: "sparse_seqlen" of MARCH (2023).
WITHOUT_MIXER_RESIDUAL = Placements(PRE_NORM, mixer=NormPlacement("pre", _without_residual))


def role_attention(config: Any, options: Any) -> DotProductAttention:
    """Returns attention with `Roles`."""
    return self_attention(config, mixed_part=Roles(options.vectors))


def summed_heads(config: Any, options: Any) -> DotProductAttention:
    """Returns attention with `SummedHeads`."""
    return self_attention(config, mixed_part=SummedHeads(options.group))


def values_relu(config: Any, options: Any) -> DotProductAttention:
    """Returns attention with `ValuesRelu`."""
    part = ValuesRelu(config.mlp_dim if options.kernels == 2 else None)
    return self_attention(config, value_part=part)


def halves(config: Any, options: Any, layer: LayerSpec, count: int) -> tuple[LayerSpec, ...]:
    """Returns copies of `layer`; each half of the stack has its own number of heads.

    The first half is shorter if `count` is odd.

    Source: "scaling_heads" of MARCH (2023).
    """

    def scaled_hook(hook: Any, share: float) -> Any:
        return replace(hook, mixer=scaled(hook.mixer, share)) if hasattr(hook, "mixer") else hook

    def scaled(mixer: Any, share: float) -> Any:
        if mixer is None:
            return None
        heads = round(mixer.num_heads * share)
        width = mixer.num_heads * mixer.head_dim // heads if options.constant else mixer.head_dim
        return replace(mixer, num_heads=heads, head_dim=width)

    def half(share: float) -> LayerSpec:
        hooks = tuple(scaled_hook(hook, share) for hook in layer.hooks)
        mixer, cross_mixer = (scaled(each, share) for each in (layer.mixer, layer.cross_mixer))
        return replace(layer, mixer=mixer, cross_mixer=cross_mixer, hooks=hooks)

    return (half(options.first),) * (count // 2) + (half(options.second),) * (count - count // 2)
