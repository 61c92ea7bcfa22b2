"""Facts about the named parts of a model: plain data, no JAX.

`ModelConfig` checks itself against these tables, so it needs no JAX. The parts themselves are in
`spec.py` and declare the same facts; tests/trainer/model/test_slots.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from trainer.model import layouts, options

ENCODER_DECODER, DECODER, ENCODER = "encoder_decoder", "decoder", "encoder"

# Implementations of the attention product, and types of its logits and softmax.
AUTO = "auto"
ATTENTION_NAMES = (AUTO, "einsum", "dot_product", "cudnn", "pallas")
SOFTMAX_DTYPES = (AUTO, "float32", "bfloat16")
ACTIVATION_NAMES = ("gelu", "gelu_erf", "linear", "relu", "silu", "squared_relu")
NORMS: Mapping[str, type] = MappingProxyType(
    {
        "dynamic_tanh": options.DynamicTanhOptions,
        "layer_norm": options.LayerNormOptions,
        "primer_norm": options.NormOptions,
        "rms_norm": options.NormOptions,
    }
)
FEED_FORWARDS: Mapping[str, type] = MappingProxyType(
    {"mixed": options.Mixed, "mlp": options.NoOptions, "none": options.NoOptions}
)
# What a decoder looks at: states of the encoder's last layer, or of the layer of its own number,
# or that layer's keys and values; merged: in the softmax of self-attention.
CROSS_ATTENTIONS = ("attention", "encoder_keys", "layerwise", "merged")
BY_LAYER = ("encoder_keys", "layerwise")
HEAD_SCALINGS: Mapping[str, type] = MappingProxyType(
    {"halves": options.Halves, "none": options.NoOptions}
)
NORM_PLACEMENT_NAMES = ("post", "pre", "pre_without_mixer_residual", "primer_alternating")
PARALLEL_NAMES = ("none", "one_norm", "two_norms")
PER_LAYER = "relative_per_layer"
POSITIONS: Mapping[str, type] = MappingProxyType(
    {
        "absolute": options.NoOptions,
        "alibi": options.NoOptions,
        "none": options.NoOptions,
        "relative": options.Relative,
        PER_LAYER: options.Relative,
        "rotary": options.Rotary,
        "sinusoidal": options.Sinusoidal,
    }
)
POSITION_NAMES = tuple(POSITIONS)
ATTENTION_PATTERNS, FULL_PATTERN = layouts.PATTERNS, layouts.FULL
WITHOUT_ANGLES = tuple(name for name in POSITIONS if name != "rotary")
PARAMETRISATIONS: Mapping[str, type] = MappingProxyType(
    {
        "mup": options.MaximalUpdate,
        "normal": options.Normal,
        "primer": options.Primer,
        "standard": options.NoOptions,
    }
)
# Functions from logits to the weights of attention.
WEIGHT_NAMES = ("softmax", "elu", "squared_relu", "norm_elu", "norm_squared_relu")
# Parts that can start at zero.
ZERO_NAMES = ("logits", "query", "residual")

# Formats of other projects that a part can be exported to.
TRANSFORMERS, T5X = "transformers", "t5x"


# Width of a TPU's registers.
LANES = 128


def fills_lanes(head_dim: int) -> bool:
    """Returns whether whole heads of this size fill the registers of a TPU."""
    return head_dim % LANES == 0 or LANES % head_dim == 0


def fills_tiles(block: int) -> bool:
    """Returns whether the tiles of kernels can be made of blocks of this size, or parts of them."""
    return block % LANES == 0 or (block >= 8 and LANES % block == 0)


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
    """Facts about a family, and its values of the fields of `ModelConfig` that are None.

    Attributes:
      architecture: ENCODER_DECODER, DECODER or ENCODER.
      positions: the schemes it can have.
      rotary_fraction: share of the channels of a head that rotary positions rotate.
      changeable: its parts can be chosen; if not, only positions and activations can.
      convolves: its layers have convolutions over positions.
      alike: all layers are equal, so that they can be scanned.
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
    positions: tuple[str, ...] = POSITION_NAMES
    rotary_fraction: float = 1.0
    changeable: bool = True
    convolves: bool = False
    alike: bool = True
    even: tuple[str, ...] = ()


@dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer. The defaults suit one that does everything itself.

    Attributes:
      attentions: the implementations of attention that can compute it.
      queries: it has queries and keys, which can be normalised and scaled.
      groups: several heads of queries can share one of keys and values.
      sparse: it can leave out blocks of keys (`layouts`).
      positions: the position schemes it reads; some are only added to the embeddings.
      options: the class of its options.
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
    positions: tuple[str, ...] = POSITION_NAMES
    convolves: bool = False
    counts_positions: bool = False
    selects: bool = False
    decodes: bool = True
    caches: bool = False
    exports: tuple[str, ...] = ()
    options: type = options.NoOptions


_T5_1_1 = FamilyFacts(ENCODER_DECODER, tied_logits=False)
_PRIMER = FamilyFacts(
    DECODER,
    norm="layer_norm",
    mlp_activations=("relu",),
    mlp_bias=True,
    parametrisation="primer",
)
# Llama's paper does not give initial values; these are GPT-2's, as in Megatron-LM.
_LLAMA = FamilyFacts(
    DECODER,
    position="rotary",
    mlp_activations=("silu", "linear"),
    tied_logits=False,
    parametrisation="normal:scale_residual=true",
)
_BERT = FamilyFacts(
    ENCODER,
    position="absolute",
    norm="layer_norm:epsilon=1e-12",
    norm_placement="post",
    mlp_activations=("gelu_erf",),
    mlp_bias=True,
    attention_bias=True,
    embedding_norm=True,
    parametrisation="normal",
    # As in t5-experiments.
    rotary_fraction=0.25,
)

FAMILIES: Mapping[str, FamilyFacts] = MappingProxyType(
    {
        # BERT (arXiv:1810.04805), as in google-research/bert and transformers.
        "bert": _BERT,
        # BERT with norms before sublayers and after the last layer, as in t5-experiments. Kernels
        # that end a residual branch start narrower, as that project intended.
        "bert_pre_ln": replace(
            _BERT, norm_placement="pre", parametrisation="normal:scale_residual=true"
        ),
        # The Evolved Transformer's decoder (arXiv:1901.11117), as Primer is compared with it.
        "evolved_transformer": replace(
            _PRIMER,
            mlp_activations=("silu",),
            # Its heads have two sizes, so no angles fit them all.
            positions=("absolute", "none", "relative", "sinusoidal"),
            changeable=False,
            convolves=True,
            alike=False,
            even=("head_dim", "emb_dim"),
        ),
        # Gemma (arXiv:2403.08295).
        "gemma": replace(
            _LLAMA,
            norm="rms_norm:gain=offset",
            mlp_activations=("gelu", "linear"),
            scale_embeddings=True,
            tied_logits=True,
        ),
        # GPT-2 (Radford et al. 2019).
        "gpt2": FamilyFacts(
            DECODER,
            position="absolute",
            norm="layer_norm:epsilon=1e-5",
            mlp_activations=("gelu",),
            mlp_bias=True,
            attention_bias=True,
            parametrisation="normal:scale_residual=true",
        ),
        # Llama (arXiv:2302.13971): rotary positions, SwiGLU, logits with a kernel of their own.
        "llama": _LLAMA,
        # T5X's `decoder_only` example: the decoder of T5 1.1 without an encoder, logits tied.
        "lm": FamilyFacts(DECODER),
        # Primer and its rivals (arXiv:2109.08668): variants of Mesh TensorFlow's Transformer. The
        # default parts make the paper's vanilla Transformer.
        "primer": _PRIMER,
        # T5 as first published (arXiv:1910.10683): ReLU, logits tied to the embedding.
        "t5_1_0": replace(_T5_1_1, mlp_activations=("relu",), tied_logits=True),
        # T5 1.1 and mT5 (arXiv:2010.11934): gated GELU, logits with a kernel of their own.
        "t5_1_1": _T5_1_1,
    }
)
FAMILY_NAMES = tuple(FAMILIES)

_ATTENTION = MixerFacts(
    attentions=ATTENTION_NAMES,
    queries=True,
    groups=True,
    sparse=True,
    selects=True,
    caches=True,
    exports=(TRANSFORMERS, T5X),
)
_MDHA = replace(_ATTENTION, selects=False, convolves=True, exports=(TRANSFORMERS,))
_MIXERS: dict[str, MixerFacts] = {
    "attention": _ATTENTION,
    "cdq": MixerFacts(decodes=False, options=options.ConditionalQueries),
    "dense_synthesizer": MixerFacts(positions=WITHOUT_ANGLES, counts_positions=True, caches=True),
    "mdha": _MDHA,
    "mdha_shared_qk": replace(_MDHA, groups=False),
    "random_synthesizer": MixerFacts(queries=True, counts_positions=True, caches=True),
    "role_attention": replace(_ATTENTION, exports=(), options=options.Roles),
    "summed_heads": replace(_ATTENTION, exports=(), options=options.SummedHeads),
    "values_relu": replace(_ATTENTION, exports=(), options=options.ValuesRelu),
}
MIXERS: Mapping[str, MixerFacts] = MappingProxyType(_MIXERS)
MIXER_NAMES = tuple(MIXERS)


def mixer_options() -> dict[str, type]:
    """Returns the class of the options of each mixer."""
    return {name: mixer.options for name, mixer in MIXERS.items()}


def add_mixer(name: str, facts: MixerFacts) -> None:
    """Makes `name` a value of `ModelConfig.mixer`; called by `spec.register_mixer`.

    Raises:
      ValueError: there is a mixer of this name.
    """
    if name in _MIXERS:
        raise ValueError(f"there is a mixer called {name!r} already")
    _MIXERS[name] = facts
