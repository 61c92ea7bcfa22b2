"""Position schemes: how a stack encodes token order.

Dimensions: B batch (1 if all rows are alike), L query length, S key length, D model, H heads,
K head size, G blocks of positions, N = L + S - 1 distances, R relative buckets, P places, C
channel pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from trainer.model.dense import Built, Shared
from trainer.model.parameters import TABLE, parameter
from trainer.model.registry import PER_LAYER, Rotary


class RelativeBias(NamedTuple):
    """Logit bias by distance: `table_HR[h, spec.bucket(s - l)]`."""

    table_HR: Array
    spec: T5RelativePosition


class Positions(NamedTuple):
    """The contributions of a position scheme to a stack; None means no contribution.

    Attributes:
      embedding_BLD: added to the embeddings.
      bias_HLS: float32, added to the logits of every attention; `bias_BHLS`: one bias per row.
      bias_HN: `bias_HLS` by distance `s - l + L - 1`, for block-sparse attention.
      relative: `bias_HLS` as a table, for kernels that do not need [H, L, S].
      angle_BLC: float32, rotates queries, and keys unless `source_angle_BSC` is set.
      source_angle_BSC: float32, rotates cross-attention's keys.
      amplitude: factor of the channels that are rotated.
      block_bias_HGG: float32, added to the logits of keys that stand for blocks of positions.
    """

    embedding_BLD: Array | None = None
    bias_HLS: Array | None = None
    bias_HN: Array | None = None
    relative: RelativeBias | None = None
    angle_BLC: Array | None = None
    source_angle_BSC: Array | None = None
    bias_BHLS: Array | None = None
    amplitude: float | None = None
    block_bias_HGG: Array | None = None


# Positions of queries within packed examples, int [B, L]; None if they count along the row.
Indices = Array | None


class Position:
    """The position slot; `run` gets the number of heads and (L, S, at_BL), as in `Buildable`.

    `name` is the module's name. With `per_layer` each layer has its own module, which must not add
    to embeddings. With `cross` the module also runs on the encoder's positions, and cross-attention
    uses the angles.
    """

    name: str
    per_layer: bool = False
    cross: bool = False

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return Built(self, shared, (num_heads,), name=name)


@dataclass(frozen=True)
class T5RelativePosition(Position):
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

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Returns the bucket of each `key index - query index`, int32 in [0, num_buckets).

        Half of a direction's buckets hold one distance each; the others grow logarithmically up to
        `max_distance`, and all larger distances share the last one.
        """
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        behind = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = buckets // 2
        # T5X's epsilon and float32 arithmetic decide where one bucket ends and the next begins.
        ratio = behind.astype(np.float32) / exact + np.finfo(np.float32).eps
        growth = np.log(ratio) / np.log(self.max_distance / exact) * (buckets - exact)
        distant = np.minimum(exact + growth.astype(np.int32), buckets - 1)
        bucket = np.where(behind < exact, behind, distant)
        if self.bidirectional:
            bucket = bucket + np.where(distance > 0, buckets, 0)
        return bucket.astype(np.int32)

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        start, axes = module.shared.parametrisation.relative_bias(), ("heads", "relpos_buckets")
        shape = (heads, self.num_buckets)
        table_HR = parameter(module, TABLE, "rel_embedding", start, axes, shape)
        bias_HN = table_HR[:, self.bucket(np.arange(1 - length, keys))]
        bias_HLS = spread_diagonals(bias_HN, length)
        return Positions(bias_HLS=bias_HLS, bias_HN=bias_HN, relative=RelativeBias(table_HR, self))


def spread_diagonals(x_HN: Array, query_length: int) -> Array:
    """Maps [H, N], indexed by distance, to [H, L, S]: `out[h, l, s] = x[h, s - l + L - 1]`.

    Reshaping a sequence of period N + 1 into rows of length N shifts each row by one element. This
    avoids gathers and scatters of L * S elements, and the gradient is a sum over repetitions.
    """
    num_heads, num_distances = x_HN.shape
    period = jnp.pad(x_HN, ((0, 0), (0, 1)))
    flat = jnp.tile(period, (1, query_length))[:, : query_length * num_distances]
    return flat.reshape(num_heads, query_length, num_distances)[:, :, query_length - 1 :]


@dataclass(frozen=True)
class LearnedPosition(Position):
    """A learned vector per position, added to the embeddings.

    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
    """

    max_positions: int
    name = "position_embedder"

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        shared, places = module.shared, self.max_positions
        if at_BL is None and length > places:
            raise ValueError(
                f"rows have {length} tokens, but the model has {places} positions: raise "
                "max_positions"
            )
        start, axes = shared.parametrisation.embedding(), ("abspos_buckets", "embed")
        table_PD = parameter(module, TABLE, "pos_embedding", start, axes, (places, shared.emb_dim))
        if at_BL is None:
            embedding_BLD = table_PD[None, :length]
        else:
            embedding_BLD = jnp.take(table_PD, at_BL, axis=0, mode="fill", fill_value=jnp.nan)
        return Positions(embedding_BLD=embedding_BLD.astype(shared.dtype))


@dataclass(frozen=True)
class NoPosition(Position):
    """No position scheme: only a causal mask reveals token order.

    Source: Kazemnejad et al. 2023 (arXiv:2305.19466).
    """

    name = "no_position"

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        return Positions()


@dataclass(frozen=True)
class SinusoidalPosition(Position):
    """Sines (even channels) and cosines (odd ones) of the position, added to the embeddings.

    Channels 2i and 2i + 1 use the angle position * base^(-2i / D).

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """

    base: float = 10_000.0
    name = "sinusoidal_position"

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        width = module.shared.emb_dim
        frequency_C = self.base ** (-np.arange(0, width, 2) / width)
        angle_BLC = _angles(frequency_C, length, at_BL)
        waves_BLD = jnp.stack([jnp.sin(angle_BLC), jnp.cos(angle_BLC)], axis=-1)
        waves_BLD = waves_BLD.reshape(*angle_BLC.shape[:2], -1)[..., :width]
        return Positions(embedding_BLD=waves_BLD.astype(module.shared.dtype))


def _angles(frequency_C: np.ndarray, length: int, at_BL: Indices) -> Array:
    """Returns positions times frequencies, float32 [B, L, C]."""
    if at_BL is None:
        at_BL = jnp.arange(length)[None]
    return at_BL[..., None].astype(jnp.float32) * frequency_C.astype(np.float32)


@dataclass(frozen=True)
class AlibiPosition(Position):
    """A fixed bias of -slope * |distance| on the scaled logits, with one slope per head.

    The logits are scaled after the bias is added, so the bias is divided by `head_dim`'s scale.

    Source: Press et al. 2021 (arXiv:2108.12409), section 3. For head counts that are not powers
    of 2, its code: slopes for the power below, then every second slope for the power above.
    """

    head_dim: int
    name = "alibi"

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        scale = module.shared.parametrisation.attention_scale(self.head_dim)
        slope_H = (alibi_slopes(heads) / scale).astype(np.float32)
        distance_N = np.abs(np.arange(1 - length, keys, dtype=np.float32))
        bias_HN = jnp.asarray(-slope_H[:, None] * distance_N)
        return Positions(bias_HLS=spread_diagonals(bias_HN, length), bias_HN=bias_HN)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns ALiBi's slopes, float64 [H]."""
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    more = 2.0 ** (-4.0 * np.arange(1, 2 * below + 1, 2) / below)
    return np.concatenate([slopes, more])[:num_heads]


@dataclass(frozen=True)
class RotaryPosition(Position):
    """Rotation of the first `channels` of queries and keys by angles proportional to position.

    Channels i and i + channels / 2 form a pair, rotated by position * base^(-2i / channels). With
    `scaling` they rotate more slowly, for rows longer than in pretraining.

    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2; GPT-NeoX for pairing the halves and
    rotating only some channels. Scaling: Chen et al. 2023 (arXiv:2306.15595) for "linear"; Llama
    3.1's `apply_scaling` for "llama3": pairs that turn often in `original_positions` keep their
    frequency, pairs that turn seldom have it divided by `factor`, and it is interpolated linearly
    in between. Peng et al. 2023 (arXiv:2309.00071), section 3, for "yarn": the same, but
    interpolated by the pair's number, and logits grow by `attention_factor` squared.
    """

    channels: int
    base: float = 10_000.0
    cross: bool = False
    scaling: Rotary | None = None
    name = "rotary_position"

    @property
    def frequency_C(self) -> np.ndarray:
        """Radians per position of each pair, float64."""
        frequency_C = self.base ** (-np.arange(0, self.channels, 2) / self.channels)
        if (scaling := self.scaling) is None:
            return frequency_C
        slow_C = frequency_C / scaling.factor
        if scaling.scaling == "linear":
            return slow_C
        if scaling.scaling == "yarn":
            first, last = self._interpolated(scaling)
            pair_C = np.arange(len(frequency_C))
            share_C = 1 - np.clip((pair_C - first) / (last - first), 0.0, 1.0)
        else:
            turns_C = scaling.original_positions * frequency_C / (2 * np.pi)
            low, high = scaling.low_frequency, scaling.high_frequency
            share_C = np.clip((turns_C - low) / (high - low), 0.0, 1.0)
        return share_C * frequency_C + (1 - share_C) * slow_C

    def _interpolated(self, scaling: Rotary) -> tuple[float, float]:
        """Returns YaRN's last pair that is left alone and first pair slowed down fully."""

        def pair(turns: float) -> float:
            radians = turns * 2 * math.pi / scaling.original_positions
            return -self.channels * math.log(radians) / (2 * math.log(self.base))

        first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.channels - 1)
        return first, last if last != first else last + 0.001

    @property
    def amplitude(self) -> float | None:
        """Factor of rotated channels; None means 1."""
        scaling = self.scaling
        if scaling is None or scaling.scaling != "yarn":
            return None
        given = scaling.attention_factor
        return 0.1 * math.log(scaling.factor) + 1 if given is None else given

    def run(self, module: Built, heads: int, length: int, keys: int, at_BL: Indices) -> Positions:
        angle_BLC = _angles(self.frequency_C, length, at_BL)
        return Positions(angle_BLC=angle_BLC, amplitude=self.amplitude)


def waves(angle_BLC: Array, amplitude: float | None) -> tuple[Array, Array]:
    """Returns cosines and sines times the amplitude."""
    cos_BLC, sin_BLC = jnp.cos(angle_BLC), jnp.sin(angle_BLC)
    return (cos_BLC, sin_BLC) if amplitude is None else (amplitude * cos_BLC, amplitude * sin_BLC)


def rotate(x_BLHK: Array, angle_BLC: Array, amplitude: float | None = None) -> Array:
    """Rotates channels i and i + C by angle i, times `amplitude`; others are unchanged."""
    pairs = angle_BLC.shape[-1]
    cos_BL1C, sin_BL1C = (wave_BLC[:, :, None] for wave_BLC in waves(angle_BLC, amplitude))
    first = x_BLHK[..., :pairs].astype(jnp.float32)
    second = x_BLHK[..., pairs : 2 * pairs].astype(jnp.float32)
    rotated = (first * cos_BL1C - second * sin_BL1C, second * cos_BL1C + first * sin_BL1C)
    return jnp.concatenate(
        [*(part.astype(x_BLHK.dtype) for part in rotated), x_BLHK[..., 2 * pairs :]], axis=-1
    )


NO_POSITION = NoPosition()


def absolute(config: Any, options: Any, bidirectional: bool) -> Position:
    return LearnedPosition(config.max_positions)


def alibi(config: Any, options: Any, bidirectional: bool) -> Position:
    return AlibiPosition(config.head_dim)


def relative(config: Any, options: Any, bidirectional: bool) -> Position:
    own = config.position_scheme == PER_LAYER
    return T5RelativePosition(bidirectional, options.num_buckets, options.max_distance, own)


def rotary(config: Any, options: Rotary, bidirectional: bool) -> Position:
    scaling = None if options.scaling == "none" else options
    return RotaryPosition(int(config.rotated_channels), options.base, options.cross, scaling)
