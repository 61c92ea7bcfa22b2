"""Model specs: every slot of a model filled with frozen data.

`model_spec` makes a `ModelSpec` of a `ModelConfig`: the configuration and its family's `facts` name
a part for each slot, and the tables here make it. A new variant is a new value in a slot of
`LayerSpec` or `StackSpec` and a name for it in a table; `transformer.py` does not change. A mixer
defined outside of this package is named by `register_mixer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from trainer.model import facts
from trainer.model.attention import DotProductAttention
from trainer.model.attention_parts import Roles, SummedHeads, ValuesRelu
from trainer.model.cdq import ConditionalQueryAttention
from trainer.model.config import ModelConfig
from trainer.model.convolution import ConvolutionBranch, HeadConvolution
from trainer.model.dense import Shared
from trainer.model.dropping import TokenDropping
from trainer.model.embedding import (
    DenseLogits,
    Embedding,
    Logits,
    PlainEmbedding,
    TiedLogits,
    TransformedLogits,
    TypedEmbedding,
)
from trainer.model.feedforward import FeedForward, Mlp
from trainer.model.given_attention import Database, GivenAttention
from trainer.model.layer_parts import FEED_FORWARDS, NORM_PLACEMENTS, halves
from trainer.model.masks import AllOf, AnyOf, BothInPrefix, Causal, Mask, SameSegment
from trainer.model.mixers import Mixer
from trainer.model.norms import (
    NoNorm,
    Norm,
    NormPlacement,
)
from trainer.model.positions import (
    Position,
)
from trainer.model.stack_parts import NORMS, PARAMETRISATIONS, POSITIONS
from trainer.model.switch import Switch
from trainer.model.synthesizer import DenseSynthesizer, LearnedLogits


@dataclass(frozen=True)
class LayerSpec:
    """The slots of one layer.

    `cross_mixer` is None if there is no encoder to look at, or if the mixer does: if
    `merges_memory`, its keys and values are the encoder's and then its own. `mixer_norm_placement`
    and `feed_forward_norm_placement` are None if they are `norm_placement`. `parallel` is one of
    `facts.PARALLEL_NAMES`. `database_mixer` is set if the stack has a database. `leaves` is what
    the layer leaves for the decoder's layer of its number, one of `facts.BY_LAYER`.
    """

    norm: Norm
    norm_placement: NormPlacement
    mixer: Mixer
    feed_forward: FeedForward
    cross_mixer: Mixer | None = None
    feed_forward_norm_placement: NormPlacement | None = None
    parallel: str = "none"
    mixer_norm_placement: NormPlacement | None = None
    database_mixer: GivenAttention | None = None
    merges_memory: bool = False
    leaves: str | None = None
    dropping: TokenDropping | None = None


@dataclass(frozen=True)
class StackSpec:
    """The slots of a stack.

    `cross_mask` is set if layers look at an encoder; `logits` is None in an encoder.
    `output_dropout`: units of the last states are dropped too, as in T5. A scan needs equal
    layers.
    """

    layers: tuple[LayerSpec, ...]
    position: Position
    mask: Mask
    norm: Norm
    cross_mask: Mask | None = None
    logits: Logits | None = None
    embedding: Embedding = field(default_factory=PlainEmbedding)
    output_dropout: bool = True
    database: Database | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model with a decoder. Hashable: equal specs are the same program.

    `encoder` is None in a decoder-only model. `memory_tokens` vectors go before its input.
    """

    shared: Shared
    decoder: StackSpec
    encoder: StackSpec | None = None
    memory_tokens: int = 0

    @property
    def stacks(self) -> dict[str, StackSpec]:
        """The stacks by their names in paths; the last one makes the logits."""
        encoder = {"encoder": self.encoder} if self.encoder else {}
        return {**encoder, "decoder": self.decoder}

    @property
    def output(self) -> Logits:
        """The logits slot."""
        assert self.decoder.logits is not None
        return self.decoder.logits

    @property
    def routed(self) -> bool:
        """True if tokens choose among experts in some layer."""
        layers = [layer for stack in self.stacks.values() for layer in stack.layers]
        return any(layer.feed_forward.routes for layer in layers)


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder-only model. It predicts tokens in place and sorts rows into `row_classes`."""

    shared: Shared
    encoder: StackSpec
    logits: Logits
    row_classes: int = 2

    @property
    def stacks(self) -> dict[str, StackSpec]:
        """The stack by its name in paths."""
        return {"encoder": self.encoder}

    @property
    def output(self) -> Logits:
        """The logits slot."""
        return self.logits


def model_spec(config: ModelConfig) -> ModelSpec | EncoderSpec:
    """Returns the spec of a configuration."""
    build = _ARCHITECTURES[config.architecture]
    return _BUILDERS.get(config.family, build)(config)


def _encoder_decoder(config: ModelConfig) -> ModelSpec:
    cross = config.cross_attention
    layers = _layers(
        config,
        config.num_encoder_layers,
        leaves=cross if cross in facts.BY_LAYER else None,
        dropping=TokenDropping(config.token_dropping) if config.token_dropping else None,
    )
    encoder = StackSpec(
        layers=layers,
        position=_position(config, bidirectional=True),
        mask=SameSegment(),
        # Where only keys and values are looked at, nothing reads the last states.
        norm=NoNorm() if cross == "encoder_keys" else _last_norm(config),
        embedding=PlainEmbedding(_embedding_norm(config)),
        database=_database(config),
    )
    decoder = StackSpec(
        layers=_layers(
            config,
            config.num_decoder_layers,
            cross_mixer=CROSS_MIXERS[cross](config),
            merges_memory=cross == "merged",
            **({} if config.mixer_facts.decodes else {"mixer": _attention(config)}),
        ),
        position=_position(config, bidirectional=False),
        mask=AllOf((SameSegment(), Causal())),
        norm=_last_norm(config),
        cross_mask=SameSegment(),
        logits=_logits(config),
        embedding=PlainEmbedding(_embedding_norm(config)),
        database=_database(config),
    )
    return ModelSpec(_shared(config), decoder, encoder, config.memory_tokens)


def _decoder_only(config: ModelConfig) -> ModelSpec:
    return _decoder_of(config, _layers(config, config.num_decoder_layers))


def _evolved_transformer(config: ModelConfig) -> ModelSpec:
    """A block of two layers: attention with convolutions, then attention with feed-forward.

    The first attention has twice as many heads of half the size.
    """
    (second,) = _layers(config, 1)
    heads, head_dim = config.num_heads, config.head_dim
    first = replace(
        second,
        mixer=DotProductAttention(2 * heads, head_dim // 2),
        feed_forward=ConvolutionBranch(reset=not config.upstream_compat),
    )
    return _decoder_of(config, (first, second) * config.num_decoder_layers)


def _decoder_of(config: ModelConfig, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """Returns a decoder-only model.

    One mask serves causal and prefix batches: a prefix is seen in both directions where the batch
    marks one (`decoder_causal_attention`).
    """
    decoder = StackSpec(
        layers=layers,
        position=_position(config, bidirectional=False),
        mask=AllOf((SameSegment(), AnyOf((Causal(), BothInPrefix())))),
        norm=_last_norm(config),
        logits=_logits(config),
        embedding=PlainEmbedding(_embedding_norm(config)),
        database=_database(config),
    )
    return ModelSpec(_shared(config), decoder)


def _encoder_only(config: ModelConfig) -> EncoderSpec:
    encoder = StackSpec(
        layers=_layers(config, config.num_encoder_layers),
        position=_position(config, bidirectional=True),
        mask=SameSegment(),
        norm=_last_norm(config),
        embedding=TypedEmbedding(_embedding_norm(config)),
        output_dropout=False,
        database=_database(config),
    )
    shared = replace(_shared(config), broadcast_dropout=False)
    activation = config.value("mlp_activations")[0]
    return EncoderSpec(
        shared, encoder, TransformedLogits(activation, _norm(config), _logits(config))
    )


# Builders of families with layers of their own; the others are told apart by their `facts` alone.
_BUILDERS: Mapping[str, Callable[[ModelConfig], ModelSpec | EncoderSpec]] = MappingProxyType(
    {"evolved_transformer": _evolved_transformer}
)
_ARCHITECTURES: Mapping[str, Callable[[ModelConfig], ModelSpec | EncoderSpec]] = MappingProxyType(
    {
        facts.ENCODER_DECODER: _encoder_decoder,
        facts.DECODER: _decoder_only,
        facts.ENCODER: _encoder_only,
    }
)


def _layers(config: ModelConfig, count: int, **slots: Any) -> tuple[LayerSpec, ...]:
    """Returns the layers of a stack; the last of every `switch_every` has experts, if any.

    Args:
      slots: slots of each layer in which the stack differs from others.
    """
    mixer, activations = config.part("mixer"), config.value("mlp_activations")
    placements = NORM_PLACEMENTS[config.value("norm_placement")]
    feed_forward = config.part("feed_forward")
    layer = LayerSpec(
        norm=_norm(config),
        norm_placement=placements.sublayers,
        mixer=MIXERS[mixer.name](config, mixer.options),
        feed_forward=FEED_FORWARDS[feed_forward.name](config, feed_forward.options),
        feed_forward_norm_placement=placements.feed_forward,
        parallel=config.parallel_blocks,
        mixer_norm_placement=placements.mixer,
        database_mixer=_given_attention(config) if config.database_entries else None,
    )
    layer = replace(layer, **slots)
    if config.part("head_scaling").name != "none":
        return halves(layer, count, config.part("head_scaling").options)
    if not config.num_experts:
        return (layer,) * count
    experts = Switch(Mlp(config.mlp_dim, activations, bias=False), config.num_experts)
    routed = replace(layer, feed_forward=experts)
    return tuple(layer if (index + 1) % config.switch_every else routed for index in range(count))


def _norm(config: ModelConfig) -> Norm:
    part = config.part("norm")
    return NORMS[part.name](part.options)


def _last_norm(config: ModelConfig) -> Norm:
    """Returns the norm of a stack's last states, which layers that end with one do not need."""
    return NoNorm() if config.value("norm_placement") == "post" else _norm(config)


def _embedding_norm(config: ModelConfig) -> Norm | None:
    return _norm(config) if config.value("embedding_norm") else None


def _position(config: ModelConfig, bidirectional: bool) -> Position:
    part = config.part("position")
    return POSITIONS[part.name](config, part.options, bidirectional)


def _logits(config: ModelConfig) -> Logits:
    if config.value("tied_logits"):
        return TiedLogits(config.logits_scale)
    return DenseLogits(config.logits_scale or 1.0)


def _shared(config: ModelConfig) -> Shared:
    part = config.part("parametrisation")
    return Shared(
        emb_dim=config.emb_dim,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        dropout_rate=config.dropout_rate,
        parametrisation=replace(
            PARAMETRISATIONS[part.name](config, part.options),
            scale=config.attention_scale,
            zeros=config.zero_init,
        ),
        dense_bias=config.value("attention_bias"),
        scale_embeddings=config.value("scale_embeddings"),
        scan_layers=config.scan_layers,
        remat=config.remat,
        attention=config.attention,
        softmax_dtype=config.softmax_dtype,
        attention_weights=config.attention_weights,
    )


def _self_attention(
    config: ModelConfig, *changes: Any, **named_changes: Any
) -> DotProductAttention:
    name, pattern = config.part("attention_pattern")
    pattern = None if name == facts.FULL_PATTERN else pattern
    return replace(_attention(config, *changes, **named_changes), pattern=pattern)


def _attention(
    config: ModelConfig,
    convolution: HeadConvolution | None = None,
    shared_query_key: bool = False,
    learned_logits: LearnedLogits | None = None,
) -> DotProductAttention:
    return DotProductAttention(
        config.num_heads,
        config.head_dim,
        convolution,
        shared_query_key,
        learned_logits,
        config.num_kv_heads,
        _norm(config) if config.query_key_norm else None,
    )


def _given_attention(config: ModelConfig) -> GivenAttention:
    norm = _norm(config) if config.query_key_norm else None
    return GivenAttention(config.num_heads, config.head_dim, norm)


def _database(config: ModelConfig) -> Database | None:
    return Database(config.database_entries, config.head_dim) if config.database_entries else None


def _with_part(config: ModelConfig, **parts: Any) -> DotProductAttention:
    return replace(_self_attention(config), **parts)


def _conditional(config: ModelConfig, chosen: Any) -> ConditionalQueryAttention:
    heads = chosen.conditional_heads or config.num_heads
    return ConditionalQueryAttention(heads, config.num_heads - heads, config.head_dim)


# Cross mixers by `ModelConfig.cross_attention`.
CROSS_MIXERS: Mapping[str, Callable[[ModelConfig], Mixer | None]] = MappingProxyType(
    {
        "attention": lambda config: _attention(config),
        "encoder_keys": _given_attention,
        "layerwise": lambda config: _attention(config),
        "merged": lambda config: None,
    }
)

# Mixers by configuration and options.
_MIXERS: dict[str, Callable[[ModelConfig, Any], Mixer]] = {
    "attention": lambda config, _: _self_attention(config),
    "cdq": _conditional,
    # Primer's multi-dconv-head attention.
    "mdha": lambda config, _: _self_attention(
        config, HeadConvolution(reset=not config.upstream_compat)
    ),
    "mdha_shared_qk": lambda config, _: _self_attention(
        config, HeadConvolution(reset=not config.upstream_compat), shared_query_key=True
    ),
    "random_synthesizer": lambda config, _: _attention(
        config, learned_logits=LearnedLogits(config.max_positions, not config.upstream_compat)
    ),
    "dense_synthesizer": lambda config, _: DenseSynthesizer(
        config.num_heads, config.head_dim, config.max_positions, not config.upstream_compat
    ),
    # MARCH's.
    "role_attention": lambda config, options: _with_part(config, mixed_part=Roles(options.vectors)),
    "summed_heads": lambda config, options: _with_part(
        config, mixed_part=SummedHeads(options.group)
    ),
    "values_relu": lambda config, options: _with_part(
        config, value_part=ValuesRelu(config.mlp_dim if options.kernels == 2 else None)
    ),
}
MIXERS: Mapping[str, Callable[[ModelConfig, Any], Mixer]] = MappingProxyType(_MIXERS)


def register_mixer(
    name: str, build: Callable[[ModelConfig, Any], Mixer], mixer_facts: facts.MixerFacts
) -> None:
    """Makes `name` a value of `ModelConfig.mixer`, in this process.

    Args:
      build: makes the mixer of a configuration and of an instance of `mixer_facts.options`.
      mixer_facts: the `facts` of every mixer that `build` makes.

    Raises:
      ValueError: there is a mixer of this name.
    """
    facts.add_mixer(name, mixer_facts)
    _MIXERS[name] = build
