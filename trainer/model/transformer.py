"""The transformer that runs a `ModelSpec`; the names of its parameters are T5X's.

Dimensions: B batch, L query length, S key length, D model, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared
from trainer.model.embedding import TokenEmbedder
from trainer.model.masks import Rows, decoder_rows, encoder_rows
from trainer.model.norms import Sublayer
from trainer.model.spec import LayerSpec, ModelSpec, StackSpec

# Nested dicts of arrays, or of what stands for them, under T5X's names.
Tree = dict[str, Any]
# `encoder_input_tokens`, `decoder_input_tokens`, ... : int [B, L] arrays under T5X's names.
Batch = Mapping[str, jax.Array]


class _Names(NamedTuple):
    """T5X's names of a layer's first sublayer differ between the two stacks."""

    mixer_norm: str
    mixer: str


_NAMES = MappingProxyType(
    {
        "encoder": _Names("pre_attention_layer_norm", "attention"),
        "decoder": _Names("pre_self_attention_layer_norm", "self_attention"),
    }
)


class Layer(nn.Module):
    """One layer: mixer, cross mixer where the spec has one, feed-forward."""

    spec: LayerSpec
    shared: Shared
    names: _Names

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        memory_BSD: jax.Array | None,
        mask_BLL: jax.Array,
        cross_mask_BLS: jax.Array | None,
        bias_HLL: jax.Array,
        deterministic: bool,
    ) -> jax.Array:
        spec, shared = self.spec, self.shared

        def branch(x_BLD: jax.Array, norm_name: str, sublayer: Sublayer) -> jax.Array:
            def with_dropout(y_BLD: jax.Array) -> jax.Array:
                return shared.dropout()(sublayer(y_BLD), deterministic)

            return spec.norm_placement(x_BLD, spec.norm.build(shared, norm_name), with_dropout)

        mixer = spec.mixer.build(shared, self.names.mixer)
        x_BLD = branch(
            x_BLD,
            self.names.mixer_norm,
            lambda y_BLD: mixer(y_BLD, y_BLD, mask_BLL, bias_HLL, deterministic),
        )
        if spec.cross_mixer is not None:
            cross_mixer = spec.cross_mixer.build(shared, "encoder_decoder_attention")
            x_BLD = branch(
                x_BLD,
                "pre_cross_attention_layer_norm",
                lambda y_BLD: cross_mixer(y_BLD, memory_BSD, cross_mask_BLS, None, deterministic),
            )
        feed_forward = spec.feed_forward.build(shared, "mlp")
        return branch(x_BLD, "pre_mlp_layer_norm", lambda y_BLD: feed_forward(y_BLD, deterministic))


class Stack(nn.Module):
    """Tokens in; out come normalised states, or logits where the spec has a logits slot."""

    spec: StackSpec
    shared: Shared
    role: str  # "encoder" or "decoder": only names depend on it

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        rows: Rows,
        embedder: TokenEmbedder | None,
        memory_BSD: jax.Array | None,
        memory_rows: Rows | None,
        deterministic: bool,
    ) -> jax.Array:
        spec, shared = self.spec, self.shared
        if embedder is None:  # a model of one stack keeps the table inside it
            embedder = TokenEmbedder(shared, name="token_embedder")

        # Masks and bias are the same in all layers: built once, in their smallest shapes.
        length = tokens_BL.shape[1]
        mask_BLL = spec.mask(rows, rows)
        cross_mask_BLS = None
        if spec.cross_mask is not None and memory_rows is not None:
            cross_mask_BLS = spec.cross_mask(rows, memory_rows)
        num_heads = spec.layers[0].mixer.num_heads
        bias_HLL = spec.position.build(shared, num_heads, "relpos_bias")(length, length)

        x_BLD = shared.dropout()(embedder(tokens_BL), deterministic)
        for index, layer_spec in enumerate(spec.layers):
            layer = Layer(layer_spec, shared, _NAMES[self.role], name=f"layers_{index}")
            x_BLD = layer(x_BLD, memory_BSD, mask_BLL, cross_mask_BLS, bias_HLL, deterministic)
        y_BLD = spec.norm.build(shared, f"{self.role}_norm")(x_BLD)
        # T5X draws for every element of an encoder's output, but for whole rows before logits.
        dropout = shared.dropout(broadcast_length=spec.logits is not None)
        y_BLD = dropout(y_BLD, deterministic)
        return y_BLD if spec.logits is None else spec.logits(y_BLD, embedder, shared)


class Transformer(nn.Module):
    """Logits float32 [B, L, V] of a batch.

    The batch holds T5X's features as int arrays: `decoder_input_tokens` and
    `decoder_target_tokens` [B, L] (targets only say where tokens are), `encoder_input_tokens`
    [B, S] if there is an encoder; and where rows are packed `encoder_segment_ids`,
    `decoder_segment_ids`; and `decoder_causal_attention`, 1 on the tokens of a fully visible
    prefix. Other features are ignored. Logits where the target is 0 mean nothing.

    With `deterministic=False` and a dropout rate above 0, `apply` needs `rngs={"dropout": key}`.
    """

    spec: ModelSpec

    def setup(self) -> None:
        spec = self.spec
        if spec.encoder is not None:
            self.token_embedder = TokenEmbedder(spec.shared)
            self.encoder = Stack(spec.encoder, spec.shared, "encoder")
        self.decoder = Stack(spec.decoder, spec.shared, "decoder")

    def __call__(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        embedder = memory_BSD = memory_rows = None
        if self.spec.encoder is not None:
            embedder = self.token_embedder
            memory_BSD, memory_rows = self.encode(batch, deterministic), encoder_rows(batch)
        return self.decoder(
            batch["decoder_input_tokens"],
            decoder_rows(batch),
            embedder,
            memory_BSD,
            memory_rows,
            deterministic,
        )

    def encode(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        """What the decoder sees of the encoder: [B, S, D] in the model's dtype.

        Call it as `model.apply({"params": params}, batch, method="encode")`.
        """
        return self.encoder(
            batch["encoder_input_tokens"],
            encoder_rows(batch),
            self.token_embedder,
            None,
            None,
            deterministic,
        )


def init_params(spec: ModelSpec, key: jax.Array) -> Tree:
    """Initial parameters: a plain nested dict of float32 arrays under T5X's names.

    They are a pure function of `spec` and `key`, and can be traced (`jax.jit` with
    `out_shardings`).
    """
    return nn.unbox(_init(spec, key))


def logical_axes(spec: ModelSpec) -> Tree:
    """The tree of `init_params` with a `PartitionSpec` of T5X's logical axis names at each leaf.

    For instance `PartitionSpec('embed', 'mlp')`; `flax.linen.logical_to_mesh` maps it to a mesh.
    """
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return nn.get_partition_spec(jax.eval_shape(lambda key: _init(spec, key), key))


# Jitted, so that initialising does not run the model: its output is not asked for. No parameter
# depends on the shapes of the batch it is traced with.
@partial(jax.jit, static_argnums=0)
def _init(spec: ModelSpec, key: jax.Array) -> Tree:
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(names, jnp.ones((1, 1), jnp.int32))
    return Transformer(spec).init({"params": key}, batch)["params"]
