"""Facts about parts: what configuration, cost and exports need to know of them. No JAX.

The defaults suit a part that does everything itself and about which nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.model.device import AUTO

ENCODER_DECODER, DECODER, ENCODER = "encoder_decoder", "decoder", "encoder"
# Formats of other projects that a part can be exported to.
TRANSFORMERS, T5X = "transformers", "t5x"


@dataclass(frozen=True)
class FamilyFacts:
    """Facts about a family, and its values of the fields of `ModelConfig` that are None.

    Attributes:
      architecture: ENCODER_DECODER, DECODER or ENCODER.
      positions: the position schemes it can have; None: all.
      rotary_fraction: share of the channels of a head that rotary positions rotate.
      changeable: its parts can be chosen; if not, only positions and activations can.
      convolves: its layers have convolutions over positions.
      skips_zero: they take id 0 for the beginning of a text.
      layers: makes the layers of its decoder from a configuration and a plain layer, as
        "module:function"; None: `num_decoder_layers` equal ones.
      even: fields that must be even.
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


@dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer.

    Attributes:
      attentions: the implementations of attention that can compute it.
      queries: it has queries and keys, which can be normalised and scaled.
      groups: several heads of queries can share one of keys and values.
      sparse: it can leave out blocks of keys (`sparsity`).
      positions: the position schemes it reads; None: all.
      rotates: it can rotate queries and keys by angles.
      convolves: it convolves over positions.
      counts_positions: its parameters have an axis of `ModelConfig.max_positions`.
      selects: its softmax can be over some positions of a row, or over those of several rows.
      decodes: it can be causal. If not, only encoders have it; a decoder beside one has attention.
      caches: it can keep what it needs of earlier positions (`cache`).
      exports: the formats it can be exported to.
    """

    attentions: tuple[str, ...] = (AUTO, "einsum")
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

    Attributes:
      counts_positions: it has a parameter for each of `ModelConfig.max_positions`.
      rotates: it rotates queries and keys by angles.
      fuses: kernels know its bias of logits, or it has none.
      any_width: the heads of a stack may differ in width.
    """

    counts_positions: bool = False
    rotates: bool = False
    fuses: bool = True
    any_width: bool = True


@dataclass(frozen=True)
class FeedForwardFacts:
    """Facts about a feed-forward sublayer: which of these fields of `ModelConfig` it reads.

    They are "mlp_activations", "mlp_bias" and "num_experts"; a change of the others is refused.
    """

    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacementFacts:
    """Facts about a norm placement.

    Attributes:
      parallel: the sublayers of a layer can run beside one another.
      ends_normalised: the states after a layer are normalised, so that a stack needs no last norm.
    """

    parallel: bool = False
    ends_normalised: bool = False


@dataclass(frozen=True)
class CrossFacts:
    """Facts about cross-attention.

    Attributes:
      last_states: the encoder's last states are looked at.
      merges: its softmax is that of self-attention, whose mask kernels do not know.
    """

    last_states: bool = True
    merges: bool = False


@dataclass(frozen=True)
class HeadFacts:
    """Facts about a scaling of heads: whether all layers of a stack stay `alike`."""

    alike: bool = True


@dataclass(frozen=True)
class StackPartFacts:
    """Facts about a part of whole stacks, which a field of `ModelConfig` above 0 adds.

    Attributes:
      lengthens: it adds so many positions to an encoder's rows, which cannot be packed.
      reads_weights: it reads the weights of attention, which kernels do not write.
      idle: returns why it has no effect on rows of this length, given a configuration; or None.
    """

    lengthens: bool = False
    reads_weights: bool = False
    idle: Callable[[Any, int], str | None] | None = None
