"""What a model is to the code, in plain frozen data.

`model_spec` makes a `ModelSpec` of a `ModelConfig` through `FAMILIES`. A new variant is a new value
in a slot of `LayerSpec` or `StackSpec` and a family that uses it; `transformer.py` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trainer.model.config import ModelConfig
from trainer.model.dense import Shared
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
from trainer.model.masks import AllOf, AnyOf, BothInPrefix, Causal, Mask, SameSegment
from trainer.model.mixers import DotProductAttention, Mixer
from trainer.model.norms import (
    LayerNorm,
    NoNorm,
    Norm,
    NormPlacement,
    PostNorm,
    PreNorm,
    RMSNorm,
)
from trainer.model.parametrisation import BertParametrisation, StandardParametrisation
from trainer.model.positions import (
    LearnedPosition,
    Position,
    RotaryPosition,
    T5RelativePosition,
)


@dataclass(frozen=True)
class LayerSpec:
    """The slots of one layer. `cross_mixer` is None where there is no encoder to look at."""

    norm: Norm
    norm_placement: NormPlacement
    mixer: Mixer
    feed_forward: FeedForward
    cross_mixer: Mixer | None = None


@dataclass(frozen=True)
class StackSpec:
    """A stack of layers and what they share.

    `cross_mask` is set where layers have a `cross_mixer`; `logits` is None in an encoder.
    `output_dropout`: units of the last states are dropped too, as in T5. Layers must be equal
    where a scan runs them.
    """

    layers: tuple[LayerSpec, ...]
    position: Position
    mask: Mask
    norm: Norm
    cross_mask: Mask | None = None
    logits: Logits | None = None
    embedding: Embedding = field(default_factory=PlainEmbedding)
    output_dropout: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A whole model, hashable: equal specs are the same program. No `encoder`: decoder-only."""

    shared: Shared
    decoder: StackSpec
    encoder: StackSpec | None = None


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder alone, which predicts in place and sorts whole rows into `row_classes`."""

    shared: Shared
    encoder: StackSpec
    logits: Logits
    row_classes: int = 2


def model_spec(config: ModelConfig) -> ModelSpec | EncoderSpec:
    """The slots of `config`'s family, filled."""
    return FAMILIES[config.family](config)


def _t5_1_0(config: ModelConfig) -> ModelSpec:
    """T5 as first published (arXiv:1910.10683): ReLU, logits tied to the embedding."""
    return _encoder_decoder(config, activations=("relu",), tied_logits=True)


def _t5_1_1(config: ModelConfig) -> ModelSpec:
    """T5 1.1 and mT5 (arXiv:2010.11934): gated GELU, logits with a kernel of their own."""
    return _encoder_decoder(config, activations=("gelu", "linear"), tied_logits=False)


def _lm(config: ModelConfig) -> ModelSpec:
    """T5X's `decoder_only` example: the decoder of T5 1.1 by itself, logits tied."""
    position = T5RelativePosition(bidirectional=False)
    return _decoder_only(config, position, ("gelu", "linear"), tied_logits=True)


def _llama(config: ModelConfig) -> ModelSpec:
    """Llama (arXiv:2302.13971): rotary positions, SwiGLU, logits with a kernel of their own.

    The paper says nothing of initial values; these are GPT-2's, as in Megatron-LM.
    """
    position = RotaryPosition(channels=config.head_dim)
    spec = _decoder_only(config, position, ("silu", "linear"), tied_logits=False)
    parametrisation = BertParametrisation(residual_branches=2 * config.num_decoder_layers)
    return replace(spec, shared=replace(spec.shared, parametrisation=parametrisation))


def _decoder_only(
    config: ModelConfig, position: Position, activations: tuple[str, ...], tied_logits: bool
) -> ModelSpec:
    """One mask serves causal and prefix batches: a prefix is seen in both directions where the
    batch marks one (`decoder_causal_attention`)."""
    decoder = StackSpec(
        layers=(_layer(config, activations),) * config.num_decoder_layers,
        position=position,
        mask=AllOf((SameSegment(), AnyOf((Causal(), BothInPrefix())))),
        norm=RMSNorm(),
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(_shared(config), decoder)


def _bert(config: ModelConfig) -> EncoderSpec:
    """BERT (arXiv:1810.04805), as google-research/bert and transformers have it."""
    return _encoder_only(config, PostNorm(), NoNorm(), BertParametrisation())


def _bert_pre_ln(config: ModelConfig) -> EncoderSpec:
    """BERT with norms before sublayers and after the last layer, as in t5-experiments.

    Kernels that end a residual branch start narrower, as that project meant them to.
    """
    parametrisation = BertParametrisation(residual_branches=2 * config.num_encoder_layers)
    return _encoder_only(config, PreNorm(), LayerNorm(), parametrisation)


def _encoder_only(
    config: ModelConfig,
    norm_placement: NormPlacement,
    last_norm: Norm,
    parametrisation: BertParametrisation,
) -> EncoderSpec:
    activations = config.mlp_activations or ("gelu_erf",)
    layer = LayerSpec(
        norm=LayerNorm(),
        norm_placement=norm_placement,
        mixer=DotProductAttention(config.num_heads, config.head_dim),
        feed_forward=Mlp(config.mlp_dim, activations, dropout=False),
    )
    encoder = StackSpec(
        layers=(layer,) * config.num_encoder_layers,
        position=POSITIONS[config.position or "absolute"](config),
        mask=SameSegment(),
        norm=last_norm,
        embedding=TypedEmbedding(LayerNorm()),
        output_dropout=False,
    )
    shared = replace(
        _shared(config), parametrisation=parametrisation, dense_bias=True, broadcast_dropout=False
    )
    logits = TransformedLogits(activations[0], LayerNorm(), _logits(config, tied=True))
    return EncoderSpec(shared, encoder, logits)


def _encoder_decoder(
    config: ModelConfig, activations: tuple[str, ...], tied_logits: bool
) -> ModelSpec:
    encoder = StackSpec(
        layers=(_layer(config, activations),) * config.num_encoder_layers,
        position=T5RelativePosition(bidirectional=True),
        mask=SameSegment(),
        norm=RMSNorm(),
    )
    decoder = StackSpec(
        layers=(_layer(config, activations, cross=True),) * config.num_decoder_layers,
        position=T5RelativePosition(bidirectional=False),
        mask=AllOf((SameSegment(), Causal())),
        norm=RMSNorm(),
        cross_mask=SameSegment(),
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(_shared(config), decoder, encoder)


def _layer(config: ModelConfig, activations: tuple[str, ...], cross: bool = False) -> LayerSpec:
    attention = DotProductAttention(config.num_heads, config.head_dim)
    return LayerSpec(
        norm=RMSNorm(),
        norm_placement=PreNorm(),
        mixer=attention,
        feed_forward=Mlp(config.mlp_dim, config.mlp_activations or activations),
        cross_mixer=attention if cross else None,
    )


def _logits(config: ModelConfig, tied: bool) -> Logits:
    if config.tied_logits is not None:
        tied = config.tied_logits
    return TiedLogits() if tied else DenseLogits()


def _shared(config: ModelConfig) -> Shared:
    return Shared(
        emb_dim=config.emb_dim,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        dropout_rate=config.dropout_rate,
        parametrisation=StandardParametrisation(),
        scan_layers=config.scan_layers,
        remat=config.remat,
        attention=config.attention,
    )


FAMILIES: Mapping[str, Callable[[ModelConfig], ModelSpec | EncoderSpec]] = MappingProxyType(
    {
        "t5_1_0": _t5_1_0,
        "t5_1_1": _t5_1_1,
        "lm": _lm,
        "llama": _llama,
        "bert": _bert,
        "bert_pre_ln": _bert_pre_ln,
    }
)

# Where an encoder alone has a choice. A quarter of the channels turns, as in t5-experiments.
POSITIONS: Mapping[str, Callable[[ModelConfig], Position]] = MappingProxyType(
    {
        "absolute": lambda config: LearnedPosition(config.max_positions),
        "relative": lambda config: T5RelativePosition(bidirectional=True),
        "rotary": lambda config: RotaryPosition(channels=config.head_dim // 4),
    }
)
