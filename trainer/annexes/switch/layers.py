"""Switch layers: each token goes through one of several feed-forward sublayers.

Dimensions: B batch, L length, D model, E experts, G groups, S tokens of a group, C capacity,
P = E * C places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jax import Array
from jax.sharding import PartitionSpec

from trainer.model.dense import Built, Dense
from trainer.model.feedforward import FeedForward, Mlp, Sown, mlp, sow
from trainer.model.masks import Rows
from trainer.model.parameters import EXACT_KERNEL, EXPERT_AXIS
from trainer.model.part_facts import TRANSFORMERS

_SMALLEST_CAPACITY = 4
# Metric: the fraction of tokens whose expert was full.
DROPPED = "dropped_tokens"


@dataclass(frozen=True)
class Switch(FeedForward):
    """Several copies of `expert`, and a router that sends each token to the most probable copy.

    Tokens form groups in row order. In each group an expert takes up to `capacity(…)` tokens; the
    output for the rest is 0. With `row_capacity` a group is a row, whatever its length, and an
    expert takes up to so many of its tokens. In training the router's inputs are multiplied by
    U(1 - `jitter`, 1 + `jitter`). It sows the load-balancing loss, which includes padding.

    Source: Fedus et al. 2021 (arXiv:2101.03961), sections 2.1 and 2.2; Mesh TensorFlow, `moe.py`,
    for groups, capacity, and padding, which uses no capacity but counts in the auxiliary loss.
    Differences: upstream's groups depend on the number of devices; here all meshes update alike.
    """

    expert: Mlp
    num_experts: int
    capacity_factor: float = 1.25
    evaluation_capacity_factor: float = 2.0
    jitter: float = 0.01
    auxiliary_weight: float = 0.01
    largest_group: int = 1024
    row_capacity: int | None = None
    sows = (DROPPED,)
    exports = (TRANSFORMERS,)

    @property
    def activations(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.expert.activations

    def decoding(self, in_decoder: bool) -> Switch:
        """Returns the same layer with capacity for every token.

        With less capacity, whether a token finds its expert full would depend on other rows; a
        capacity for each row stays in the encoder.
        """
        row_capacity = None if in_decoder else self.row_capacity
        factor = float(self.num_experts)
        return replace(self, evaluation_capacity_factor=factor, row_capacity=row_capacity)

    def group_size(self, tokens: int) -> int:
        sizes = range(min(self.largest_group, tokens), 0, -1)
        return next(size for size in sizes if tokens % size == 0)

    def capacity(self, group: int, training: bool) -> int:
        """Returns the maximum number of a group's tokens per expert."""
        if self.row_capacity is not None:
            return min(self.row_capacity, group)
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        room = min(group, math.floor(group * factor / self.num_experts))
        return max(_SMALLEST_CAPACITY, room)

    def run(self, module: Built, x_BLD: Array, rows: Rows, deterministic: bool) -> Array:
        (batch, length, _), dtype = x_BLD.shape, module.shared.dtype
        group = self.group_size(batch * length) if self.row_capacity is None else length
        token_GS = (rows.segment_BL > 0).reshape(-1, group)
        x_GSD = x_BLD.reshape(-1, group, x_BLD.shape[-1]) * token_GS[..., None].astype(dtype)

        probability_GSE = self._probabilities(module, x_GSD, deterministic)
        expert_GS = jnp.argmax(probability_GSE, axis=-1)
        choice_GSE = jax.nn.one_hot(expert_GS, self.num_experts)

        taken_GSE = choice_GSE * token_GS[..., None]
        slot_GS = jnp.sum((jnp.cumsum(taken_GSE, axis=1) - 1) * taken_GSE, axis=-1)
        capacity = self.capacity(group, training=not deterministic)
        kept_GS = token_GS & (slot_GS < capacity)
        # Each token's place among all experts' places, and each place's token.
        places = self.num_experts * capacity
        place_GS = expert_GS * capacity + slot_GS.astype(jnp.int32)
        place_GS = jnp.where(kept_GS, place_GS, places)
        token_GP = jax.vmap(
            lambda place_S: jnp.full(places, group).at[place_S].set(jnp.arange(group), mode="drop")
        )(place_GS)

        in_GPD = _rearranged(x_GSD, token_GP, place_GS)
        in_EGCD = in_GPD.reshape(-1, self.num_experts, capacity, x_GSD.shape[-1]).swapaxes(0, 1)
        experts = nn.vmap(
            Built,
            in_axes=(0, None, None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: EXPERT_AXIS},
        )(self.expert, module.shared, name="experts")
        (axis,) = logical_to_mesh_axes((EXPERT_AXIS,)) or (None,)
        in_EGCD = _placed(_placed(in_EGCD, None), axis)
        out_EGCD = _placed(_placed(experts(in_EGCD, None, deterministic), axis), None)
        out_GPD = out_EGCD.swapaxes(0, 1).reshape(in_GPD.shape)
        probability_GS = jnp.sum(probability_GSE * taken_GSE, axis=-1)
        out_GSD = _rearranged(out_GPD, place_GS, token_GP) * probability_GS[..., None].astype(dtype)

        balance_GE = jnp.mean(choice_GSE, axis=1) * jnp.mean(probability_GSE, axis=1)
        tokens, kept = jnp.sum(token_GS), jnp.sum(kept_GS)
        loss = self.auxiliary_weight * self.num_experts**2 * jnp.mean(balance_GE)
        dropped = (tokens - kept).astype(jnp.float32), tokens.astype(jnp.float32)
        sow(module, Sown(loss, {DROPPED: dropped}))
        return out_GSD.reshape(x_BLD.shape)

    def _probabilities(self, module: Built, x_GSD: Array, deterministic: bool) -> Array:
        """Returns each token's expert probabilities, float32 [G, S, E]."""
        seen_GSD = x_GSD.astype(jnp.float32)
        if not deterministic:
            key = module.make_rng("dropout")
            noise_GSD = jax.random.uniform(key, seen_GSD.shape, minval=-1.0, maxval=1.0)
            seen_GSD *= 1.0 + self.jitter * noise_GSD
        axes, start = ("embed", "unmodeled"), module.shared.parametrisation.feed_forward()
        router = Dense(self.num_experts, axes, start, "float32", use=EXACT_KERNEL, name="router")
        return jax.nn.softmax(router(seen_GSD))


@dataclass(frozen=True)
class SomeLayers(FeedForward):
    """Experts in every layer whose number is a multiple of `every`, and `plain` in the others."""

    plain: FeedForward
    experts: Switch
    every: int

    def of_layer(self, number: int) -> FeedForward:
        return self.plain if number % self.every else self.experts


def switch(config: Any, options: Any) -> FeedForward:
    """Returns experts in every layer whose number is a multiple of `options.every`."""
    expert = Mlp(config.mlp_dim, config.value("mlp_activations"), bias=False)
    experts = Switch(expert, options.experts, row_capacity=options.capacity)
    return SomeLayers(mlp(config, options), experts, options.every)


@jax.custom_vjp
def _rearranged(x_GND: Array, from_GM: Array, to_GN: Array) -> Array:
    """Returns [G, M, D] with `x_GND[g, from_GM[g, m]]` at (g, m), or 0 if that index is N or more.

    `to_GN` is the inverse (M or more for none), so the gradient is a rearrangement, too.
    Upstream's one-hot products cost two fifths as much as a feed-forward sublayer (768 x 3072,
    groups of 1,024, capacity 1.25).
    """
    del to_GN
    return jax.vmap(lambda x_ND, from_M: x_ND.at[from_M].get(mode="fill", fill_value=0))(
        x_GND, from_GM
    )


def _rearranged_forward(x_GND: Array, from_GM: Array, to_GN: Array) -> tuple[Array, Any]:
    return _rearranged(x_GND, from_GM, to_GN), (from_GM, to_GN)


def _rearranged_backward(places: Any, gradient_GMD: Array) -> tuple[Any, ...]:
    from_GM, to_GN = places
    return _rearranged(gradient_GMD, to_GN, from_GM), None, None


_rearranged.defvjp(_rearranged_forward, _rearranged_backward)


def _placed(x_EGCD: Array, experts: str | None) -> Array:
    """Places experts on a mesh axis, or beside the tokens, and groups on the remaining row axes.

    Tokens move to the experts' devices; experts do not move. Axes come from
    `flax.linen.logical_axis_rules`; without a mesh nothing changes. Without this constraint the
    compiler copies all tokens to every device.
    """
    (rows,) = logical_to_mesh_axes(("batch",)) or (None,)
    if rows is None:
        return x_EGCD
    groups = tuple(axis for axis in rows if axis != experts)
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x_EGCD, PartitionSpec(experts, groups, free, free))
