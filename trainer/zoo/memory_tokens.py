"""Memory tokens: learned vectors in front of an encoder's input.

Dimensions: B batch, L length, N vectors, D model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer.model.dense import Buildable, Built
from trainer.model.masks import Rows
from trainer.model.parameters import TABLE, parameter
from trainer.model.stack_parts import StackPart


@dataclass(frozen=True)
class MemoryTokens(Buildable):
    """Learned vectors [count, D] before a stack's embedded tokens, equal in every row.

    Rows must not be packed: the vectors would pass information between examples.

    Source: Burtsev et al. 2020 (arXiv:2006.11527); t5-experiments, `num_memory_tokens`.
    """

    count: int

    def run(self, module: Built, x_BLD: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
        if rows.position_BL is not None:
            raise ValueError("memory_tokens need rows of one example: they cannot be packed")
        batch, width = len(x_BLD), x_BLD.shape[-1]
        start, axes = module.shared.parametrisation.embedding(), ("unmodeled", "embed")
        vectors_ND = parameter(module, TABLE, "embedding", start, axes, (self.count, width))
        memory_BND = jnp.broadcast_to(vectors_ND.astype(x_BLD.dtype), (batch, self.count, width))
        ones_BN = jnp.ones((batch, self.count), rows.segment_BL.dtype)
        segment_BL = jnp.concatenate([ones_BN, rows.segment_BL], axis=1)
        return jnp.concatenate([memory_BND, x_BLD], axis=1), Rows(segment_BL)


def part(config: Any, count: int) -> StackPart:
    front = MemoryTokens(count)
    return StackPart("memory_embedder", front=front, lengthening=count, encoder_only=True)
