"""Position schemes, by which a stack knows the order of its tokens.

Dimensions: B batch (1 where all rows are alike), L query length, S key length, D model, H heads,
K head size, N = L + S - 1 distances, R relative buckets, P places, C pairs of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.model.dense import Shared
from trainer.model.parameters import TABLE, parameter


class RelativeBias(NamedTuple):
    """A bias of logits by distance: `table_HR[h, spec.bucket(s - l)]`."""

    table_HR: jax.Array
    spec: T5RelativePosition


class Positions(NamedTuple):
    """The effects of positions on a stack; None where there is no effect.

    Attributes:
      embedding_BLD: added to the embeddings.
      bias_HLS: float32, added to the logits of every attention.
      relative: the same bias as a table, for kernels that need no [H, L, S].
      angle_BLC: float32, by which channels of queries and keys are rotated.
    """

    embedding_BLD: jax.Array | None = None
    bias_HLS: jax.Array | None = None
    relative: RelativeBias | None = None
    angle_BLC: jax.Array | None = None


class Position(Protocol):
    """The position slot. Its module, called `name`, maps (L, S, position_BL) to `Positions`.

    `position_BL` holds positions within packed examples; None stands for 0, 1, ... in every row.
    If `per_layer`, each layer has a module of its own; it must not add to embeddings.
    """

    @property
    def name(self) -> str: ...

    @property
    def per_layer(self) -> bool: ...

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module: ...


@dataclass(frozen=True)
class T5RelativePosition:
    """A learned bias for each head and bucket of distances.

    One table serves all layers of a stack; if `per_layer`, each layer has its own.

    Distances are counted along the row even if examples are packed, since only those within an
    example matter. `bidirectional` keeps half of the buckets for keys after the query; otherwise
    all such keys share the bucket of distance 0.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1; T5X `relative_position_bucket`, and
    `examples/scalable_t5` for tables per layer, which umT5 (arXiv:2304.09151) has, too.
    """

    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128
    per_layer: bool = False
    name = "relpos_bias"

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _T5RelativePosition(self, shared, num_heads, name=name)

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Returns the bucket of each `key index - query index`.

        int32 of the same shape, in [0, num_buckets). The first half of the buckets of a direction
        hold one distance each; the others grow logarithmically up to `max_distance`, beyond which
        all distances share the last one.
        """
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        behind = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = buckets // 2
        # T5X's epsilon and float32: they decide between which distances buckets change.
        ratio = behind.astype(np.float32) / exact + np.finfo(np.float32).eps
        growth = np.log(ratio) / np.log(self.max_distance / exact) * (buckets - exact)
        distant = np.minimum(exact + growth.astype(np.int32), buckets - 1)
        bucket = np.where(behind < exact, behind, distant)
        if self.bidirectional:
            bucket = bucket + np.where(distance > 0, buckets, 0)
        return bucket.astype(np.int32)


class _T5RelativePosition(nn.Module):
    spec: T5RelativePosition
    shared: Shared
    num_heads: int

    @nn.compact
    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        table_HR = parameter(
            self,
            TABLE,
            "rel_embedding",
            self.shared.parametrisation.relative_bias(),
            ("heads", "relpos_buckets"),
            (self.num_heads, self.spec.num_buckets),
        )
        bucket_N = self.spec.bucket(np.arange(1 - query_length, key_length))
        return Positions(
            bias_HLS=_spread_diagonals(table_HR[:, bucket_N], query_length),
            relative=RelativeBias(table_HR, self.spec),
        )


def _spread_diagonals(x_HN: jax.Array, query_length: int) -> jax.Array:
    """Maps [H, N] by distance to [H, L, S] with `out[h, l, s] = x[h, s - l + L - 1]`.

    Rows of length N cut from a sequence of period N + 1 each start one element earlier. So neither
    the forward nor the backward pass gathers or scatters L * S elements: the gradient is a sum
    over repetitions, which is fast on every device.
    """
    num_heads, num_distances = x_HN.shape
    period = jnp.pad(x_HN, ((0, 0), (0, 1)))
    flat = jnp.tile(period, (1, query_length))[:, : query_length * num_distances]
    return flat.reshape(num_heads, query_length, num_distances)[:, :, query_length - 1 :]


@dataclass(frozen=True)
class LearnedPosition:
    """A learned vector for each of `max_positions` positions, added to the embeddings.

    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
    """

    max_positions: int
    name = "position_embedder"
    per_layer = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _LearnedPosition(self, shared, name=name)


class _LearnedPosition(nn.Module):
    spec: LearnedPosition
    shared: Shared

    @nn.compact
    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        if position_BL is None and query_length > self.spec.max_positions:
            raise ValueError(
                f"rows have {query_length} tokens, but the model has {self.spec.max_positions} "
                "positions: raise max_positions"
            )
        table_PD = parameter(
            self,
            TABLE,
            "pos_embedding",
            self.shared.parametrisation.embedding(),
            ("abspos_buckets", "embed"),
            (self.spec.max_positions, self.shared.emb_dim),
        )
        if position_BL is None:
            embedding_BLD = table_PD[None, :query_length]
        else:
            embedding_BLD = jnp.take(table_PD, position_BL, axis=0, mode="fill", fill_value=jnp.nan)
        return Positions(embedding_BLD=embedding_BLD.astype(self.shared.dtype))


@dataclass(frozen=True)
class RotaryPosition:
    """Rotation of the first `channels` of queries and keys by angles proportional to position.

    Channels i and i + channels / 2 are a pair, rotated by position * base^(-2i / channels).

    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2; GPT-NeoX for the pairing of halves and
    the rotation of a part of the channels.
    """

    channels: int
    base: float = 10_000.0
    name = "rotary_position"
    per_layer = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _RotaryPosition(self, name=name)


class _RotaryPosition(nn.Module):
    spec: RotaryPosition

    @nn.compact
    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        if position_BL is None:
            position_BL = jnp.arange(query_length)[None]
        frequency_C = self.spec.base ** (-np.arange(0, self.spec.channels, 2) / self.spec.channels)
        return Positions(
            angle_BLC=position_BL[..., None].astype(jnp.float32) * frequency_C.astype(np.float32)
        )


def rotate_joined(x_BLJ: jax.Array, angle_BLC: jax.Array, head_dim: int) -> jax.Array:
    """Does the same to heads that are joined in one axis, without changing their layout.

    On a TPU an axis of heads costs copies before and after a kernel that reads them joined.
    """
    pairs, heads = angle_BLC.shape[-1], x_BLJ.shape[-1] // head_dim
    channel_J = np.arange(x_BLJ.shape[-1]) % head_dim
    rest = head_dim - 2 * pairs

    def joined(first_BLC: jax.Array, second_BLC: jax.Array, other: float) -> jax.Array:
        other_BLC = jnp.full((*angle_BLC.shape[:2], rest), other, angle_BLC.dtype)
        head_BLK = jnp.concatenate([first_BLC, second_BLC, other_BLC], axis=-1)
        return jnp.tile(head_BLK, (1, 1, heads))

    cos_BLC, sin_BLC = jnp.cos(angle_BLC), jnp.sin(angle_BLC)
    partner_BLJ = jnp.where(
        channel_J < pairs, jnp.roll(x_BLJ, -pairs, axis=-1), jnp.roll(x_BLJ, pairs, axis=-1)
    )
    rotated_BLJ = x_BLJ.astype(jnp.float32) * joined(cos_BLC, cos_BLC, 1.0)
    rotated_BLJ += partner_BLJ.astype(jnp.float32) * joined(-sin_BLC, sin_BLC, 0.0)
    return rotated_BLJ.astype(x_BLJ.dtype)


def rotate(x_BLHK: jax.Array, angle_BLC: jax.Array) -> jax.Array:
    """Returns heads with channels i and i + C rotated by angle i, and those from 2C unchanged."""
    pairs = angle_BLC.shape[-1]
    cos_BL1C, sin_BL1C = jnp.cos(angle_BLC)[:, :, None], jnp.sin(angle_BLC)[:, :, None]
    first = x_BLHK[..., :pairs].astype(jnp.float32)
    second = x_BLHK[..., pairs : 2 * pairs].astype(jnp.float32)
    rotated = (first * cos_BL1C - second * sin_BL1C, second * cos_BL1C + first * sin_BL1C)
    return jnp.concatenate(
        [*(part.astype(x_BLHK.dtype) for part in rotated), x_BLHK[..., 2 * pairs :]], axis=-1
    )
