"""Parts of MARCH (2023), a zoo of T5 variants, and dynamic tanh. No JAX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.terminal.flag_fields import BELOW_ONE, Rejected, Rule, above, at_least, field
from trainer.model.device import AUTO
from trainer.model.part_facts import (
    CrossFacts,
    FeedForwardFacts,
    StackPartFacts,
)
from trainer.model.registry import ATTENTION, STACK_PARTS, require_selecting_mixer
from trainer.model.slot import Choice, Part, add_part, constant, of_options, require_of

_PARTS = "trainer.annexes.march.layers:"


@dataclass(frozen=True)
class DynamicTanhOptions:
    """Options of dynamic tanh."""

    alpha: float = field(0.5, "initial factor of the states in the tanh", rule=above(0))


DYNAMIC_TANH = Part(of_options(_PARTS + "DynamicTanh"), options=DynamicTanhOptions)
PRE_WITHOUT_MIXER_RESIDUAL = Part(constant(_PARTS + "WITHOUT_MIXER_RESIDUAL"))


@dataclass(frozen=True)
class ValuesRelu:
    """Options of attention whose values first pass through a feed-forward network."""

    kernels: int = field(
        2,
        "2: a ReLU feed-forward with mlp_dim hidden units; 1: ReLU of one square product",
        rule=Rule("1 or 2", lambda value: value in (1, 2)),
    )


@dataclass(frozen=True)
class Roles:
    """Options of attention whose mixed values are multiplied by roles."""

    vectors: int = field(
        0,
        "number of role vectors that each position averages; 0: its projected state is its role",
        rule=at_least(0),
    )


@dataclass(frozen=True)
class SummedHeads:
    """Options of attention whose heads are summed in groups."""

    group: int = field(2, "number of heads in each sum", rule=at_least(2))


def _check_group(config: Any, options: SummedHeads) -> None:
    rule = f"a multiple of {options.group}, the group of mixer 'summed_heads'"
    require_of(config, config.num_heads % options.group == 0, "num_heads", rule)


_WITHOUT_EXPORTS = replace(ATTENTION, exports=())
ROLE_ATTENTION = Part(_PARTS + "role_attention", _WITHOUT_EXPORTS, Roles)
SUMMED_HEADS = Part(_PARTS + "summed_heads", _WITHOUT_EXPORTS, SummedHeads, _check_group)
VALUES_RELU = Part(_PARTS + "values_relu", _WITHOUT_EXPORTS, ValuesRelu)


@dataclass(frozen=True)
class Mixed:
    """Options of a feed-forward sublayer that adds two activations."""

    mean: bool = field(True, "halve the sum of the two activations")
    sigmoid_dropout: float = field(
        0.0, "share of sigmoids dropped in training before the sum", rule=BELOW_ONE
    )


def _check_mixed(config: Any, options: Mixed) -> None:
    fits = config.dropout_rate > 0 or not options.sigmoid_dropout
    require_of(config, fits, "dropout_rate", "above 0 with sigmoid_dropout")


MIXED = Part(_PARTS + "mixed", FeedForwardFacts(("mlp_bias",)), Mixed, _check_mixed)


def _check_by_layer(config: Any, options: Any) -> None:
    name = config.cross_attention
    rule = f"num_encoder_layers, {config.num_encoder_layers}, with cross_attention {name!r}"
    fits = config.num_decoder_layers == config.num_encoder_layers
    require_of(config, fits, "num_decoder_layers", rule)
    rule = f"False with cross_attention {name!r}: each layer attends to different states"
    require_of(config, not config.scan_layers, "scan_layers", rule)


def _check_keys(config: Any, options: Any) -> None:
    _check_by_layer(config, options)
    require_selecting_mixer(config, f"cross_attention {config.cross_attention!r}")


_CROSS = "trainer.annexes.march.cross_attention:"
LAYERWISE = Part(_CROSS + "layerwise", check=_check_by_layer)
ENCODER_KEYS = Part(_CROSS + "encoder_keys", CrossFacts(last_states=False), check=_check_keys)


@dataclass(frozen=True)
class Halves:
    """Options of stacks with different numbers of heads in each half."""

    first: float = field(1.5, "heads in the first half, relative to num_heads", rule=above(0))
    second: float = field(0.5, "heads in the second half, relative to num_heads", rule=above(0))
    constant: bool = field(False, "change head_dim so that heads times head_dim stays the same")

    def __post_init__(self) -> None:
        if self.first == self.second == 1:
            raise Rejected("first", self.first, "other than 1 if second is 1")


def _check_halves(config: Any, options: Halves) -> None:
    require_of(config, config.num_kv_heads is None, "num_kv_heads", "None with halves")
    group = getattr(config.part("mixer").options, "group", 1)
    width = config.num_heads * config.head_dim
    for share in (options.first, options.second):
        heads = config.num_heads * share
        rule = f"such that num_heads, {config.num_heads}, times {share:g} is a multiple of {group}"
        require_of(config, heads % group == 0, "stack_parts", rule)
        rule = f"such that num_heads * head_dim, {width}, is divisible by {heads:g} heads"
        fits = not options.constant or width % heads == 0
        require_of(config, fits, "stack_parts", rule)
    # Angles, and the scale that divides ALiBi's bias, hold for a single head width.
    fits = not options.constant or config.facts("position").any_width
    require_of(config, fits, "position", "without rotary and alibi where head widths differ")
    require_selecting_mixer(config, "halves")


HALVES = Part(_PARTS + "halves", StackPartFacts(alike=False), Halves, _check_halves)


@dataclass(frozen=True)
class Database:
    """Options of a database."""

    count: int = field(
        768,
        "number of learned keys and values of each stack, to which every layer attends in a "
        "separate sublayer",
        rule=above(0),
    )


def _check_database(config: Any, options: Database) -> None:
    halves = config.stack_choices.get("halves")
    fits = halves is None or not halves.options.constant
    rule = "without constant=true with database_entries"
    require_of(config, fits, "stack_parts", rule)


@dataclass(frozen=True)
class Dropping:
    """Options of dropped tokens."""

    count: int = field(
        8,
        "number of positions that each encoder layer drops after attention: those that receive "
        "the least attention, padding first; no layer drops more than half",
        rule=above(0),
    )


def _check_dropping(config: Any, options: Dropping) -> None:
    fits = config.has_both_stacks
    rule = f"without token_dropping in family {config.family}, which predicts tokens in place"
    require_of(config, fits, "stack_parts", rule)
    rule = "False with token_dropping: layers have rows of different lengths"
    require_of(config, not config.scan_layers, "scan_layers", rule)
    rule = "'auto' or 'einsum' with token_dropping, which reads the weights"
    require_of(config, config.attention in (AUTO, "einsum"), "attention", rule)
    fits = config.cross_attention not in ("encoder_keys", "layerwise")
    require_of(config, fits, "cross_attention", "'attention' or 'merged' with token_dropping")
    rule = "'none' with token_dropping"
    require_of(config, config.parallel_blocks == "none", "parallel_blocks", rule)
    require_selecting_mixer(config, "token_dropping")


def _dropping_is_idle(config: Any, options: Dropping, length: int) -> str | None:
    if 2 * options.count <= length + config.lengthening:
        return None
    return f"on rows of {length} inputs: no layer drops more than half of a row"


DATABASE_ENTRIES = Part(
    "trainer.annexes.march.cross_attention:database", None, Database, _check_database
)
TOKEN_DROPPING = Part(
    _PARTS + "dropping",
    StackPartFacts(reads_weights=True, idle=_dropping_is_idle),
    Dropping,
    _check_dropping,
)


def moved_database(model: dict[str, Any], count: int) -> None:
    """Moves the field of runs before 0.3 into the part's options, as the next two do."""
    if count:
        add_part(model, Choice("database_entries", Database(count)))


def moved_dropping(model: dict[str, Any], count: int) -> None:
    if count:
        add_part(model, Choice("token_dropping", Dropping(count)))


def moved_halves(model: dict[str, Any], text: str) -> None:
    if text != "none":
        add_part(model, STACK_PARTS.parse(text))
