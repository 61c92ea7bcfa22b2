"""What a model is to the code, in plain frozen data.

`model_spec` makes a `ModelSpec` of a `ModelConfig` through `FAMILIES`. A new variant is a new value
in a slot of `LayerSpec` or `StackSpec` and a family that uses it; `transformer.py` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

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
from trainer.model.mixers import DotProductAttention, Mixer
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

    `cross_mixer` is None where there is no encoder to look at; `feed_forward_norm_placement`
    where it is `norm_placement`.
    """

    norm: Norm
    norm_placement: NormPlacement
    mixer: Mixer
    feed_forward: FeedForward
    cross_mixer: Mixer | None = None
    feed_forward_norm_placement: NormPlacement | None = None


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

    @property
    def routed(self) -> bool:
        """Whether tokens choose among experts somewhere."""
        stacks = [self.decoder, self.encoder] if self.encoder else [self.decoder]
        layers = [layer for stack in stacks for layer in stack.layers]
        return any(isinstance(layer.feed_forward, Switch) for layer in layers)


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


@dataclass(frozen=True)
class _Style:
    """What layers are where the configuration leaves it to the family."""

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
    """T5X's `decoder_only` example: the decoder of T5 1.1 by itself, logits tied."""
    layers = _layers(config, _T5_1_1_STYLE, config.num_decoder_layers)
    return _decoder_only(config, layers, _norm(config, _T5_1_1_STYLE), _shared(config))


def _llama(config: ModelConfig) -> ModelSpec:
    """Llama (arXiv:2302.13971): rotary positions, SwiGLU, logits with a kernel of their own.

    The paper says nothing of initial values; these are GPT-2's, as in Megatron-LM.
    """
    parametrisation = BertParametrisation(residual_branches=2 * config.num_decoder_layers)
    return _decoder_only(
        config,
        _layers(config, _Style(("silu", "linear")), config.num_decoder_layers),
        RMSNorm(),
        replace(_shared(config), parametrisation=parametrisation),
        RotaryPosition(channels=config.head_dim),
        tied_logits=False,
    )


def _primer(config: ModelConfig) -> ModelSpec:
    """Primer and what it is compared with (arXiv:2109.08668): the Transformer of Mesh TensorFlow.

    Without a mixer, activation, norm or placement of its own it is the paper's vanilla one.
    """
    layers = _layers(config, _PRIMER_STYLE, config.num_decoder_layers)
    return _decoder_only(config, layers, _norm(config, _PRIMER_STYLE), _primer_shared(config))


def _evolved_transformer(config: ModelConfig) -> ModelSpec:
    """The Evolved Transformer's decoder (arXiv:1901.11117), as Primer is compared with it.

    A block is two layers: attention with twice as many heads of half the size and convolutions;
    attention and feed-forward.
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


_T5_CAUSAL = T5RelativePosition(bidirectional=False)


def _decoder_only(
    config: ModelConfig,
    layers: tuple[LayerSpec, ...],
    norm: Norm,
    shared: Shared,
    position: Position = _T5_CAUSAL,
    tied_logits: bool = True,
) -> ModelSpec:
    """One mask serves causal and prefix batches: a prefix is seen in both directions where the
    batch marks one (`decoder_causal_attention`)."""
    decoder = StackSpec(
        layers=layers,
        position=position,
        mask=AllOf((SameSegment(), AnyOf((Causal(), BothInPrefix())))),
        norm=norm,
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(shared, decoder)


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


def _encoder_decoder(config: ModelConfig, style: _Style, tied_logits: bool) -> ModelSpec:
    encoder = StackSpec(
        layers=_layers(config, style, config.num_encoder_layers),
        position=T5RelativePosition(bidirectional=True),
        mask=SameSegment(),
        norm=_norm(config, style),
    )
    decoder = StackSpec(
        layers=_layers(config, style, config.num_decoder_layers, cross=True),
        position=T5RelativePosition(bidirectional=False),
        mask=AllOf((SameSegment(), Causal())),
        norm=_norm(config, style),
        cross_mask=SameSegment(),
        logits=_logits(config, tied=tied_logits),
    )
    return ModelSpec(_shared(config), decoder, encoder)


def _layers(
    config: ModelConfig, style: _Style, count: int, cross: bool = False
) -> tuple[LayerSpec, ...]:
    """The layers of a stack; of every `switch_every` the last has experts, if there are any."""
    bias = style.mlp_bias if config.mlp_bias is None else config.mlp_bias
    activations = config.mlp_activations or style.activations
    alternating = config.norm_placement == "primer_alternating"
    layer = LayerSpec(
        norm=_norm(config, style),
        norm_placement=PreNorm(),
        mixer=MIXERS[config.mixer or "attention"](config),
        feed_forward=Mlp(config.mlp_dim, activations, bias=bias),
        cross_mixer=DotProductAttention(config.num_heads, config.head_dim) if cross else None,
        feed_forward_norm_placement=BranchNorm() if alternating else None,
    )
    if not config.num_experts:
        return (layer,) * count
    experts = Switch(Mlp(config.mlp_dim, activations, bias=False), config.num_experts)
    routed = replace(layer, feed_forward=experts)
    return tuple(layer if (index + 1) % config.switch_every else routed for index in range(count))


def _norm(config: ModelConfig, style: _Style) -> Norm:
    return NORMS[config.norm or style.norm]


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
        "primer": _primer,
        "evolved_transformer": _evolved_transformer,
        "bert": _bert,
        "bert_pre_ln": _bert_pre_ln,
    }
)

MIXERS: Mapping[str, Callable[[ModelConfig], Mixer]] = MappingProxyType(
    {
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
)

# The epsilon of Mesh TensorFlow's norms, where BERT's is 1e-12.
NORMS: Mapping[str, Norm] = MappingProxyType(
    {"rms_norm": RMSNorm(), "layer_norm": LayerNorm(1e-6), "primer_norm": PrimerNorm()}
)


def _mdha(config: ModelConfig, shared_query_key: bool) -> DotProductAttention:
    """Primer's multi-dconv-head attention."""
    return DotProductAttention(
        config.num_heads,
        config.head_dim,
        HeadConvolution(reset=not config.upstream_compat),
        shared_query_key,
    )


# Where an encoder alone has a choice. A quarter of the channels turns, as in t5-experiments.
POSITIONS: Mapping[str, Callable[[ModelConfig], Position]] = MappingProxyType(
    {
        "absolute": lambda config: LearnedPosition(config.max_positions),
        "relative": lambda config: T5RelativePosition(bidirectional=True),
        "rotary": lambda config: RotaryPosition(channels=config.head_dim // 4),
    }
)
