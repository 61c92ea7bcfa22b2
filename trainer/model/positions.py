"""Positions: what a stack knows about the order of its tokens.

Dimensions: L query length, S key length, H heads, N = L + S - 1 distances, R relative buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.model.dense import Shared, parameter


class Position(Protocol):
    """The position slot: a module, one a stack, giving the bias its layers add to their logits."""

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module: ...


@dataclass(frozen=True)
class T5RelativePosition:
    """A learned bias for each head and bucket of distances, shared by the layers of a stack.

    Distances are counted along the row, also where examples are packed: within one example that
    is the same. `bidirectional` keeps half of the buckets for keys after the query; without it
    all of those fall into the bucket of distance 0.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1; T5X `relative_position_bucket`.
    """

    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    def build(self, shared: Shared, num_heads: int, name: str) -> nn.Module:
        return _T5RelativePosition(self, shared, num_heads, name=name)

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Bucket of each `key index - query index`: int32 of the same shape, in [0, num_buckets).

        The nearer half of the buckets (of one direction) hold one distance each; the others grow
        logarithmically up to `max_distance`, beyond which everything shares the last one.
        """
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        behind = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = buckets // 2
        # Epsilon and float32 as T5X has them: they decide where the logarithm's borders fall.
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
    def __call__(self, query_length: int, key_length: int) -> jax.Array:
        """Bias float32 [H, L, S]."""
        table_HR = parameter(
            self,
            "rel_embedding",
            self.shared.parametrisation.relative_bias(),
            ("heads", "relpos_buckets"),
            (self.num_heads, self.spec.num_buckets),
        )
        bucket_N = self.spec.bucket(np.arange(1 - query_length, key_length))
        return _spread_diagonals(table_HR[:, bucket_N], query_length)


def _spread_diagonals(x_HN: jax.Array, query_length: int) -> jax.Array:
    """[H, N] by distance to [H, L, S] with `out[h, l, s] = x[h, s - l + L - 1]`.

    Rows of N read off a sequence of period N + 1 start one element earlier each time. So neither
    the forward nor the backward pass gathers or scatters L * S elements: the gradient is a sum
    over repetitions, which is fast on every device.
    """
    num_heads, num_distances = x_HN.shape
    period = jnp.pad(x_HN, ((0, 0), (0, 1)))
    flat = jnp.tile(period, (1, query_length))[:, : query_length * num_distances]
    return flat.reshape(num_heads, query_length, num_distances)[:, :, query_length - 1 :]
