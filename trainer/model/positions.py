"""Position schemes: how a stack encodes token order.

Dimensions: B batch (1 if all rows are alike), L query length, S key length, D model, H heads,
K head size, N = L + S - 1 distances, R relative buckets, P places, C channel pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.model.dense import Shared
from trainer.model.parameters import TABLE, parameter


class RelativeBias(NamedTuple):
    """Logit bias by distance: `table_HR[h, spec.bucket(s - l)]`."""

    table_HR: jax.Array
    spec: T5RelativePosition


class Positions(NamedTuple):
    """What a position scheme contributes to a stack; None means no contribution.

    Attributes:
      embedding_BLD: added to the embeddings.
      bias_HLS: float32, added to the logits of every attention; `bias_BHLS`: one bias per row.
      bias_HN: `bias_HLS` by distance `s - l + L - 1`, for block-sparse attention.
      relative: `bias_HLS` as a table, for kernels that do not need [H, L, S].
      angle_BLC: float32, rotates queries, and keys unless `source_angle_BSC` is set.
      source_angle_BSC: float32, rotates keys in cross-attention.
    """

    embedding_BLD: jax.Array | None = None
    bias_HLS: jax.Array | None = None
    bias_HN: jax.Array | None = None
    relative: RelativeBias | None = None
    angle_BLC: jax.Array | None = None
    source_angle_BSC: jax.Array | None = None
    bias_BHLS: jax.Array | None = None


class Position(Protocol):
    """The position slot. Its module, called `name`, maps (L, S, position_BL) to `Positions`.

    `position_BL` holds positions within packed examples; None means 0, 1, ... in every row.
    With `per_layer` each layer has its own module, which must not add to embeddings. With `cross`
    the module also runs on the encoder's positions, and cross-attention uses the angles.
    """

    @property
    def name(self) -> str: ...

    @property
    def per_layer(self) -> bool: ...

    @property
    def cross(self) -> bool: ...

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module: ...


@dataclass(frozen=True)
class T5RelativePosition:
    """A learned bias per head and distance bucket, in one table per stack.

    With `per_layer` each layer has its own table. Distances count along the row even in packed
    rows: only those within an example matter. `bidirectional` reserves half of the buckets for keys
    after the query; otherwise all such keys share the bucket of distance 0.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1; T5X `relative_position_bucket`, and
    `examples/scalable_t5` for tables per layer, also in umT5 (arXiv:2304.09151).
    """

    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128
    per_layer: bool = False
    name = "relpos_bias"
    cross = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _T5RelativePosition(self, shared, num_heads, name=name)

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Returns the bucket of each `key index - query index`, int32 in [0, num_buckets).

        Half of a direction's buckets hold one distance each; the others grow logarithmically up to
        `max_distance`, and all larger distances share the last one.
        """
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        behind = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = buckets // 2
        # T5X's epsilon and float32 decide where one bucket ends and the next begins.
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
        bias_HN = table_HR[:, self.spec.bucket(np.arange(1 - query_length, key_length))]
        return Positions(
            bias_HLS=spread_diagonals(bias_HN, query_length),
            bias_HN=bias_HN,
            relative=RelativeBias(table_HR, self.spec),
        )


def spread_diagonals(x_HN: jax.Array, query_length: int) -> jax.Array:
    """Maps [H, N] by distance to [H, L, S] with `out[h, l, s] = x[h, s - l + L - 1]`.

    Reshaping a sequence of period N + 1 into rows of length N shifts each row by one element. This
    avoids gathers and scatters of L * S elements: the gradient is a sum over repetitions.
    """
    num_heads, num_distances = x_HN.shape
    period = jnp.pad(x_HN, ((0, 0), (0, 1)))
    flat = jnp.tile(period, (1, query_length))[:, : query_length * num_distances]
    return flat.reshape(num_heads, query_length, num_distances)[:, :, query_length - 1 :]


@dataclass(frozen=True)
class LearnedPosition:
    """A learned vector per position, added to the embeddings.

    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
    """

    max_positions: int
    name = "position_embedder"
    per_layer = False
    cross = False

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
class NoPosition:
    """No scheme: only a causal mask reveals token order.

    Source: Kazemnejad et al. 2023 (arXiv:2305.19466).
    """

    name = "no_position"
    per_layer = False
    cross = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _NoPosition(name=name)


class _NoPosition(nn.Module):
    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        return Positions()


@dataclass(frozen=True)
class SinusoidalPosition:
    """Sines (even channels) and cosines (odd ones) of the position, added to the embeddings.

    Channels 2i and 2i + 1 use the angle position * base^(-2i / D).

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """

    base: float = 10_000.0
    name = "sinusoidal_position"
    per_layer = False
    cross = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _SinusoidalPosition(self, shared, name=name)


class _SinusoidalPosition(nn.Module):
    spec: SinusoidalPosition
    shared: Shared

    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        width = self.shared.emb_dim
        frequency_C = self.spec.base ** (-np.arange(0, width, 2) / width)
        angle_BLC = _angles(frequency_C, query_length, position_BL)
        waves_BLD = jnp.stack([jnp.sin(angle_BLC), jnp.cos(angle_BLC)], axis=-1)
        waves_BLD = waves_BLD.reshape(*angle_BLC.shape[:2], -1)[..., :width]
        return Positions(embedding_BLD=waves_BLD.astype(self.shared.dtype))


def _angles(frequency_C: np.ndarray, query_length: int, position_BL: jax.Array | None) -> jax.Array:
    """Returns position times frequency, float32 [B, L, C]."""
    if position_BL is None:
        position_BL = jnp.arange(query_length)[None]
    return position_BL[..., None].astype(jnp.float32) * frequency_C.astype(np.float32)


@dataclass(frozen=True)
class AlibiPosition:
    """A fixed bias of -slope * |distance| on the scaled logits, with one slope per head.

    The logits are scaled after adding the bias, which is divided by the scale for `head_dim`.

    Source: Press et al. 2021 (arXiv:2108.12409), section 3. For head counts that are not powers
    of 2, its code: the slopes for the power below, then every second slope for the power above.
    """

    head_dim: int
    name = "alibi"
    per_layer = False
    cross = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _AlibiPosition(self, shared, num_heads, name=name)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns ALiBi's slopes, float64 [H]."""
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    more = 2.0 ** (-4.0 * np.arange(1, 2 * below + 1, 2) / below)
    return np.concatenate([slopes, more])[:num_heads]


class _AlibiPosition(nn.Module):
    spec: AlibiPosition
    shared: Shared
    num_heads: int

    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        scale = self.shared.parametrisation.attention_scale(self.spec.head_dim)
        slope_H = (alibi_slopes(self.num_heads) / scale).astype(np.float32)
        distance_N = np.abs(np.arange(1 - query_length, key_length, dtype=np.float32))
        bias_HN = jnp.asarray(-slope_H[:, None] * distance_N)
        return Positions(bias_HLS=spread_diagonals(bias_HN, query_length), bias_HN=bias_HN)


@dataclass(frozen=True)
class RotaryScaling:
    """Slower rotation for rows longer than in pretraining; see `parts.Rotary`.

    Source: Chen et al. 2023 (arXiv:2306.15595) for "linear"; Llama 3.1's `apply_scaling` for
    "llama3": pairs that turn often in `original_positions` keep their frequency, pairs that turn
    seldom have it divided by `factor`, and it is interpolated linearly in between.
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_positions: int = 8192

    def __call__(self, frequency_C: np.ndarray) -> np.ndarray:
        slow_C = frequency_C / self.factor
        if self.kind == "linear":
            return slow_C
        turns_C = self.original_positions * frequency_C / (2 * np.pi)
        share_C = (turns_C - self.low_frequency) / (self.high_frequency - self.low_frequency)
        share_C = np.clip(share_C, 0.0, 1.0)
        return share_C * frequency_C + (1 - share_C) * slow_C


@dataclass(frozen=True)
class RotaryPosition:
    """Rotation of the first `channels` of queries and keys by angles proportional to position.

    Channels i and i + channels / 2 form a pair, rotated by position * base^(-2i / channels).

    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2; GPT-NeoX for pairing the halves and
    rotating only some channels.
    """

    channels: int
    base: float = 10_000.0
    cross: bool = False
    scaling: RotaryScaling | None = None
    name = "rotary_position"
    per_layer = False

    @property
    def frequency_C(self) -> np.ndarray:
        """Radians per position of each pair, float64."""
        frequency_C = self.base ** (-np.arange(0, self.channels, 2) / self.channels)
        return frequency_C if self.scaling is None else self.scaling(frequency_C)

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _RotaryPosition(self, name=name)


class _RotaryPosition(nn.Module):
    spec: RotaryPosition

    @nn.compact
    def __call__(
        self, query_length: int, key_length: int, position_BL: jax.Array | None = None
    ) -> Positions:
        return Positions(angle_BLC=_angles(self.spec.frequency_C, query_length, position_BL))


def rotate_joined(x_BLJ: jax.Array, angle_BLC: jax.Array, head_dim: int) -> jax.Array:
    """Like `rotate`, for joined heads: on a TPU separating them costs copies around kernels."""
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
    """Rotates channels i and i + C by angle i; channels from 2C on are unchanged."""
    pairs = angle_BLC.shape[-1]
    cos_BL1C, sin_BL1C = jnp.cos(angle_BLC)[:, :, None], jnp.sin(angle_BLC)[:, :, None]
    first = x_BLHK[..., :pairs].astype(jnp.float32)
    second = x_BLHK[..., pairs : 2 * pairs].astype(jnp.float32)
    rotated = (first * cos_BL1C - second * sin_BL1C, second * cos_BL1C + first * sin_BL1C)
    return jnp.concatenate(
        [*(part.astype(x_BLHK.dtype) for part in rotated), x_BLHK[..., 2 * pairs :]], axis=-1
    )


def absolute(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns learned positions."""
    return LearnedPosition(config.max_positions)


def alibi(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns ALiBi."""
    return AlibiPosition(config.head_dim)


def no_position(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns the empty scheme."""
    return NoPosition()


def relative(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns T5's biases, shared by all layers of a stack."""
    return T5RelativePosition(bidirectional, options.num_buckets, options.max_distance)


def relative_per_layer(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns T5's biases, one table per layer."""
    return T5RelativePosition(bidirectional, options.num_buckets, options.max_distance, True)


def rotary(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns the rotation for `parts.Rotary`."""
    scaling = None
    if options.scaling == "linear":
        scaling = RotaryScaling("linear", options.factor)
    elif options.scaling == "llama3":
        scaling = RotaryScaling(
            "llama3",
            options.factor,
            options.low_frequency,
            options.high_frequency,
            options.original_positions,
        )
    return RotaryPosition(int(config.rotated_channels), options.base, options.cross, scaling)


def sinusoidal(config: Any, options: Any, bidirectional: bool) -> Position:
    """Returns sinusoidal positions."""
    return SinusoidalPosition(options.base)
