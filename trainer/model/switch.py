"""Switch layers: each token goes through one of several feed-forward sublayers.

Dimensions: B batch, L length, D model, E experts, G groups, S tokens of a group, C capacity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from trainer.model.dense import Dense, Shared
from trainer.model.feedforward import Mlp, MlpModule
from trainer.model.masks import Rows

# The collection of variables that routing leaves what it counts in.
ROUTING = "routing"
_SMALLEST_CAPACITY = 4


class Routing(NamedTuple):
    """Sums over the Switch layers of a model, float32 scalars.

    `auxiliary`: the loss that keeps experts equally busy, as if no position were padding.
    `dropped` and `routed`: tokens that found their expert full, of all tokens.
    """

    auxiliary: jax.Array
    dropped: jax.Array
    routed: jax.Array


@dataclass(frozen=True)
class Switch:
    """`num_experts` of `expert`; a router sends each token to the one it finds likeliest.

    Tokens are taken in groups, in the order of rows. In a group an expert has room for
    `capacity(…)` tokens; those that find it full pass by. In training the router sees its inputs
    times U(1 - `jitter`, 1 + `jitter`).

    Source: Fedus et al. 2021 (arXiv:2101.03961), sections 2.1 and 2.2; Mesh TensorFlow, `moe.py`,
    for groups, capacity, and padding, which takes no room but counts in the auxiliary loss.
    Differences: upstream's groups depend on the number of devices, here any mesh makes the same
    update.
    """

    expert: Mlp
    num_experts: int
    capacity_factor: float = 1.25
    evaluation_capacity_factor: float = 2.0
    jitter: float = 0.01
    auxiliary_weight: float = 0.01
    largest_group: int = 1024

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _Switch(self, shared, name=name)

    def group_size(self, tokens: int) -> int:
        """The largest divisor of `tokens` up to `largest_group`."""
        sizes = range(min(self.largest_group, tokens), 0, -1)
        return next(size for size in sizes if tokens % size == 0)

    def capacity(self, group: int, training: bool) -> int:
        """Tokens of a group that an expert has room for."""
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        room = min(group, math.floor(group * factor / self.num_experts))
        return max(_SMALLEST_CAPACITY, room)


class _Switch(nn.Module):
    spec: Switch
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array, rows: Rows, deterministic: bool) -> jax.Array:
        spec, dtype = self.spec, self.shared.dtype
        group = spec.group_size(x_BLD.shape[0] * x_BLD.shape[1])
        token_GS = (rows.segment_BL > 0).reshape(-1, group)
        x_GSD = x_BLD.reshape(-1, group, x_BLD.shape[-1]) * token_GS[..., None].astype(dtype)

        seen_GSD = x_GSD.astype(jnp.float32)
        if not deterministic:
            key = self.make_rng("dropout")
            noise_GSD = jax.random.uniform(key, seen_GSD.shape, minval=-1.0, maxval=1.0)
            seen_GSD *= 1.0 + spec.jitter * noise_GSD
        initializer = self.shared.parametrisation.feed_forward()
        axes = ("embed", "unmodeled")
        router = Dense(spec.num_experts, axes, initializer, "float32", name="router")
        probability_GSE = jax.nn.softmax(router(seen_GSD))
        choice_GSE = jax.nn.one_hot(jnp.argmax(probability_GSE, axis=-1), spec.num_experts)

        taken_GSE = choice_GSE * token_GS[..., None]
        slot_GS = jnp.sum((jnp.cumsum(taken_GSE, axis=1) - 1) * taken_GSE, axis=-1)
        capacity = spec.capacity(group, training=not deterministic)
        kept_GS = token_GS & (slot_GS < capacity)
        # Slots beyond the capacity are rows of zeros.
        slot_GSC = jax.nn.one_hot(slot_GS.astype(jnp.int32), capacity, dtype=dtype)
        dispatch_GSEC = jnp.einsum("gse,gsc->gsec", taken_GSE.astype(dtype), slot_GSC)
        probability_GS = jnp.sum(probability_GSE * taken_GSE, axis=-1)
        combine_GSEC = dispatch_GSEC * probability_GS[..., None, None].astype(dtype)

        in_EGCD = jnp.einsum("gsec,gsd->egcd", dispatch_GSEC, x_GSD)
        experts = nn.vmap(
            MlpModule,
            in_axes=(0, None, None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: "expert"},
        )(spec.expert, self.shared, name="experts")
        out_EGCD = _at_experts(experts(_at_experts(in_EGCD), None, deterministic))
        out_GSD = jnp.einsum("gsec,egcd->gsd", combine_GSEC, out_EGCD)

        balance_GE = jnp.mean(choice_GSE, axis=1) * jnp.mean(probability_GSE, axis=1)
        tokens, kept = jnp.sum(token_GS), jnp.sum(kept_GS)
        self._count(
            Routing(
                spec.auxiliary_weight * spec.num_experts**2 * jnp.mean(balance_GE),
                (tokens - kept).astype(jnp.float32),
                tokens.astype(jnp.float32),
            )
        )
        return out_GSD.reshape(x_BLD.shape)

    def _count(self, routing: Routing) -> None:
        def nothing() -> Routing:
            return Routing(*(jnp.zeros((), jnp.float32),) * 3)

        def add(before: Routing, now: Routing) -> Routing:
            return Routing(*map(jnp.add, before, now))

        self.sow(ROUTING, "sums", routing, reduce_fn=add, init_fn=nothing)


def _at_experts(x_EGCD: jax.Array) -> jax.Array:
    """The same, on the devices of the experts: else the compiler may fetch experts to the tokens.

    Where the axis "expert" lies is read off `flax.linen.logical_axis_rules`; without rules, or a
    mesh, nothing is asked for.
    """
    (axis,) = nn.logical_to_mesh_axes(("expert",)) or (None,)
    if axis is None:
        return x_EGCD
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x_EGCD, PartitionSpec(axis, free, free, free))


def routing_of(variables: Mapping[str, Any]) -> Routing:
    """The sum over layers of what the modules of a model left in ROUTING."""
    each = jax.tree.leaves(variables, is_leaf=lambda node: isinstance(node, Routing))
    # Layers of a scan are one array.
    sums = [jax.tree.map(jnp.sum, routing) for routing in each]
    return jax.tree.map(lambda *parts: sum(parts), *sums)
