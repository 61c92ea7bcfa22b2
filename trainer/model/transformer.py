"""The transformer that runs a `ModelSpec`, with T5X's parameter names.

Dimensions: B batch, L query length, S key length, D model, H heads, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.core import Tracer

from trainer.model.apart import Apart
from trainer.model.cache import Cache
from trainer.model.embedding import RowClassifier, TokenEmbedder
from trainer.model.feedforward import SOWN, Sown, sown_of
from trainer.model.layers import stack_facts, stack_layers
from trainer.model.masks import Rows, decoder_rows, encoder_rows
from trainer.model.parameters import ParameterFacts, described
from trainer.model.paths import named
from trainer.model.spec import EncoderSpec, ModelSpec
from trainer.model.stack import Memory, Stack

# Nested dicts under T5X's names, which hold arrays or facts about arrays.
Tree = dict[str, Any]
# T5X's features by name (`encoder_input_tokens`, ...): int [B, L] arrays.
Batch = Mapping[str, Array]


class Transformer(nn.Module):
    """Maps a batch to float32 logits [B, L, V].

    The batch holds T5X's features as int arrays: `decoder_input_tokens` and
    `decoder_target_tokens` [B, L] (targets only mark which positions hold tokens);
    `encoder_input_tokens` [B, S] with an encoder; `encoder_segment_ids` and `decoder_segment_ids`
    in packed rows; `decoder_causal_attention`, 1 on a fully visible prefix. Other features are
    ignored. Logits at targets of 0 are meaningless.

    With `deterministic=False` and a dropout rate above 0, `apply` needs `rngs={"dropout": key}`.
    """

    spec: ModelSpec

    def setup(self) -> None:
        spec = self.spec
        if spec.shared_embedding:
            self.token_embedder = TokenEmbedder(spec.shared)
        if spec.encoder is not None:
            shared = spec.shared_of_encoder or spec.shared
            self.encoder = Stack(spec.encoder, shared, "encoder")
            for part in spec.encoder.parts:
                if part.front is not None:
                    setattr(self, part.name, part.front.build(shared))
        self.decoder = Stack(spec.decoder, spec.shared, "decoder")

    def __call__(self, batch: Batch, deterministic: bool = True) -> Array:
        embedder = memory = embedded_BLD = None
        tokens_BL = batch["decoder_input_tokens"]
        if self.spec.encoder is not None and not self.spec.shared_embedding:
            memory = self._memory(batch, deterministic)
        elif self.spec.encoder is not None:
            embedder = self.token_embedder
            # One lookup for both stacks: two lookups would add two gradients of the table.
            source_BS = batch["encoder_input_tokens"]
            both_BSLD = embedder(jnp.concatenate([source_BS, tokens_BL], axis=1))
            embedded_BSD, embedded_BLD = jnp.split(both_BSLD, [source_BS.shape[1]], axis=1)
            memory = self._memory(batch, deterministic, embedded_BSD)
        rows = decoder_rows(batch)
        return self.decoder(tokens_BL, rows, embedder, memory, deterministic, embedded_BLD)

    def encode(self, batch: Batch, deterministic: bool = True) -> Array:
        """Returns the encoder's last states, [B, S, D] in the model's dtype.

        Call `model.apply({"params": params}, batch, method="encode")`. Memory tokens come first;
        dropped tokens have no states.
        """
        return self._memory(batch, deterministic).states_BSD

    def remember(self, batch: Batch) -> Memory:
        """Returns the encoder's output for `next_logits`."""
        return self._memory(batch, deterministic=True)

    def next_logits(
        self,
        tokens_BL: Array,
        rows: Rows,
        memory: Memory | None,
        last_B: Array,
        cache: Cache | None = None,
    ) -> Array:
        """Returns float32 logits [B, V] of the token after position `last_B` of each row.

        `memory` comes from `remember`. Without `cache`, `tokens_BL` are whole rows; with it, pass
        `mutable=[CACHE, FIXED]` to fill it from a prompt, then `mutable=[CACHE]` for each token.
        """
        embedder = self._embedder
        logits_B1V = self.decoder(
            tokens_BL, rows, embedder, memory, True, cache=cache, last_B=last_B
        )
        return logits_B1V[:, 0]

    @property
    def _embedder(self) -> TokenEmbedder | None:
        """The embedding that both stacks share; None if each keeps its own."""
        return self.token_embedder if self.spec.shared_embedding else None

    def _memory(
        self, batch: Batch, deterministic: bool, embedded_BSD: Array | None = None
    ) -> Memory:
        tokens_BS, rows = batch["encoder_input_tokens"], encoder_rows(batch)
        embedder = self._embedder
        assert self.spec.encoder is not None
        for part in self.spec.encoder.parts:
            if part.front is not None:
                if embedded_BSD is None and embedder is not None:
                    embedded_BSD = embedder(tokens_BS)
                embedded_BSD, rows = getattr(self, part.name)(embedded_BSD, rows)
        return self.encoder(tokens_BS, rows, embedder, None, deterministic, embedded_BSD)


class Predictions(NamedTuple):
    """Output of an encoder-only model: float32 logits of tokens [B, L, V] and rows [B, C]."""

    logits_BLV: Array
    row_logits_BC: Array


class Encoder(nn.Module):
    """An encoder-only model: maps a batch to `Predictions`.

    The batch holds int arrays [B, L]: `encoder_input_tokens`, 0 where there is no token;
    optionally `encoder_token_types` (default 0); in packed rows `encoder_segment_ids` and
    optionally `encoder_positions`. Other features are ignored. For dropout see `Transformer`.
    """

    spec: EncoderSpec

    def setup(self) -> None:
        spec = self.spec
        self.token_embedder = TokenEmbedder(spec.shared)
        self.encoder = Stack(spec.encoder, spec.shared, "encoder")
        self.order_head = RowClassifier(spec.shared)

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> Predictions:
        y_BLD = self.encode(batch, deterministic)
        logits_BLV = self.spec.logits(y_BLD, self.token_embedder, self.spec.shared)
        return Predictions(logits_BLV, self.order_head(y_BLD))

    def encode(self, batch: Batch, deterministic: bool = True) -> Array:
        """Returns the last states, [B, L, D] in the model's dtype."""
        tokens_BL, rows = batch["encoder_input_tokens"], encoder_rows(batch)
        return self.encoder(tokens_BL, rows, self.token_embedder, None, deterministic).states_BSD


class SownLogits(NamedTuple):
    """Output of a model whose layers sow: float32 logits [B, L, V], and losses with metrics."""

    logits_BLV: Array
    sown: Sown


def run_model(
    model: Transformer | Encoder, params: Tree, batch: Batch, training_key: Array | None = None
) -> Array | SownLogits | Predictions:
    """Returns a batch's output; `training_key` turns on dropout and all that is random."""
    sows = isinstance(model, Transformer) and model.spec.sown is not None
    random = training_key is not None and (model.spec.shared.dropout_rate > 0 or sows)
    arguments: dict[str, Any] = {"deterministic": not random}
    if random:
        arguments["rngs"] = {"dropout": training_key}
    if not sows:
        return cast(Any, model.apply({"params": params}, batch, **arguments))
    logits_BLV, variables = model.apply({"params": params}, batch, mutable=[SOWN], **arguments)
    return SownLogits(logits_BLV, sown_of(variables[SOWN]))


def rounded_kernels(spec: ModelSpec | EncoderSpec, params: Tree) -> Tree:
    """Returns `params` with kernels in the model's dtype; other parameters stay float32.

    The model rounds them anyway. Rounding beforehand does so once instead of in each microbatch
    and scan pass, and halves the bytes gathered from other devices.
    """
    dtype = spec.shared.dtype

    def rounded(facts: ParameterFacts, param: Array) -> Array:
        return param.astype(dtype) if facts.use.rounded else param

    return jax.tree.map(rounded, parameter_tree(spec), params)


def build_model(spec: ModelSpec | EncoderSpec) -> Transformer | Encoder:
    """Returns the module that runs `spec`."""
    return Encoder(spec) if isinstance(spec, EncoderSpec) else Transformer(spec)


def init_params(spec: ModelSpec | EncoderSpec, key: Array) -> Tree:
    """Returns initial parameters: a nested dict of float32 arrays under T5X's names.

    Pure and traceable (`jax.jit` with `out_shardings`). A scanned model gets the unscanned
    model's parameters, stacked.
    """
    # One program for all draws takes XLA long to compile.
    return _drawn(spec, key) if isinstance(key, Tracer) else Apart(lambda: _drawn(spec, key))()


def parameter_facts(spec: ModelSpec | EncoderSpec) -> dict[str, ParameterFacts]:
    """Returns shape, logical axes and use of each parameter by path, without allocating."""
    return named(parameter_tree(spec))


def logical_axes(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with a `PartitionSpec` of T5X's logical axes at each leaf.

    For instance `PartitionSpec('embed', 'mlp')`, or in a scanned model ('embed', 'layers', 'mlp').
    """
    return jax.tree.map(lambda facts: facts.axes, parameter_tree(spec))


def decayed(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with True where weight decay applies by default."""
    return jax.tree.map(lambda facts: facts.use.decays, parameter_tree(spec))


@lru_cache
def parameter_tree(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with the `ParameterFacts` of each tensor."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    facts = described(jax.eval_shape(lambda key: _init(_unscanned(spec), key), key))
    return stack_facts(facts) if spec.shared.scan_layers else facts


def _unscanned(spec: ModelSpec | EncoderSpec) -> ModelSpec | EncoderSpec:
    return spec.with_settings(scan_layers=False, remat="none")


def _drawn(spec: ModelSpec | EncoderSpec, key: Array) -> Tree:
    params = nn.unbox(_init(_unscanned(spec), key))
    return stack_layers(params) if spec.shared.scan_layers else params


# No parameter depends on the batch's shapes.
def _init(spec: ModelSpec | EncoderSpec, key: Array) -> Tree:
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(names, jnp.ones((1, 1), jnp.int32))
    return build_model(spec).init({"params": key}, batch)["params"]
