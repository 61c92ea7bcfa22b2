"""Model configuration: plain data, no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.terminal.fields import REQUIRED, field, one_of, require
from trainer.model.facts import (
    ACTIVATION_NAMES,
    ATTENTION_NAMES,
    AUTO,
    DECODER,
    ENCODER,
    ENCODER_DECODER,
    FAMILIES,
    FAMILY_NAMES,
    MIXERS,
    NORM_NAMES,
    NORM_PLACEMENT_NAMES,
    POSITION_NAMES,
    SOFTMAX_DTYPES,
    FamilyFacts,
    MixerFacts,
    attention_on,
    fills_lanes,
)

_DTYPES = ("float32", "bfloat16")
_REMATS = ("none", "dots", "full")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: its family, its sizes, and the parts in which it differs from its family.

    A part that is None is the family's own. Parameters are float32 whatever `dtype` is.

    Raises:
      Rejected: at construction, if a value makes no sense or has no effect.
    """

    family: str = field(
        "t5_1_1",
        "architecture of the model; mT5 is t5_1_1 with its own vocab_size",
        choices=FAMILY_NAMES,
    )
    vocab_size: int = field(REQUIRED, "rows of the token embedding, at least one for each id")
    emb_dim: int = field(REQUIRED, "width of the residual stream")
    num_heads: int = field(REQUIRED, "attention heads of each layer")
    head_dim: int = field(REQUIRED, "width of a head; num_heads * head_dim need not be emb_dim")
    mlp_dim: int = field(REQUIRED, "hidden width of the feed-forward sublayers")
    num_encoder_layers: int = field(
        REQUIRED, "layers of the encoder; 0 in families without an encoder"
    )
    num_decoder_layers: int = field(
        REQUIRED,
        "layers of the decoder (blocks of two in evolved_transformer); 0 in families without one",
    )
    dropout_rate: float = field(0.0, "share of units dropped in training, in [0, 1)")
    dtype: str = field(
        "float32", "type of activations; parameters are always float32", choices=_DTYPES
    )
    tied_logits: bool | None = field(
        None, "read logits off the token embedding; None: as the family does"
    )
    mlp_activations: tuple[str, ...] | None = field(
        None,
        "activations whose product the feed-forward sublayer takes, separated by commas, each of "
        f"{', '.join(ACTIVATION_NAMES)}; None: the family's",
    )
    position: str | None = field(
        None,
        "how the model knows the order of tokens: a learned table, T5's biases, shared by the "
        "layers of a stack or learned by each as in T5X's scalable_t5 and umT5, or rotation of "
        "queries and keys; None: the family's",
        choices=POSITION_NAMES,
    )
    max_positions: int = field(
        512, "positions (tokens) of a table of absolute positions and of a Synthesizer"
    )
    mixer: str | None = field(
        None,
        "sublayer through which positions exchange information, cross attention excepted; "
        "None: attention",
        choices=MIXERS,
    )
    norm: str | None = field(None, "norm of the layers; None: the family's", choices=NORM_NAMES)
    norm_placement: str | None = field(
        None,
        "norms before every sublayer, or before the mixer and after the feed-forward sublayer as "
        "in Primer; None: before",
        choices=NORM_PLACEMENT_NAMES,
    )
    mlp_bias: bool | None = field(
        None, "biases in feed-forward sublayers, experts excepted; None: as the family does"
    )
    num_experts: int = field(0, "experts of each Switch layer; 0: no Switch layers")
    switch_every: int = field(4, "every layer whose number divides by this is a Switch layer")
    upstream_compat: bool = field(
        False,
        "let convolutions and Synthesizers see across packed examples, as Primer's code does",
    )
    scan_layers: bool = field(
        False,
        "compile one layer and run it for all: compilation takes as long for any depth; results "
        "are the same, but dropout draws other units",
    )
    remat: str = field(
        "none",
        "activations kept for the backward pass: all (none), outputs of products with kernels "
        "(dots), or each layer's input (full), for a third more operations; on a CPU it saves "
        "memory only together with scan_layers",
        choices=_REMATS,
    )
    attention: str = field(
        AUTO,
        "implementation of attention: products written out, the fastest on a CPU (einsum), "
        "jax.nn.dot_product_attention (dot_product), cuDNN's fused kernel for NVIDIA GPUs and "
        "bfloat16 (cudnn), or fused kernels for TPUs (pallas); dot_product and cudnn cannot drop "
        "weights; auto: pallas on a TPU where dtype is bfloat16 and head_dim fits, or else einsum",
        choices=ATTENTION_NAMES,
    )
    softmax_dtype: str = field(
        AUTO,
        "type of the logits and softmax of attention where no fused kernel computes it; kernels "
        "use float32; auto: float32, but the type of activations on a TPU, as in T5X",
        choices=SOFTMAX_DTYPES,
    )

    @property
    def family_facts(self) -> FamilyFacts:
        """Facts about the family."""
        return FAMILIES[self.family]

    @property
    def mixer_facts(self) -> MixerFacts:
        """Facts about the mixer of the layers."""
        return MIXERS[self.mixer or "attention"]

    @property
    def architecture(self) -> str:
        """The stacks of the model: "encoder_decoder", "decoder" or "encoder"."""
        return self.family_facts.architecture

    @property
    def position_scheme(self) -> str:
        """The scheme of positions, one of POSITION_NAMES: `position` or the family's own."""
        return self.position or self.family_facts.position

    @property
    def counts_positions(self) -> bool:
        """True if rows must not be longer than `max_positions`."""
        return self.position_scheme == "absolute" or self.mixer_facts.counts_positions

    def attention_on(self, device_kind: str) -> str:
        """Returns the implementation of attention in training on a device, as JAX names its kind.

        "einsum" if `attention` is "auto" and kernels cannot compute this model's attention.
        """
        fits = "pallas" in self.mixer_facts.attentions
        if self.attention == AUTO and (not fits or self._drops_by_query):
            return "einsum"
        return attention_on(device_kind, self.attention, self.dtype, self.head_dim)

    @property
    def _drops_by_query(self) -> bool:
        """True if each query drops weights of its own, which no kernel does."""
        return self.architecture == ENCODER and self.dropout_rate > 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("family", FAMILY_NAMES),
            ("dtype", _DTYPES),
            ("remat", _REMATS),
            ("attention", ATTENTION_NAMES),
            ("softmax_dtype", SOFTMAX_DTYPES),
        ):
            self._require(getattr(self, name) in allowed, name, one_of(allowed))
        self._check_sizes()
        self._check_pieces()
        self._check_position()
        self._check_attention()
        self._check_scan()

    def _require(self, holds: bool, name: str, rule: str) -> None:
        require(holds, name, getattr(self, name), rule)

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "max_positions"):
            self._require(getattr(self, name) > 0, name, "above 0")
        for name in self.family_facts.even:
            self._require(getattr(self, name) % 2 == 0, name, "even")
        for name, architectures in (
            ("num_encoder_layers", (ENCODER, ENCODER_DECODER)),
            ("num_decoder_layers", (DECODER, ENCODER_DECODER)),
        ):
            layers = getattr(self, name)
            if self.architecture in architectures:
                self._require(layers > 0, name, "above 0")
            else:
                self._require(layers == 0, name, f"0 in a model that is {self.architecture} only")
        self._require(0.0 <= self.dropout_rate < 1.0, "dropout_rate", "in [0, 1)")
        if self.mlp_activations is not None:
            known = len(self.mlp_activations) > 0 and {*self.mlp_activations} <= {*ACTIVATION_NAMES}
            rule = f"one or more, each {one_of(ACTIVATION_NAMES)}"
            self._require(known, "mlp_activations", rule)

    def _check_pieces(self) -> None:
        known = {"mixer": MIXERS, "norm": NORM_NAMES, "norm_placement": NORM_PLACEMENT_NAMES}
        for name, default in (*dict.fromkeys((*known, "mlp_bias")).items(), ("num_experts", 0)):
            value = getattr(self, name)
            if value == default:
                continue
            rule = f"{default} in family {self.family}"
            self._require(self.family_facts.changeable, name, rule)
            if name in known:
                self._require(value in known[name], name, one_of(known[name]))
        self._require(self.num_experts >= 0, "num_experts", "0 or more")
        self._require(self.switch_every > 0, "switch_every", "above 0")
        if self.upstream_compat:
            mixer = self.mixer_facts
            fits = self.family_facts.convolves or mixer.convolves or mixer.counts_positions
            rule = "False where nothing convolves or synthesizes"
            self._require(fits, "upstream_compat", rule)

    def _check_position(self) -> None:
        facts, scheme = self.family_facts, self.position_scheme
        rule = f"{one_of(facts.positions)} in family {self.family}"
        self._require(scheme in facts.positions, "position", rule)
        fitting = [name for name in facts.positions if name in self.mixer_facts.positions]
        rule = f"{one_of(fitting)} with mixer {self.mixer!r}"
        self._require(scheme in fitting, "position", rule)
        if scheme == "rotary":
            # Channels are rotated in pairs.
            multiple = 2 * facts.rotary_divisor
            rule = f"a multiple of {multiple} with rotary positions"
            self._require(self.head_dim % multiple == 0, "head_dim", rule)

    def _check_attention(self) -> None:
        if self.attention in (AUTO, "einsum"):
            return
        # Weights dropped for all queries at once are values dropped, which kernels need not know.
        if self.attention != "pallas" or self._drops_by_query:
            rule = f"0 with attention {self.attention!r}, which drops no weights"
            self._require(self.dropout_rate == 0, "dropout_rate", rule)
        fitting = [name for name, facts in MIXERS.items() if self.attention in facts.attentions]
        rule = f"{one_of(fitting)} with attention {self.attention!r}"
        self._require(self.attention in self.mixer_facts.attentions, "mixer", rule)
        if self.attention == "pallas":
            rule = "a divisor or multiple of 128 with attention 'pallas'"
            self._require(fills_lanes(self.head_dim), "head_dim", rule)
        if self.attention == "cudnn":
            self._require(self.dtype == "bfloat16", "dtype", "'bfloat16' with attention 'cudnn'")

    def _check_scan(self) -> None:
        alike = self.family_facts.alike and (not self.num_experts or self.switch_every == 1)
        rule = "False where layers differ: a scan runs equal ones"
        self._require(alike or not self.scan_layers, "scan_layers", rule)
