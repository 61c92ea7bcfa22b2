"""Facts about the named parts of a model: plain data, no JAX.

`ModelConfig` checks itself against these tables, so it needs no JAX. The parts themselves are in
`spec.py` and declare the same facts; tests/trainer/model/test_slots.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ENCODER_DECODER, DECODER, ENCODER = "encoder_decoder", "decoder", "encoder"

# Implementations of the attention product, and types of its logits and softmax.
AUTO = "auto"
ATTENTION_NAMES = (AUTO, "einsum", "dot_product", "cudnn", "pallas")
SOFTMAX_DTYPES = (AUTO, "float32", "bfloat16")
ACTIVATION_NAMES = ("gelu", "gelu_erf", "linear", "relu", "silu", "squared_relu")
NORM_NAMES = ("layer_norm", "primer_norm", "rms_norm")
NORM_PLACEMENT_NAMES = ("pre", "primer_alternating")
PER_LAYER = "relative_per_layer"
WITHOUT_ANGLES = ("absolute", "relative", PER_LAYER)
POSITION_NAMES = (*WITHOUT_ANGLES, "rotary")

# Formats of other projects that a part can be exported to.
TRANSFORMERS, T5X = "transformers", "t5x"


# Width of a TPU's registers.
LANES = 128


def fills_lanes(head_dim: int) -> bool:
    """Returns whether whole heads of this size fill the registers of a TPU."""
    return head_dim % LANES == 0 or LANES % head_dim == 0


def attention_on(device_kind: str, attention: str, dtype: str, head_dim: int) -> str:
    """Returns the implementation of attention that a setting stands for.

    Args:
      device_kind: JAX's name of the device, such as "TPU v5 lite".
      attention: one of ATTENTION_NAMES.
      dtype: type of the activations.
      head_dim: width of a head.
    """
    if attention != AUTO:
        return attention
    fused = _compiles_kernels(device_kind) and dtype == "bfloat16" and fills_lanes(head_dim)
    return "pallas" if fused else "einsum"


def softmax_dtype_on(device_kind: str, softmax_dtype: str, dtype: str) -> str:
    """Returns the type of logits and softmax that a setting of SOFTMAX_DTYPES stands for."""
    if softmax_dtype != AUTO:
        return softmax_dtype
    return dtype if device_kind.startswith("TPU") else "float32"


def _compiles_kernels(device_kind: str) -> bool:
    return device_kind.startswith("TPU") and not device_kind.startswith(("TPU v2", "TPU v3"))


@dataclass(frozen=True)
class FamilyFacts:
    """Facts about a family.

    Attributes:
      architecture: ENCODER_DECODER, DECODER or ENCODER.
      position: the scheme it has by default.
      positions: the schemes it can have.
      rotary_divisor: one in so many channels of a head is rotated.
      changeable: mixer, norms, feed-forward biases and experts can be chosen.
      convolves: its layers have convolutions over positions.
      alike: all layers are equal, so that they can be scanned.
      even: fields that must be even.
    """

    architecture: str
    position: str = "relative"
    positions: tuple[str, ...] = POSITION_NAMES
    rotary_divisor: int = 1
    changeable: bool = False
    convolves: bool = False
    alike: bool = True
    even: tuple[str, ...] = ()


@dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer. The defaults suit one that does everything itself.

    Attributes:
      attentions: the implementations of attention that can compute it.
      positions: the position schemes it reads; "absolute" is added to the embeddings.
      convolves: it convolves over positions.
      counts_positions: its parameters have an axis of `ModelConfig.max_positions`.
      exports: the formats it can be exported to.
    """

    attentions: tuple[str, ...] = (AUTO, "einsum")
    positions: tuple[str, ...] = POSITION_NAMES
    convolves: bool = False
    counts_positions: bool = False
    exports: tuple[str, ...] = ()


_T5 = FamilyFacts(ENCODER_DECODER, changeable=True)
_DECODER = FamilyFacts(DECODER, changeable=True)
# A quarter of the channels, as in t5-experiments.
_BERT = FamilyFacts(ENCODER, position="absolute", rotary_divisor=4)

FAMILIES: Mapping[str, FamilyFacts] = MappingProxyType(
    {
        "bert": _BERT,
        "bert_pre_ln": _BERT,
        "evolved_transformer": FamilyFacts(
            DECODER,
            # Its heads have two sizes, so no angles fit them all.
            positions=("absolute", "relative"),
            convolves=True,
            alike=False,
            even=("head_dim", "emb_dim"),
        ),
        "llama": FamilyFacts(DECODER, position="rotary"),
        "lm": _DECODER,
        "primer": _DECODER,
        "t5_1_0": _T5,
        "t5_1_1": _T5,
    }
)
FAMILY_NAMES = tuple(FAMILIES)

_MDHA = MixerFacts(attentions=ATTENTION_NAMES, convolves=True, exports=(TRANSFORMERS,))
_MIXERS: dict[str, MixerFacts] = {
    "attention": MixerFacts(attentions=ATTENTION_NAMES, exports=(TRANSFORMERS, T5X)),
    "dense_synthesizer": MixerFacts(positions=WITHOUT_ANGLES, counts_positions=True),
    "mdha": _MDHA,
    "mdha_shared_qk": _MDHA,
    "random_synthesizer": MixerFacts(counts_positions=True),
}
MIXERS: Mapping[str, MixerFacts] = MappingProxyType(_MIXERS)
MIXER_NAMES = tuple(MIXERS)


def add_mixer(name: str, facts: MixerFacts) -> None:
    """Makes `name` a value of `ModelConfig.mixer`; called by `spec.register_mixer`.

    Raises:
      ValueError: there is a mixer of this name.
    """
    if name in _MIXERS:
        raise ValueError(f"there is a mixer called {name!r} already")
    _MIXERS[name] = facts
