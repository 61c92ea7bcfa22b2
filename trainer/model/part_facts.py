"""Facts about parts, for configuration, costs and exports. No JAX.

The defaults describe a part without restrictions or special abilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

ENCODER_DECODER, DECODER, ENCODER = "encoder_decoder", "decoder", "encoder"


class Architecture(NamedTuple):
    """Facts about an architecture: its stacks, and a name for its presets in messages."""

    encoder: bool
    decoder: bool
    presets: str


ARCHITECTURES = MappingProxyType(
    {
        ENCODER_DECODER: Architecture(True, True, "an encoder-decoder preset (t5_1_1_small, …)"),
        DECODER: Architecture(False, True, "a decoder-only preset (lm_small, …)"),
        ENCODER: Architecture(True, False, "an encoder-only preset (bert_base, …)"),
    }
)
# Other projects' formats to which a part can be exported.
TRANSFORMERS, T5X = "transformers", "t5x"


@dataclass(frozen=True)
class FamilyFacts:
    """Facts about a family, and its defaults for `ModelConfig` fields that are None.

    Attributes:
      architecture: ENCODER_DECODER, DECODER or ENCODER.
      positions: position schemes it supports; None means all.
      rotary_fraction: share of a head's channels that rotary positions rotate.
      changeable: all its parts can be chosen; if False, only positions and activations can.
      skips_zero: id 0 marks the beginning of a text.
      layers: "module:function" that makes the decoder's layers from a configuration and a plain
        layer; None means `num_decoder_layers` equal layers.
      even: fields that must be even.
      types: model_types of transformers that its models may be, beside those that name the family.
    """

    architecture: str
    position: str = "relative"
    norm: str = "rms_norm"
    norm_placement: str = "pre"
    mixer: str = "attention"
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    mlp_bias: bool = False
    attention_bias: bool = False
    embedding_norm: bool = False
    scale_embeddings: bool = False
    tied_logits: bool = True
    parametrisation: str = "standard"
    positions: tuple[str, ...] | None = None
    rotary_fraction: float = 1.0
    changeable: bool = True
    convolves: bool = False
    skips_zero: bool = False
    layers: str | None = None
    even: tuple[str, ...] = ()
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer.

    Attributes:
      cores: any attention core can compute it (`attention_cores`), not only the mixer itself.
      queries: it has queries and keys, which can be normalised and scaled.
      groups: several query heads can share a head of keys and values.
      sparse: it can leave out blocks of keys (`sparsity`).
      positions: position schemes it reads; None means all.
      counts_positions: its parameters have an axis of length `ModelConfig.max_positions`.
      selects: its softmax can cover only some positions of a row, or several rows.
      decodes: it can be causal. If not, only encoders use it; the decoder uses attention.
    """

    cores: bool = False
    queries: bool = False
    groups: bool = False
    sparse: bool = False
    positions: tuple[str, ...] | None = None
    rotates: bool = True
    convolves: bool = False
    counts_positions: bool = False
    selects: bool = False
    decodes: bool = True
    caches: bool = False
    exports: tuple[str, ...] = ()


@dataclass(frozen=True)
class PositionFacts:
    """Facts about a position scheme.

    `counts_positions`: it has a parameter for each of `ModelConfig.max_positions`. `fuses`: it has
    no logit bias, or one that kernels support. `any_width`: a stack's heads may differ in width.
    """

    counts_positions: bool = False
    rotates: bool = False
    fuses: bool = True
    any_width: bool = True


@dataclass(frozen=True)
class FeedForwardFacts:
    """Facts about a feed-forward sublayer.

    Attributes:
      reads: the fields it reads, of mlp_activations and mlp_bias.
      couples: why a row's result depends on the other rows of a batch, if it does.
      idle: maps configuration and options to the reason why it has no effect, or None.
    """

    reads: tuple[str, ...] = ()
    couples: str = ""
    idle: Callable[[Any, Any], str | None] = lambda config, options: None


@dataclass(frozen=True)
class PlacementFacts:
    """Flags: sublayers can be parallel; a layer's output is normalised; all layers are alike."""

    parallel: bool = False
    ends_normalised: bool = False
    alike: bool = True


@dataclass(frozen=True)
class CrossFacts:
    """Flags: it reads the encoder's last states; it shares the softmax of self-attention."""

    last_states: bool = True
    merges: bool = False


@dataclass(frozen=True)
class WindowFacts:
    """Flag: kernels can compute it."""

    fuses: bool = False


@dataclass(frozen=True)
class StackPartFacts:
    """Facts about a part of whole stacks.

    Attributes:
      lengthens: maps options to the positions that it adds to an encoder's rows, which then cannot
        be packed.
      reads_weights: it reads attention weights, which kernels do not write.
      alike: it leaves all layers of a stack alike.
      idle: maps configuration, options and row length to the reason why it has no effect, or None.
    """

    lengthens: Callable[[Any], int] = lambda options: 0
    reads_weights: bool = False
    alike: bool = True
    idle: Callable[[Any, Any, int], str | None] = lambda config, options, length: None
