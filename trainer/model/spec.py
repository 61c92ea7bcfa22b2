"""Model specs: frozen data that fills every slot of a model.

`model_spec` makes a `ModelSpec` from a `ModelConfig`, which names a part for each slot. A new
variant is a row of a slot (`registry`); the modules that run a spec do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.model import attention
from trainer.model.arrangements import Arrangement, sequential
from trainer.model.config import ModelConfig
from trainer.model.dense import Shared
from trainer.model.embedding import (
    DenseLogits,
    Embedding,
    Logits,
    TiedLogits,
    TransformedLogits,
)
from trainer.model.feedforward import FeedForward
from trainer.model.masks import AnyMask, Mask
from trainer.model.mixers import Mixer
from trainer.model.norms import NoNorm, Norm, Placements
from trainer.model.part_facts import DECODER, ENCODER
from trainer.model.positions import Position
from trainer.model.registry import STACK_PARTS
from trainer.model.slot import load
from trainer.model.stack_parts import CrossAttention, LayerHook, StackPart


@dataclass(frozen=True)
class LayerSpec:
    """The slots of one layer; a mask or a position that is None is the stack's."""

    norm: Norm
    placements: Placements
    mixer: Mixer
    feed_forward: FeedForward
    cross_mixer: Mixer | None = None
    arrangement: Arrangement = sequential
    hooks: tuple[LayerHook, ...] = ()
    mask: AnyMask | None = None
    position: Position | None = None


@dataclass(frozen=True)
class StackSpec:
    """The slots of a stack; a scan needs equal layers.

    `cross_mask` is set if layers attend to an encoder; `logits` is None in an encoder.
    `output_dropout` also drops units of the last states, as in T5.
    """

    layers: tuple[LayerSpec, ...]
    position: Position
    mask: AnyMask
    norm: Norm
    cross_mask: AnyMask | None = None
    logits: Logits | None = None
    embedding: Embedding = field(default_factory=Embedding)
    output_dropout: bool = True
    parts: tuple[StackPart, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A model with a decoder and perhaps an encoder. Hashable: equal specs share one program.

    With `shared_embedding` both stacks use the model's token embedding, otherwise each its own.
    `shared_of_encoder` are the encoder's settings; None if they are the decoder's.
    """

    shared: Shared
    decoder: StackSpec
    encoder: StackSpec | None = None
    shared_embedding: bool = False
    shared_of_encoder: Shared | None = None

    def with_settings(self, **changes: Any) -> ModelSpec:
        """Returns the spec with changes to the settings of both stacks."""
        own = self.shared_of_encoder and replace(self.shared_of_encoder, **changes)
        return replace(self, shared=replace(self.shared, **changes), shared_of_encoder=own)

    @property
    def stacks(self) -> dict[str, StackSpec]:
        encoder = {"encoder": self.encoder} if self.encoder else {}
        return {**encoder, "decoder": self.decoder}

    @property
    def lengthening(self) -> int:
        return sum(part.lengthening for part in self.encoder.parts) if self.encoder else 0

    @property
    def output(self) -> Logits:
        assert self.decoder.logits is not None
        return self.decoder.logits

    @property
    def sown(self) -> tuple[str, ...] | None:
        """Names of the metrics that feed-forward sublayers sow, or None if they sow nothing."""
        layers = [layer for stack in self.stacks.values() for layer in stack.layers]
        each = [sows for layer in layers if (sows := layer.feed_forward.sows) is not None]
        return tuple(dict.fromkeys(itertools.chain(*each))) if each else None


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder-only model. It predicts tokens in place and sorts rows into two classes."""

    shared: Shared
    encoder: StackSpec
    logits: Logits

    def with_settings(self, **changes: Any) -> EncoderSpec:
        """Returns the spec with changes to its settings."""
        return replace(self, shared=replace(self.shared, **changes))

    @property
    def stacks(self) -> dict[str, StackSpec]:
        return {"encoder": self.encoder}

    @property
    def output(self) -> Logits:
        return self.logits


def model_spec(config: ModelConfig) -> ModelSpec | EncoderSpec:
    """Returns the spec of a configuration."""
    if not config.has_decoder:
        return _encoder_only(config)
    return _encoder_decoder(config) if config.has_encoder else _decoder_only(config)


def _encoder_decoder(config: ModelConfig) -> ModelSpec:
    cross: CrossAttention = config.build("cross_attention")
    of_encoder = config.of_encoder
    encoder = _stack(of_encoder, config.num_encoder_layers, ENCODER, cross.encoder)
    if not config.facts("cross_attention").last_states:
        encoder = replace(encoder, norm=NoNorm())
    layer: dict[str, Any] = {"cross_mixer": cross.mixer}
    if not config.mixer_facts.decodes:
        layer["mixer"] = attention.attention(config)
    decoder = _stack(config, config.num_decoder_layers, DECODER, cross.decoder, **layer)
    decoder = replace(decoder, mask=Mask(causal=True), cross_mask=Mask())
    stacks = _windowed(config, decoder), _windowed(of_encoder, encoder)
    own = _shared(of_encoder) if config.encoder_sizes else None
    return ModelSpec(_shared(config), *stacks, config.shared_embedding, own)


def _decoder_only(config: ModelConfig) -> ModelSpec:
    """Returns a decoder that sees prefixes (`decoder_causal_attention`) in both directions."""
    decoder = _stack(config, config.num_decoder_layers, DECODER)
    if config.family_facts.layers is not None:
        layers = load(config.family_facts.layers)(config, decoder.layers[0])
        decoder = replace(decoder, layers=layers)
    decoder = replace(decoder, mask=Mask(causal=True, prefix=True))
    return ModelSpec(_shared(config), _windowed(config, decoder))


def _encoder_only(config: ModelConfig) -> EncoderSpec:
    encoder = replace(
        _windowed(config, _stack(config, config.num_encoder_layers, ENCODER)),
        embedding=Embedding(_embedding_norm(config), config.token_types),
        output_dropout=False,
    )
    shared = replace(_shared(config), broadcast_dropout=False)
    activation = config.value("mlp_activations")[0]
    head = TransformedLogits(activation, config.build("norm"), _logits(config), config.head_bias)
    return EncoderSpec(shared, encoder, head)


def _stack(
    config: ModelConfig, count: int, role: str, hook: LayerHook | None = None, **slots: Any
) -> StackSpec:
    """Returns a stack of `count` layers with these `slots` and cross-attention's `hook`."""
    built = (
        STACK_PARTS[choice.name].build(config, choice.options)
        for choice in config.stack_choices.values()
    )
    parts = tuple(part for part in built if not part.encoder_only or role == ENCODER)
    hooks = [] if hook is None else [hook]
    hooks += [part.hook for part in parts if part.hook is not None]
    ends_normalised = config.facts("norm_placement").ends_normalised
    return StackSpec(
        layers=_layers(config, count, parts, hooks=tuple(hooks), **slots),
        position=config.build("position", role == ENCODER),
        mask=Mask(),
        norm=NoNorm() if ends_normalised else config.build("norm"),
        logits=_logits(config) if role == DECODER else None,
        embedding=Embedding(_embedding_norm(config)),
        parts=parts,
    )


def _layers(
    config: ModelConfig, count: int, parts: Sequence[StackPart], **slots: Any
) -> tuple[LayerSpec, ...]:
    """Returns the layers of a stack."""
    layer = LayerSpec(
        norm=config.build("norm"),
        placements=config.build("norm_placement"),
        mixer=config.build("mixer"),
        feed_forward=config.build("feed_forward"),
        arrangement=config.build("parallel_blocks"),
    )
    layers = [replace(layer, **slots)] * count
    for part in parts:
        layers = [part.layer(each, index, count) for index, each in enumerate(layers)]
    layers[:1] = [replace(each, placements=each.placements.of_first()) for each in layers[:1]]
    return tuple(
        replace(each, feed_forward=each.feed_forward.of_layer(number))
        for number, each in enumerate(layers, 1)
    )


def _windowed(config: ModelConfig, stack: StackSpec) -> StackSpec:
    """Returns the stack with the masks and positions of its layers."""
    windowed: StackSpec = config.build("attention_window", stack)
    return windowed


def _embedding_norm(config: ModelConfig) -> Norm | None:
    return config.build("norm") if config.value("embedding_norm") else None


def _logits(config: ModelConfig) -> Logits:
    if config.value("tied_logits"):
        return TiedLogits(config.logits_scale, config.logits_softcap)
    return DenseLogits(config.logits_scale or 1.0, config.logits_softcap)


def _shared(config: ModelConfig) -> Shared:
    parametrisation = config.build("parametrisation")
    return Shared(
        emb_dim=config.emb_dim,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        dropout_rate=config.dropout_rate,
        parametrisation=replace(
            parametrisation, scale=config.attention_scale, zeros=config.zero_init
        ),
        dense_bias=config.value("attention_bias"),
        out_bias=config.attention_out_bias,
        attention_softcap=config.attention_softcap,
        scale_embeddings=config.value("scale_embeddings"),
        scan_layers=config.scan_layers,
        remat=config.remat,
        attention=config.attention,
        softmax_dtype=config.softmax_dtype,
        attention_weights=config.attention_weights,
    )
