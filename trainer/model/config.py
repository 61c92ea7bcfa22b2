"""A model in the words of people: sizes and names, in plain data that needs no JAX."""

from __future__ import annotations

from dataclasses import dataclass

# The keys of `spec.FAMILIES` and `feedforward.ACTIVATIONS`, which hold what they stand for.
FAMILY_NAMES = ("lm", "t5_1_0", "t5_1_1")
ACTIVATION_NAMES = ("gelu", "linear", "relu", "silu")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model in T5X's words.

    `family` is one of FAMILY_NAMES; mT5 is family "t5_1_1" with its own vocabulary size.
    `num_encoder_layers` is 0 for the decoder-only family "lm". `tied_logits` and
    `mlp_activations` left at None mean the family's own. `dtype` is that of activations;
    parameters are float32 always.

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

    def __post_init__(self) -> None:
        _require(self.family in FAMILY_NAMES, "family", self.family, _one_of(FAMILY_NAMES))
        _require(self.dtype in DTYPES, "dtype", self.dtype, _one_of(DTYPES))
        for name in ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        decoder_only = self.family == "lm"
        encoder_rule = "0 in a decoder-only model" if decoder_only else "above 0"
        layers_fit = (self.num_encoder_layers == 0) if decoder_only else self.num_encoder_layers > 0
        _require(layers_fit, "num_encoder_layers", self.num_encoder_layers, encoder_rule)
        _require(
            self.num_decoder_layers > 0, "num_decoder_layers", self.num_decoder_layers, "above 0"
        )
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
