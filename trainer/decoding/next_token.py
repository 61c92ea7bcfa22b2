"""Computes the next token's logits, from a cache of earlier tokens or from the whole row.

Dimensions: B batch, S encoder length, P prompt length, T places in a row, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from trainer.model.cache import CACHE, FIXED, Cache
from trainer.model.config import ModelConfig
from trainer.model.masks import Rows, known
from trainer.model.spec import ModelSpec, StackSpec
from trainer.model.stack import Memory
from trainer.model.transformer import Transformer

# Nested dicts and tuples of arrays.
Tree = Any


class Prompts(NamedTuple):
    """A batch of prompts, int32; decoder-only models have no encoder inputs."""

    decoder_BP: jax.Array | np.ndarray  # places after the prompt's end are not read
    length_B: jax.Array | np.ndarray  # number of decoder inputs; 0 for a padding row
    encoder_BS: jax.Array | np.ndarray | None = None
    # 1 at encoder inputs, 0 after their end; None where id 0 is padding.
    segment_BS: jax.Array | np.ndarray | None = None


@dataclass(frozen=True)
class NextToken:
    """A model as searches see it.

    Searches copy and reorder the rows of its trees of arrays [B, …]: `kept` stays the same, `state`
    changes with every token.

    Attributes:
      width: number of places in a prompt, P.
      new_tokens: the largest number of new tokens.
      prefix: True if the tokens of a prompt attend to one another in both directions.
    """

    model: Transformer
    width: int
    new_tokens: int
    prefix: bool = False

    def start(self, params: Tree, prompts: Prompts) -> tuple[jax.Array, Tree, Tree]:
        """Returns the logits [B, V] of the first new token, `kept` and `state`."""
        raise NotImplementedError

    def step(
        self, params: Tree, kept: Tree, state: Tree, token_B: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Returns the logits [B, V] after new token `number` (from 0), and the new state."""
        raise NotImplementedError


def uncached_part(config: ModelConfig, spec: ModelSpec) -> str | None:
    """Returns the part of a decoder that cannot be cached; None if all parts can."""
    mask = known(spec.decoder.mask)
    if mask is None or not mask.causal:
        return "the mask"
    facts = config.mixer_facts
    return config.part("mixer").name if facts.decodes and not facts.caches else None


def for_decoding(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with separate layers, in which no row depends on another."""

    def apart(stack: StackSpec, in_decoder: bool) -> StackSpec:
        layers = (
            replace(layer, feed_forward=layer.feed_forward.decoding(in_decoder))
            for layer in stack.layers
        )
        return replace(stack, layers=tuple(layers))

    return replace(
        spec.with_settings(scan_layers=False, remat="none"),
        decoder=apart(spec.decoder, True),
        encoder=spec.encoder and apart(spec.encoder, False),
    )


def _remembered(model: Transformer, params: Tree, prompts: Prompts) -> Memory | None:
    if prompts.encoder_BS is None:
        return None
    batch = {"encoder_input_tokens": prompts.encoder_BS, "encoder_segment_ids": prompts.segment_BS}
    return cast(Memory, model.apply({"params": params}, batch, method="remember"))


class _Kept(NamedTuple):
    """Constants of rows: prompt lengths, encoder output and, if cached, the collection FIXED."""

    length_B: jax.Array
    memory: Memory | None
    fixed: Tree = None


class Cached(NextToken):
    """A model without an `uncached_part`, which caches keys, values and convolution inputs.

    Prompts are aligned to the right, so that all rows write to the same slot.
    """

    @property
    def _slots(self) -> int:
        """Places in a row, excluding the last new token's, to which nothing attends."""
        return self.width + self.new_tokens - 1

    def start(self, params: Tree, prompts: Prompts) -> tuple[jax.Array, Tree, Tree]:
        memory = _remembered(self.model, params, prompts)
        position_BP = jnp.arange(self.width) - (self.width - prompts.length_B)[:, None]
        one_BP = (position_BP >= 0).astype(jnp.int32)
        position_BP = jnp.maximum(position_BP, 0)
        input_BP = jnp.take_along_axis(prompts.decoder_BP, position_BP, axis=1)
        rows = Rows(one_BP, one_BP if self.prefix else None, position_BP, input_BL=input_BP)
        logits_BV, collections = self.model.apply(
            {"params": params},
            input_BP,
            rows,
            memory,
            jnp.full(len(input_BP), self.width - 1),
            Cache(self._slots),
            method="next_logits",
            mutable=[CACHE, FIXED],
        )
        kept = _Kept(jnp.asarray(prompts.length_B), memory, collections.get(FIXED, {}))
        return cast(jax.Array, logits_BV), kept, collections[CACHE]

    def step(
        self, params: Tree, kept: Tree, state: Tree, token_B: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, Tree]:
        index = self.width + number
        slot_T = jnp.arange(self._slots)
        seen_BT = (slot_T >= (self.width - kept.length_B)[:, None]) & (slot_T <= index)
        position_B1 = (kept.length_B + number)[:, None]
        one_B1 = jnp.ones_like(position_B1)
        # New tokens belong to no prefix.
        rows = Rows(one_B1, position_BL=position_B1, input_BL=token_B[:, None])
        logits_BV, collections = self.model.apply(
            {"params": params, CACHE: state, FIXED: kept.fixed},
            token_B[:, None],
            rows,
            kept.memory,
            jnp.zeros_like(token_B),
            Cache(len(slot_T), index, seen_BT),
            method="next_logits",
            mutable=[CACHE],
        )
        return cast(jax.Array, logits_BV), collections[CACHE]


class Uncached(NextToken):
    """A model that recomputes the whole row for every token."""

    def start(self, params: Tree, prompts: Prompts) -> tuple[jax.Array, Tree, Tree]:
        kept = _Kept(jnp.asarray(prompts.length_B), _remembered(self.model, params, prompts))
        token_BT = jnp.pad(prompts.decoder_BP, ((0, 0), (0, self.new_tokens - 1)))
        return self._logits(params, kept, token_BT, kept.length_B), kept, token_BT

    def step(
        self, params: Tree, kept: Tree, state: Tree, token_B: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, Tree]:
        place_BT = jnp.arange(state.shape[1])[None]
        end_B = kept.length_B + number
        token_BT = jnp.where(place_BT == end_B[:, None], token_B[:, None], state)
        return self._logits(params, kept, token_BT, end_B + 1), token_BT

    def _logits(
        self, params: Tree, kept: _Kept, token_BT: jax.Array, length_B: jax.Array
    ) -> jax.Array:
        place_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
        one_BT = (place_BT < length_B[:, None]).astype(jnp.int32)
        prefix_BT = (place_BT < kept.length_B[:, None]).astype(jnp.int32) if self.prefix else None
        rows = Rows(one_BT, prefix_BT, input_BL=token_BT)
        logits_BV = self.model.apply(
            {"params": params},
            token_BT,
            rows,
            kept.memory,
            jnp.maximum(length_B - 1, 0),
            method="next_logits",
        )
        return cast(jax.Array, logits_BV)
