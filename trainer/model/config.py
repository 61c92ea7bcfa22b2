"""A model in the words of people: sizes and names, in plain data that needs no JAX."""

from __future__ import annotations

from dataclasses import dataclass

# The keys of `spec.FAMILIES` and `feedforward.ACTIVATIONS`, which hold what they stand for.
FAMILY_NAMES = ("bert", "bert_pre_ln", "llama", "lm", "t5_1_0", "t5_1_1")
ACTIVATION_NAMES = ("gelu", "gelu_erf", "linear", "relu", "silu")
# The keys of `spec.POSITIONS`.
POSITION_NAMES = ("absolute", "relative", "rotary")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "dots", "full")
ATTENTIONS = ("einsum", "dot_product", "cudnn")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model in T5X's words.

    `family` is one of FAMILY_NAMES; mT5 is family "t5_1_1" with its own vocabulary size.
    `num_encoder_layers` is 0 for the decoder-only families "lm" and "llama", `num_decoder_layers`
    for the encoder-only families "bert" and "bert_pre_ln". `tied_logits` and `mlp_activations`
    left at None mean the family's own. `dtype` is that of activations; parameters are float32
    always.

    `position`, one of POSITION_NAMES, is a choice of the encoder-only families alone, "absolute"
    if None; T5's is relative. `max_positions` is the size of its table if "absolute".

    `scan_layers`: one layer is compiled and run for all, so that compiling takes the same time
    however many there are. Initial parameters and results are those of the model without, under
    the names and shapes of `trainer.model.layers.stack_layers`; dropout draws other units.

    `remat` says what is kept of a layer's forward pass for the backward pass, which computes the
    rest once more; results are the same. "none": all is kept. "dots": outputs of products with
    kernels; attention, norms and activations are computed again. "full": the layer's input alone,
    for a third more operations. On a CPU it saves memory only together with `scan_layers`.

    `attention` says what computes it, results being the same up to rounding. "einsum": products
    written out, the fastest on a CPU. "dot_product": `jax.nn.dot_product_attention`, whatever XLA
    makes of it. "cudnn": the same by cuDNN's fused kernel, which keeps no table of weights; NVIDIA
    GPUs and bfloat16 only. The last two cannot drop weights.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    family: str = "t5_1_1"
    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    dropout_rate: float = 0.0
    dtype: str = "float32"
    tied_logits: bool | None = None
    mlp_activations: tuple[str, ...] | None = None
    position: str | None = None
    max_positions: int = 512
    scan_layers: bool = False
    remat: str = "none"
    attention: str = "einsum"

    @property
    def architecture(self) -> str:
        """What stacks there are: "encoder_decoder", "decoder" or "encoder"."""
        if self.family in ("lm", "llama"):
            return "decoder"
        return "encoder" if self.family in ("bert", "bert_pre_ln") else "encoder_decoder"

    def __post_init__(self) -> None:
        _require(self.family in FAMILY_NAMES, "family", self.family, _one_of(FAMILY_NAMES))
        _require(self.dtype in DTYPES, "dtype", self.dtype, _one_of(DTYPES))
        _require(self.remat in REMATS, "remat", self.remat, _one_of(REMATS))
        _require(self.attention in ATTENTIONS, "attention", self.attention, _one_of(ATTENTIONS))
        if self.attention != "einsum":
            rule = f"0 with attention {self.attention!r}, which drops no weights"
            _require(self.dropout_rate == 0, "dropout_rate", self.dropout_rate, rule)
        if self.attention == "cudnn":
            rule = "'bfloat16' with attention 'cudnn'"
            _require(self.dtype == "bfloat16", "dtype", self.dtype, rule)
        for name in ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "max_positions"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for stack, alone in (("encoder", "decoder"), ("decoder", "encoder")):
            name = f"num_{stack}_layers"
            layers = getattr(self, name)
            if self.architecture == alone:
                _require(layers == 0, name, layers, f"0 in a model that is {alone} only")
            else:
                _require(layers > 0, name, layers, "above 0")
        if self.position is not None:
            encoder_only = self.architecture == "encoder"
            rule = _one_of(POSITION_NAMES) if encoder_only else f"None in family {self.family}"
            _require(
                encoder_only and self.position in POSITION_NAMES, "position", self.position, rule
            )
        if self.family == "llama":
            # All channels turn, in pairs.
            _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        if self.position == "rotary":
            # A quarter of the channels turns, in pairs.
            _require(self.head_dim % 8 == 0, "head_dim", self.head_dim, "a multiple of 8")
        _require(0.0 <= self.dropout_rate < 1.0, "dropout_rate", self.dropout_rate, "in [0, 1)")
        if self.mlp_activations is not None:
            _require(
                len(self.mlp_activations) > 0
                and set(self.mlp_activations) <= set(ACTIVATION_NAMES),
                "mlp_activations",
                self.mlp_activations,
                f"one or more, each {_one_of(ACTIVATION_NAMES)}",
            )


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"ModelConfig.{field} is {value!r}; it must be {rule}")


def _one_of(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(repr(name) for name in sorted(names))
