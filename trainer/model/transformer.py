"""The transformer that runs a `ModelSpec`; the names of its parameters are T5X's.

Dimensions: B batch, L query length, S key length, D model, H heads, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.cache import Cache, positions_at
from trainer.model.dense import Shared, rows_divided
from trainer.model.dropping import take, take_rows, take_view
from trainer.model.embedding import MemoryTokens, RowClassifier, TokenEmbedder
from trainer.model.given_attention import KeysAndValues, entries_view
from trainer.model.layers import rematerialised, scan, stack_facts, stack_layers
from trainer.model.masks import Rows, decoder_rows, encoder_rows, predicate
from trainer.model.memory import Memory, left_by, merged_view, normalised, watched_names
from trainer.model.mixers import View
from trainer.model.norms import NormPlacement, Sublayer
from trainer.model.parameters import ParameterFacts, described
from trainer.model.paths import named
from trainer.model.positions import Position, Positions
from trainer.model.spec import EncoderSpec, LayerSpec, ModelSpec, StackSpec
from trainer.model.switch import ROUTING, Routing, routing_of

# Nested dicts under T5X's names, of arrays or of facts about them.
Tree = dict[str, Any]
# `encoder_input_tokens`, `decoder_input_tokens`, ... : int [B, L] arrays under T5X's names.
Batch = Mapping[str, jax.Array]


# The name of the sublayer that looks at the encoder.
CROSS_ATTENTION = "encoder_decoder_attention"


class _Names(NamedTuple):
    """T5X's names of a layer's first sublayer, which differ between the two stacks.

    The prefix of the norm's placement, "pre" in T5X, goes before the norm's name.
    """

    mixer_norm: str
    mixer: str


_NAMES = MappingProxyType(
    {
        "encoder": _Names("attention_layer_norm", "attention"),
        "decoder": _Names("self_attention_layer_norm", "self_attention"),
    }
)


class Flow(NamedTuple):
    """The states of a stack between two layers.

    `index_BL` are the positions that are left of the stack's rows; None: all of them.
    """

    x_BLD: jax.Array
    index_BL: jax.Array | None = None


class Layer(nn.Module):
    """One layer: mixer, then those of its spec: cross mixer, look at a database, feed-forward.

    `position` is the layer's own position scheme; None if the layers of a stack share one.
    """

    spec: LayerSpec
    shared: Shared
    names: _Names
    position: Position | None

    @nn.compact
    def __call__(
        self,
        flow: Flow,
        source: Any,
        view: View,
        cross_view: View | None,
        database: KeysAndValues | None,
        deterministic: bool,
    ) -> tuple[Flow, Any]:
        """Returns the states, and what the layer leaves for a decoder.

        Args:
          source: what the cross mixer looks at.
          view: that of all positions of the stack's rows.
        """
        spec, shared, (x_BLD, index_BL) = self.spec, self.shared, flow
        if self.position is not None:
            own = self.position.build(shared, spec.mixer.num_heads or 1, self.position.name)
            view = view._replace(positions=positions_at(own, view.cache, view.rows))
        if index_BL is not None:
            view = take_view(view, index_BL)
        if spec.merges_memory:
            assert cross_view is not None
            view = merged_view(view, cross_view)
        watched: dict[str, Any] = dict.fromkeys(watched_names(spec.leaves, spec.dropping))
        view, rows = view._replace(watched=watched), view.rows

        def dropout(y_BLD: jax.Array) -> jax.Array:
            return shared.dropout()(y_BLD, deterministic)

        def norm(name: str, placement: NormPlacement) -> Sublayer:
            return spec.norm.build(shared, f"{placement.prefix}_{name}")

        mixer = spec.mixer.build(shared, self.names.mixer)

        def mix(y_BLD: jax.Array) -> jax.Array:
            merges = spec.merges_memory and (view.cache is None or view.cache.filling)
            both = jnp.concatenate([source, y_BLD], axis=1) if merges else y_BLD
            return mixer(y_BLD, both, view, deterministic)

        first, last = spec.norm_placement, spec.feed_forward_norm_placement or spec.norm_placement
        sublayers = [(self.names.mixer_norm, spec.mixer_norm_placement or first, mix)]
        if spec.cross_mixer is not None:
            cross = spec.cross_mixer.build(shared, CROSS_ATTENTION)
            look = partial(cross, source_BSD=source, view=cross_view)
            name = "cross_attention_layer_norm"
            sublayers.append((name, first, partial(look, deterministic=deterministic)))
        if spec.database_mixer is not None:
            assert database is not None
            read = spec.database_mixer.build(shared, "database_attention")
            entries = entries_view(database, rows)
            look = partial(read, source_BSD=database, view=entries)
            name = "database_layer_norm"
            sublayers.append((name, first, partial(look, deterministic=deterministic)))
        feed_forward = spec.feed_forward.build(shared, "mlp")
        if feed_forward is not None:
            kept = {} if spec.feed_forward.pointwise else {"cache": view.cache}
            run = partial(feed_forward, deterministic=deterministic, **kept)

            def feed(y_BLD: jax.Array) -> jax.Array:
                return cast(jax.Array, run(y_BLD, rows=rows))  # rows that are left

            sublayers.append(("mlp_layer_norm", last, feed))
        if spec.parallel == "none":
            for name, placement, sublayer in sublayers:
                x_BLD = placement(x_BLD, norm(name, placement), sublayer, dropout)
                if spec.dropping is not None and sublayer is mix:
                    kept_BM = spec.dropping.kept(watched["weights_BHLS"], rows.segment_BL > 0)
                    if kept_BM.shape != rows.segment_BL.shape:
                        x_BLD, rows = take(x_BLD, kept_BM), take_rows(rows, kept_BM)
                        index_BL = kept_BM if index_BL is None else take(index_BL, kept_BM)
            return Flow(x_BLD, index_BL), left_by(spec.leaves, x_BLD, watched)
        if spec.parallel == "one_norm":
            y_BLD = norm(self.names.mixer_norm, first)(x_BLD)
            outputs = [dropout(sublayer(y_BLD)) for _, _, sublayer in sublayers]
        else:
            outputs = [
                dropout(sublayer(norm(name, placement)(x_BLD)))
                for name, placement, sublayer in sublayers
            ]
        x_BLD = sum(outputs, start=x_BLD)
        return Flow(x_BLD), left_by(spec.leaves, x_BLD, watched)


class Stack(nn.Module):
    """Maps tokens to a `Memory`, or to logits if the spec has a logits slot."""

    spec: StackSpec
    shared: Shared
    role: str  # "encoder" or "decoder": only names depend on it

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        rows: Rows,
        embedder: TokenEmbedder | None,
        memory: Memory | None,
        deterministic: bool,
        embedded_BLD: jax.Array | None = None,
        cache: Cache | None = None,
        last_B: jax.Array | None = None,
    ) -> Any:
        """Returns the states, or the logits of all positions, or with `last_B` of one of each row.

        With `cache` the rows are the prompt or the next token, as `Cache` says.
        """
        spec, shared = self.spec, self.shared
        if embedder is None:  # a model of one stack keeps the table inside it
            embedder = TokenEmbedder(shared, name="token_embedder")

        # Masks and positions are the same in all layers: built once, in their smallest shapes.
        if cache is None or cache.seen_BS is None:
            source_rows, mask_BLS = rows, spec.mask(rows, rows)
        else:
            source_rows = cache.source_rows()
            mask_BLS = cache.seen_BS[:, None]
        cross_view = None
        # Layers with different numbers of heads have a table of biases for each number.
        heads = sorted({layer.mixer.num_heads for layer in spec.layers} or {1}, reverse=True)

        def positions_for(num_heads: int, name: str) -> Positions:
            scheme = spec.position.build(shared, num_heads, name)
            return positions_at(scheme, cache, rows)

        own = spec.position if spec.position.per_layer else None
        positions = Positions() if own else positions_for(heads[0], spec.position.name)
        positions_of = dict.fromkeys(heads, positions)
        if positions.bias_HLS is not None:
            for other in heads[1:]:
                positions_of[other] = positions_for(other, f"{spec.position.name}_{other}")

        if spec.cross_mask is not None and memory is not None:
            memory_rows = memory.rows
            cross_mask_BLS = spec.cross_mask(rows, memory_rows)
            angles = Positions()
            if spec.position.cross:
                scheme = spec.position.build(shared, heads[0], f"{spec.position.name}_of_memory")
                sources = memory_rows.segment_BL.shape[1]
                source_angle = scheme(sources, sources, memory_rows.position_BL).angle_BLC
                angles = Positions(angle_BLC=positions.angle_BLC, source_angle_BSC=source_angle)
            cross_view = View(
                cross_mask_BLS,
                angles,
                rows,
                memory_rows,
                predicate(spec.cross_mask),
                cache=None if cache is None else cache._replace(fixed=True),
            )

        x_BLD = embedder(tokens_BL) if embedded_BLD is None else embedded_BLD
        if positions.embedding_BLD is not None:
            x_BLD += positions.embedding_BLD
        x_BLD = shared.dropout()(spec.embedding(x_BLD, rows, shared), deterministic)
        x_BLD = rows_divided(x_BLD)

        database = None
        if spec.database is not None:
            database = spec.database.build(shared, "database")(len(tokens_BL))

        def run_layer(layer: Layer, flow: Flow, source: Any = None) -> tuple[Flow, Any]:
            if source is None and memory is not None:
                source = memory.states_BSD
            positions = positions_of[layer.spec.mixer.num_heads]
            view = View(mask_BLS, positions, rows, source_rows, predicate(spec.mask), cache=cache)
            flow, left = layer(flow, source, view, cross_view, database, deterministic)
            return flow._replace(x_BLD=rows_divided(flow.x_BLD)), left

        run = rematerialised(run_layer, shared.remat, shared.scan_layers)
        flow, left = Flow(x_BLD), []
        if shared.scan_layers:
            if len(set(spec.layers)) > 1:
                raise ValueError(f"the layers of the {self.role} differ: a scan cannot run them")
            layer = Layer(spec.layers[0], shared, _NAMES[self.role], own, name=self.role)
            flow = scan(run, layer, flow, len(spec.layers))
        else:
            for index, layer_spec in enumerate(spec.layers):
                layer = Layer(layer_spec, shared, _NAMES[self.role], own, name=f"layers_{index}")
                source = [memory.layers[index]] if memory is not None and memory.layers else []
                flow, each = run(layer, flow, *source)
                left += [] if each is None else [each]
        last_norm = spec.norm.build(shared, f"{self.role}_norm")
        if last_B is not None:
            flow = Flow(take(flow.x_BLD, last_B[:, None]))
        y_BLD = last_norm(flow.x_BLD)
        # T5X draws for every element of an encoder's output, but for whole rows before logits.
        dropout = shared.dropout(broadcast_length=spec.logits is not None)
        y_BLD = dropout(y_BLD, deterministic or not spec.output_dropout)
        if spec.logits is not None:
            return spec.logits(y_BLD, embedder, shared)
        if flow.index_BL is not None:
            rows = take_rows(rows, flow.index_BL)
        return Memory(y_BLD, rows, normalised(tuple(left), last_norm))


class Transformer(nn.Module):
    """Maps a batch to float32 logits [B, L, V].

    The batch holds T5X's features as int arrays: `decoder_input_tokens` and
    `decoder_target_tokens` [B, L] (targets only say where tokens are); `encoder_input_tokens`
    [B, S] if there is an encoder; `encoder_segment_ids` and `decoder_segment_ids` if rows are
    packed; `decoder_causal_attention`, 1 on the tokens of a fully visible prefix, if there is one.
    Other features are ignored. Logits where the target is 0 are meaningless.

    With `deterministic=False` and a dropout rate above 0, `apply` needs `rngs={"dropout": key}`.
    """

    spec: ModelSpec

    def setup(self) -> None:
        spec = self.spec
        if spec.encoder is not None:
            self.token_embedder = TokenEmbedder(spec.shared)
            self.encoder = Stack(spec.encoder, spec.shared, "encoder")
            if spec.memory_tokens:
                self.memory_embedder = MemoryTokens(spec.memory_tokens, spec.shared)
        self.decoder = Stack(spec.decoder, spec.shared, "decoder")

    def __call__(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        embedder = memory = embedded_BLD = None
        tokens_BL = batch["decoder_input_tokens"]
        if self.spec.encoder is not None:
            embedder = self.token_embedder
            # Looked up together: two gradients of the table would be made and added.
            source_BS = batch["encoder_input_tokens"]
            both_BSLD = embedder(jnp.concatenate([source_BS, tokens_BL], axis=1))
            embedded_BSD, embedded_BLD = jnp.split(both_BSLD, [source_BS.shape[1]], axis=1)
            memory = self._memory(batch, deterministic, embedded_BSD)
        rows = decoder_rows(batch)
        logits_BLV = self.decoder(tokens_BL, rows, embedder, memory, deterministic, embedded_BLD)
        return cast(jax.Array, logits_BLV)

    def encode(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        """Returns the encoder's last states, [B, S, D] in the model's dtype.

        Call it as `model.apply({"params": params}, batch, method="encode")`. Memory tokens come
        first; tokens that the encoder drops have no states.
        """
        return self._memory(batch, deterministic).states_BSD

    def remember(self, batch: Batch) -> Memory:
        """Returns the encoder's output for `next_logits`."""
        return self._memory(batch, deterministic=True)

    def next_logits(
        self,
        tokens_BL: jax.Array,
        rows: Rows,
        memory: Memory | None,
        last_B: jax.Array,
        cache: Cache | None = None,
    ) -> jax.Array:
        """Returns float32 logits [B, V] of the token after position `last_B` of each row.

        Args:
          tokens_BL: the decoder's inputs.
          rows: facts about their positions.
          memory: the output of `remember`; None in a decoder-only model.
          last_B: an index of `tokens_BL` for each row.
          cache: None if `tokens_BL` are whole rows. Otherwise call it with `mutable=[CACHE, FIXED]`
            to fill the cache by a prompt, and then with `mutable=[CACHE]` for each next token.
        """
        embedder = None if self.spec.encoder is None else self.token_embedder
        logits_B1V = self.decoder(
            tokens_BL, rows, embedder, memory, True, cache=cache, last_B=last_B
        )
        return cast(jax.Array, logits_B1V)[:, 0]

    def _memory(
        self, batch: Batch, deterministic: bool, embedded_BSD: jax.Array | None = None
    ) -> Memory:
        """Returns the encoder's output; `embedded_BSD` are embedded tokens if looked up already."""
        tokens_BS, rows = batch["encoder_input_tokens"], encoder_rows(batch)
        embedder = self.token_embedder
        if self.spec.memory_tokens:
            if embedded_BSD is None:
                embedded_BSD = embedder(tokens_BS)
            embedded_BSD, rows = self.memory_embedder(embedded_BSD, rows)
        memory = self.encoder(tokens_BS, rows, embedder, None, deterministic, embedded_BSD)
        return cast(Memory, memory)


class Predictions(NamedTuple):
    """The output of an encoder-only model: float32 logits of tokens [B, L, V] and rows [B, C]."""

    logits_BLV: jax.Array
    row_logits_BC: jax.Array


class Encoder(nn.Module):
    """An encoder-only model: maps a batch to `Predictions`.

    The batch holds int arrays [B, L]: `encoder_input_tokens`, 0 where there is no token;
    optionally `encoder_token_types` (all 0 by default); and, if rows are packed,
    `encoder_segment_ids` and optionally `encoder_positions`. Other features are ignored.

    With `deterministic=False` and a dropout rate above 0, `apply` needs `rngs={"dropout": key}`.
    """

    spec: EncoderSpec

    def setup(self) -> None:
        spec = self.spec
        self.token_embedder = TokenEmbedder(spec.shared)
        self.encoder = Stack(spec.encoder, spec.shared, "encoder")
        self.order_head = RowClassifier(spec.row_classes, spec.shared)

    @nn.compact
    def __call__(self, batch: Batch, deterministic: bool = True) -> Predictions:
        y_BLD = self.encode(batch, deterministic)
        logits_BLV = self.spec.logits(y_BLD, self.token_embedder, self.spec.shared)
        return Predictions(logits_BLV, self.order_head(y_BLD))

    def encode(self, batch: Batch, deterministic: bool = True) -> jax.Array:
        """Returns the last states, [B, L, D] in the model's dtype."""
        tokens_BL, rows = batch["encoder_input_tokens"], encoder_rows(batch)
        memory = self.encoder(tokens_BL, rows, self.token_embedder, None, deterministic)
        return cast(Memory, memory).states_BSD


class RoutedLogits(NamedTuple):
    """The output of a model with Switch layers: float32 logits [B, L, V], and routing sums."""

    logits_BLV: jax.Array
    routing: Routing


def run_model(
    model: Transformer | Encoder, params: Tree, batch: Batch, training_key: jax.Array | None = None
) -> jax.Array | RoutedLogits | Predictions:
    """Returns logits, `RoutedLogits` or `Predictions` of a batch.

    With `training_key`, dropout and the jitter of routers are drawn from it, and experts have
    their capacity of training.
    """
    routed = isinstance(model, Transformer) and model.spec.routed
    random = training_key is not None and (model.spec.shared.dropout_rate > 0 or routed)
    arguments: dict[str, Any] = {"deterministic": not random}
    if random:
        arguments["rngs"] = {"dropout": training_key}
    if not routed:
        return cast(Any, model.apply({"params": params}, batch, **arguments))
    logits_BLV, variables = model.apply({"params": params}, batch, mutable=[ROUTING], **arguments)
    return RoutedLogits(logits_BLV, routing_of(variables[ROUTING]))


def rounded_kernels(spec: ModelSpec | EncoderSpec, params: Tree) -> Tree:
    """Returns `params` with kernels in the model's dtype; others stay float32.

    The model rounds them anyway. Rounded first, they are rounded once, not in each microbatch and
    each pass of a scan, and gathered from other devices at half the size.
    """
    dtype = spec.shared.dtype

    def rounded(facts: ParameterFacts, param: jax.Array) -> jax.Array:
        return param.astype(dtype) if facts.use.rounded else param

    return jax.tree.map(rounded, _facts(spec), params)


def build_model(spec: ModelSpec | EncoderSpec) -> Transformer | Encoder:
    """Returns the module that runs `spec`."""
    return Encoder(spec) if isinstance(spec, EncoderSpec) else Transformer(spec)


def init_params(spec: ModelSpec | EncoderSpec, key: jax.Array) -> Tree:
    """Returns initial parameters: a plain nested dict of float32 arrays under T5X's names.

    A pure function of `spec` and `key` that can be traced (`jax.jit` with `out_shardings`). A
    scanned model gets the parameters of the unscanned one, stacked.
    """
    params = nn.unbox(_init(_unscanned(spec), key))
    return stack_layers(params) if spec.shared.scan_layers else params


def parameter_facts(spec: ModelSpec | EncoderSpec) -> dict[str, ParameterFacts]:
    """Returns shape, logical axes and use of each parameter by its path. Nothing is allocated."""
    return named(_facts(spec))


def logical_axes(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with a `PartitionSpec` of logical axis names at each leaf.

    For instance `PartitionSpec('embed', 'mlp')`, or `PartitionSpec('embed', 'layers', 'mlp')` in a
    scanned model. The names are T5X's; `flax.linen.logical_to_mesh` maps them to a mesh.
    """
    return jax.tree.map(lambda facts: facts.axes, _facts(spec))


def parameter_tree(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with the `ParameterFacts` of each tensor."""
    return _facts(spec)


def decayed(spec: ModelSpec | EncoderSpec) -> Tree:
    """Returns the tree of `init_params` with True where weight decay applies by default."""
    return jax.tree.map(lambda facts: facts.use.decays, _facts(spec))


@lru_cache
def _facts(spec: ModelSpec | EncoderSpec) -> Tree:
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    facts = described(jax.eval_shape(lambda key: _init(_unscanned(spec), key), key))
    return stack_facts(facts) if spec.shared.scan_layers else facts


def _unscanned(spec: ModelSpec | EncoderSpec) -> ModelSpec | EncoderSpec:
    return replace(spec, shared=replace(spec.shared, scan_layers=False, remat="none"))


# Jitted, so that initialising does not run the model: its output is unused. No parameter depends
# on the shapes of the batch it is traced with.
@partial(jax.jit, static_argnums=0)
def _init(spec: ModelSpec | EncoderSpec, key: jax.Array) -> Tree:
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(names, jnp.ones((1, 1), jnp.int32))
    return build_model(spec).init({"params": key}, batch)["params"]
