"""Model specs: every slot of a model filled with frozen data.

`model_spec` makes a `ModelSpec` of a `ModelConfig` through `FAMILIES`. A new variant is a new value
in a slot of `LayerSpec` or `StackSpec` and a name for it in a table; `transformer.py` does not
change. A mixer defined outside of this package is named by `register_mixer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trainer.model import facts
from trainer.model.attention import DotProductAttention
from trainer.model.config import ModelConfig
from trainer.model.convolution import ConvolutionBranch, HeadConvolution
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
from trainer.model.mixers import Mixer
from trainer.model.norms import (
    BranchNorm,
    LayerNorm,
    NoNorm,
    Norm,
    NormPlacement,
    PostNorm,
    PreNorm,
    PrimerNorm,
    RMSNorm,
)
from trainer.model.parametrisation import (
    BertParametrisation,
    PrimerParametrisation,
    StandardParametrisation,
)
from trainer.model.positions import (
    LearnedPosition,
    Position,
    RotaryPosition,
    T5RelativePosition,
)
from trainer.model.switch import Switch
from trainer.model.synthesizer import DenseSynthesizer, LearnedLogits


@dataclass(frozen=True)
class LayerSpec:
    """The slots of one layer.

    `cross_mixer` is None if there is no encoder to look at. `feed_forward_norm_placement` is None
    if it is `norm_placement`.
    """

    norm: Norm
    norm_placement: NormPlacement
    mixer: Mixer
    feed_forward: FeedForward
    cross_mixer: Mixer | None = None
    feed_forward_norm_placement: NormPlacement | None = None


@dataclass(frozen=True)
class StackSpec:
    """The slots of a stack.

    `cross_mask` is set if layers have a `cross_mixer`; `logits` is None in an encoder.
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


@dataclass(frozen=True)
class ModelSpec:
    """A model with a decoder. Hashable: equal specs are the same program.

    `encoder` is None in a decoder-only model.
    """

    shared: Shared
    decoder: StackSpec
    encoder: StackSpec | None = None

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
    return FAMILIES[config.family](config)


@dataclass(frozen=True)
class _Style:
    """A family's layers where the configuration does not say otherwise."""

    activations: tuple[str, ...]
    norm: str = "rms_norm"
    mlp_bias: bool = False


_T5_1_1_STYLE = _Style(("gelu", "linear"))
_PRIMER_STYLE = _Style(("relu",), "layer_norm", mlp_bias=True)


def _t5_1_0(config: ModelConfig) -> ModelSpec:
    """T5 as first published (arXiv:1910.10683): ReLU, logits tied to the embedding."""
    return _encoder_decoder(config, _Style(("relu",)), tied_logits=True)


def _t5_1_1(config: ModelConfig) -> ModelSpec:
    """T5 1.1 and mT5 (arXiv:2010.11934): gated GELU, logits with a kernel of their own."""
    return _encoder_decoder(config, _T5_1_1_STYLE, tied_logits=False)


def _lm(config: ModelConfig) -> ModelSpec:
    """T5X's `decoder_only` example: the decoder of T5 1.1 without an encoder, logits tied."""
    layers = _layers(config, _T5_1_1_STYLE, config.num_decoder_layers)
    return _decoder_only(config, layers, _norm(config, _T5_1_1_STYLE), _shared(config))


def _llama(config: ModelConfig) -> ModelSpec:
    """Llama (arXiv:2302.13971): rotary positions, SwiGLU, logits with a kernel of their own.

    The paper does not give initial values; these are GPT-2's, as in Megatron-LM.
    """
    parametrisation = BertParametrisation(residual_branches=2 * config.num_decoder_layers)
    return _decoder_only(
        config,
        _layers(config, _Style(("silu", "linear")), config.num_decoder_layers),
        RMSNorm(),
        replace(_shared(config), parametrisation=parametrisation),
        tied_logits=False,
    )


def _primer(config: ModelConfig) -> ModelSpec:
    """Primer and its rivals (arXiv:2109.08668): variants of Mesh TensorFlow's Transformer.

    The default parts make the paper's vanilla Transformer.
    """
    layers = _layers(config, _PRIMER_STYLE, config.num_decoder_layers)
    return _decoder_only(config, layers, _norm(config, _PRIMER_STYLE), _primer_shared(config))


def _evolved_transformer(config: ModelConfig) -> ModelSpec:
    """The Evolved Transformer's decoder (arXiv:1901.11117), as Primer is compared with it.

    A block is two layers: first attention with twice as many heads of half the size, and
    convolutions; then attention and feed-forward.
    """
    (second,) = _layers(config, replace(_PRIMER_STYLE, activations=("silu",)), 1)
    heads, head_dim = config.num_heads, config.head_dim
    first = replace(
        second,
        mixer=DotProductAttention(2 * heads, head_dim // 2),
        feed_forward=ConvolutionBranch(reset=not config.upstream_compat),
    )
    layers = (first, second) * config.num_decoder_layers
    return _decoder_only(config, layers, second.norm, _primer_shared(config))


def _primer_shared(config: ModelConfig) -> Shared:
    # Source: google-research/primer, `gin/models/switch_*.gin` for 0.1.
    scale = 0.1 if config.num_experts else 1.0
    return replace(_shared(config), parametrisation=PrimerParametrisation(scale))


def _decoder_only(
    config: ModelConfig,
    layers: tuple[LayerSpec, ...],
    norm: Norm,
    shared: Shared,
    tied_logits: bool = True,
) -> ModelSpec:
    """Returns a decoder-only model.

    One mask serves causal and prefix batches: a prefix is seen in both directions where the batch
    marks one (`decoder_causal_attention`).
    """
    decoder = StackSpec(
        layers=layers,
        position=_position(config, bidirectional=False),
        mask=AllOf((SameSegment(), AnyOf((Causal(), BothInPrefix())))),
        norm=norm,
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(shared, decoder)


def _bert(config: ModelConfig) -> EncoderSpec:
    """BERT (arXiv:1810.04805), as in google-research/bert and transformers."""
    return _encoder_only(config, PostNorm(), NoNorm(), BertParametrisation())


def _bert_pre_ln(config: ModelConfig) -> EncoderSpec:
    """BERT with norms before sublayers and after the last layer, as in t5-experiments.

    Kernels that end a residual branch start narrower, as that project intended.
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
        position=_position(config, bidirectional=True),
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


def _encoder_decoder(config: ModelConfig, style: _Style, tied_logits: bool) -> ModelSpec:
    encoder = StackSpec(
        layers=_layers(config, style, config.num_encoder_layers),
        position=_position(config, bidirectional=True),
        mask=SameSegment(),
        norm=_norm(config, style),
    )
    decoder = StackSpec(
        layers=_layers(config, style, config.num_decoder_layers, cross=True),
        position=_position(config, bidirectional=False),
        mask=AllOf((SameSegment(), Causal())),
        norm=_norm(config, style),
        cross_mask=SameSegment(),
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(_shared(config), decoder, encoder)


def _layers(
    config: ModelConfig, style: _Style, count: int, cross: bool = False
) -> tuple[LayerSpec, ...]:
    """Returns the layers of a stack; the last of every `switch_every` has experts, if any."""
    bias = style.mlp_bias if config.mlp_bias is None else config.mlp_bias
    activations = config.mlp_activations or style.activations
    layer = LayerSpec(
        norm=_norm(config, style),
        norm_placement=PreNorm(),
        mixer=MIXERS[config.mixer or "attention"](config),
        feed_forward=Mlp(config.mlp_dim, activations, bias=bias),
        cross_mixer=DotProductAttention(config.num_heads, config.head_dim) if cross else None,
        feed_forward_norm_placement=NORM_PLACEMENTS[config.norm_placement or "pre"],
    )
    if not config.num_experts:
        return (layer,) * count
    experts = Switch(Mlp(config.mlp_dim, activations, bias=False), config.num_experts)
    routed = replace(layer, feed_forward=experts)
    return tuple(layer if (index + 1) % config.switch_every else routed for index in range(count))


def _norm(config: ModelConfig, style: _Style) -> Norm:
    return NORMS[config.norm or style.norm]


def _position(config: ModelConfig, bidirectional: bool) -> Position:
    return POSITIONS[config.position_scheme](config, bidirectional)


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
        softmax_dtype=config.softmax_dtype,
    )


FAMILIES: Mapping[str, Callable[[ModelConfig], ModelSpec | EncoderSpec]] = MappingProxyType(
    {
        "t5_1_0": _t5_1_0,
        "t5_1_1": _t5_1_1,
        "lm": _lm,
        "llama": _llama,
        "primer": _primer,
        "evolved_transformer": _evolved_transformer,
        "bert": _bert,
        "bert_pre_ln": _bert_pre_ln,
    }
)

_MIXERS: dict[str, Callable[[ModelConfig], Mixer]] = {
    "attention": lambda config: DotProductAttention(config.num_heads, config.head_dim),
    "mdha": lambda config: _mdha(config, shared_query_key=False),
    "mdha_shared_qk": lambda config: _mdha(config, shared_query_key=True),
    "random_synthesizer": lambda config: DotProductAttention(
        config.num_heads,
        config.head_dim,
        learned_logits=LearnedLogits(config.max_positions, not config.upstream_compat),
    ),
    "dense_synthesizer": lambda config: DenseSynthesizer(
        config.num_heads, config.head_dim, config.max_positions, not config.upstream_compat
    ),
}
MIXERS: Mapping[str, Callable[[ModelConfig], Mixer]] = MappingProxyType(_MIXERS)


def register_mixer(
    name: str, build: Callable[[ModelConfig], Mixer], mixer_facts: facts.MixerFacts
) -> None:
    """Makes `name` a value of `ModelConfig.mixer`, in this process.

    Args:
      build: makes the mixer of a configuration.
      mixer_facts: the `facts` of every mixer that `build` makes.

    Raises:
      ValueError: there is a mixer of this name.
    """
    facts.add_mixer(name, mixer_facts)
    _MIXERS[name] = build


def _mdha(config: ModelConfig, shared_query_key: bool) -> DotProductAttention:
    """Primer's multi-dconv-head attention."""
    return DotProductAttention(
        config.num_heads,
        config.head_dim,
        HeadConvolution(reset=not config.upstream_compat),
        shared_query_key,
    )


# The epsilon of Mesh TensorFlow's norms, where BERT's is 1e-12.
NORMS: Mapping[str, Norm] = MappingProxyType(
    {"rms_norm": RMSNorm(), "layer_norm": LayerNorm(1e-6), "primer_norm": PrimerNorm()}
)

# Placements in feed-forward sublayers; None: the mixer's, before the sublayer.
NORM_PLACEMENTS: Mapping[str, NormPlacement | None] = MappingProxyType(
    {"pre": None, "primer_alternating": BranchNorm()}
)

# Position schemes of a stack, by configuration and whether its positions look both ways.
POSITIONS: Mapping[str, Callable[[ModelConfig, bool], Position]] = MappingProxyType(
    {
        "absolute": lambda config, _: LearnedPosition(config.max_positions),
        "relative": lambda _, bidirectional: T5RelativePosition(bidirectional),
        "relative_per_layer": lambda _, bidirectional: T5RelativePosition(
            bidirectional, per_layer=True
        ),
        "rotary": lambda config, _: RotaryPosition(
            config.head_dim // config.family_facts.rotary_divisor
        ),
    }
)
