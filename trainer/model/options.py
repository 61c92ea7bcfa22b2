"""Parts of a model by name, with options: "rotary", or "rotary:base=500000,fraction=0.5".

The options of a part are a frozen dataclass whose fields carry their words and rules. Plain data,
no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from tasks.terminal.fields import (
    BELOW_ONE,
    Rejected,
    Rule,
    above,
    at_least,
    check,
    field,
    kind_in_words,
    one_of,
    parse_value,
)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a part that has none."""


class Part(NamedTuple):
    """A part and its options."""

    name: str
    options: Any

    def __str__(self) -> str:
        """Returns the shortest text that `parse` reads as this part."""
        changed = [
            f"{each.name}={_text(getattr(self.options, each.name))}"
            for each in dataclasses.fields(self.options)
            if getattr(self.options, each.name) != each.default
        ]
        return ":".join([self.name, *[",".join(changed)] * bool(changed)])


def parse(slot: str, text: str, known: Mapping[str, type]) -> Part:
    """Returns the part that `text` names.

    Args:
      slot: the field of `ModelConfig` that holds the text, named in errors.
      known: the options of each part of this slot by the part's name.

    Raises:
      Rejected: there is no such part or option, or the option rejects its value.
    """
    name, _, rest = text.partition(":")
    if name not in known:
        raise Rejected(slot, text, one_of(known))
    return _parse(slot, text, name, rest, known[name])


@cache
def _parse(slot: str, text: str, name: str, rest: str, kind: type) -> Part:
    declared, values = _declared(kind), {}
    for setting in rest.split(",") if ":" in text else ():
        option, equals, value = setting.partition("=")
        if option not in declared or not equals:
            rule = f"{name!r} alone"
            if declared:
                listed = ", ".join(declared)
                rule = f"{name!r} with options {listed}, as {name}:{next(iter(declared))}=…"
            raise Rejected(slot, text, rule)
        if option in values:
            raise Rejected(
                slot, text, f"{name!r} with each option once, and {option} is there twice"
            )
        kind_of = kind_in_words(declared[option])
        try:
            values[option] = parse_value(value, declared[option])
        except ValueError as error:
            raise Rejected(slot, text, f"a part whose {option} is {kind_of}") from error
        if isinstance(values[option], float) and not math.isfinite(values[option]):
            raise Rejected(slot, text, f"a part whose {option} is a finite number")
    try:
        options = kind(**values)
        check(options)
    except Rejected as error:
        option = error.field.rpartition(".")[2]
        raise Rejected(slot, text, f"a part whose {option} is {error.rule}") from error
    return Part(name, options)


@cache
def _declared(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# ---- Norms. -------------------------------------------------------------------------------------

GAINS = ("vector", "offset", "scalar", "none")


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """The options of a norm."""

    epsilon: float = field(1e-6, "added to the mean square or the variance", rule=above(0))
    gain: str = field(
        "vector",
        "learned scale: one for each channel (vector), the same stored less 1 and so pulled to 1 "
        "by weight decay, as in Gemma (offset), one for all channels (scalar), or none",
        choices=GAINS,
    )


@dataclasses.dataclass(frozen=True)
class LayerNormOptions(NormOptions):
    """The options of a norm that subtracts the mean."""

    bias: bool = field(True, "learned bias of each channel")


@dataclasses.dataclass(frozen=True)
class DynamicTanhOptions:
    """The options of dynamic tanh."""

    alpha: float = field(0.5, "initial factor of the states in the tanh", rule=above(0))


# ---- Positions. ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sinusoidal:
    """The options of sines and cosines added to the embeddings."""

    base: float = field(
        10_000.0, "the longest wave has 2 pi times as many positions", rule=above(1)
    )


@dataclasses.dataclass(frozen=True)
class Relative:
    """The options of T5's biases by distance."""

    num_buckets: int = field(
        32,
        "buckets of distances of each table; a multiple of 4",
        rule=Rule("a multiple of 4, above 0", lambda value: value > 0 and value % 4 == 0),
    )
    max_distance: int = field(128, "distance (tokens) from which all share a bucket")

    def __post_init__(self) -> None:
        if self.max_distance <= self.num_buckets // 2:
            raise Rejected("max_distance", self.max_distance, "above num_buckets / 2")


SCALINGS = ("none", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The options of rotated queries and keys."""

    base: float = field(
        10_000.0, "the slowest pair turns once in 2 pi times as many positions", rule=above(1)
    )
    fraction: float | None = field(
        None,
        "share of the channels of a head that is rotated; None: all, but a quarter in BERT",
        rule=Rule("in (0, 1]", lambda value: 0 < value <= 1),
    )
    cross: bool = field(False, "rotate the queries and keys of cross-attention, too, as MARCH V2")
    scaling: str = field(
        "none",
        "slow the rotation down for rows longer than in pretraining: every pair by factor "
        "(linear), or only slow pairs, as Llama 3.1 does (llama3)",
        choices=SCALINGS,
    )
    factor: float = field(8.0, "by how much scaling slows pairs down", rule=at_least(1))
    low_frequency: float = field(
        1.0, "llama3: turns in original_positions below which a pair is slowed down fully"
    )
    high_frequency: float = field(
        4.0, "llama3: turns in original_positions above which a pair is left alone"
    )
    original_positions: int = field(
        8192, "llama3: positions (tokens) of pretraining", rule=above(0)
    )

    def __post_init__(self) -> None:
        if not self.low_frequency < self.high_frequency:
            raise Rejected("high_frequency", self.high_frequency, "above low_frequency")
        if self.scaling == "none":
            _left_out(self, "without scaling", "factor")
        if self.scaling != "llama3":
            own = ("low_frequency", "high_frequency", "original_positions")
            _left_out(self, "without scaling=llama3", *own)


def _left_out(options: Any, when: str, *names: str) -> None:
    """Rejects options that differ from their defaults though nothing reads them."""
    defaults = {each.name: each.default for each in dataclasses.fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise Rejected(name, getattr(options, name), f"left out {when}")


# ---- Mixers. ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConditionalQueries:
    """The options of attention with conditional queries (cdQ)."""

    conditional_heads: int | None = field(
        None,
        "heads whose queries are conditional, half of num_heads or all, in which case no others "
        "are there; None: all",
        rule=above(0),
    )


# ---- Parametrisations. --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Normal:
    """The options of initial values from one normal distribution."""

    deviation: float = field(0.02, "standard deviation before the cut at two", rule=above(0))
    scale_residual: bool = field(
        False,
        "divide the deviation of kernels that end a residual branch by the root of the number of "
        "branches, as GPT-2 and Megatron-LM",
    )


@dataclasses.dataclass(frozen=True)
class Primer:
    """The options of Mesh TensorFlow's initial values."""

    scale: float | None = field(
        None,
        "factor of the variance of feed-forward kernels; None: 0.1 with experts, or else 1",
        rule=above(0),
    )


MUP_RULES = ("relative", "absolute")
READOUTS = ("inverse", "relative", "standard", "zero")


@dataclasses.dataclass(frozen=True)
class MaximalUpdate:
    """The options of muP."""

    base_width: int = field(
        128,
        "emb_dim of the model whose learning rate is used: a wider model's hidden kernels learn "
        "at base_width / emb_dim of it",
        rule=above(0),
    )
    rule: str = field(
        "relative",
        "learning rates of kernels: base_width / emb_dim of the run's (relative), or 1 / fan-in "
        "of it (absolute)",
        choices=MUP_RULES,
    )
    readout: str = field(
        "inverse",
        "standard deviation of the initial logits kernel: 1 / emb_dim (inverse), that of the "
        "standard one at base_width and falling as 1 / emb_dim (relative), emb_dim ** -0.5 "
        "(standard), or zero",
        choices=READOUTS,
    )

    def __post_init__(self) -> None:
        if self.rule == "absolute" and self.readout != "relative":
            _left_out(self, "with rule=absolute and this readout", "base_width")


# ---- Feed-forward sublayers. --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The options of a feed-forward sublayer that adds two activations."""

    mean: bool = field(True, "halve the sum of the two activations")
    sigmoid_dropout: float = field(
        0.0, "share of sigmoids dropped in training, before the sum", rule=BELOW_ONE
    )


# ---- Mixers. ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ValuesRelu:
    """The options of attention whose values go through a feed-forward first."""

    kernels: int = field(
        2,
        "2: a feed-forward of mlp_dim hidden units with ReLU; 1: ReLU of one square product",
        rule=Rule("1 or 2", lambda value: value in (1, 2)),
    )


@dataclasses.dataclass(frozen=True)
class Roles:
    """The options of attention whose mixed values are multiplied by roles."""

    vectors: int = field(
        0,
        "role vectors, of which each position takes a weighted mean; 0: its own state, projected",
        rule=at_least(0),
    )


@dataclasses.dataclass(frozen=True)
class SummedHeads:
    """The options of attention whose heads are summed in groups."""

    group: int = field(2, "heads that are summed", rule=at_least(2))


# ---- Heads. -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Halves:
    """The options of stacks whose halves have different numbers of heads."""

    first: float = field(1.5, "heads in the first half, for each of num_heads", rule=above(0))
    second: float = field(0.5, "heads in the second half, for each of num_heads", rule=above(0))
    constant: bool = field(False, "change head_dim so that heads times head_dim stays the same")

    def __post_init__(self) -> None:
        if self.first == self.second == 1:
            raise Rejected("first", self.first, "another number than 1, or second is")
