"""Fields of configuration dataclasses: help, rules, and the rejection of values."""

import dataclasses
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

REQUIRED = dataclasses.MISSING
# Texts that mean None.
NONE = ("None", "none", "null")


_Kind = TypeVar("_Kind", bound=type)


class Rule(NamedTuple):
    """A condition on a field's value; `words` completes "it must be …", such as "0 or more"."""

    words: str
    holds: Callable[[Any], bool]


class ReadIf(NamedTuple):
    """The condition under which a field has an effect.

    `holds` takes the dataclass that has the field or, with `whole`, the whole configuration.
    If `whole`, `check` accepts any value, since a preset may set fields that its model does not
    use; only a typed flag is refused.
    """

    holds: Callable[[Any], bool]
    why: str | Callable[[Any], str]  # completes "it has no effect", as in "without --data.shuffle"
    whole: bool = False

    def reason(self, config: Any) -> str:
        return self.why if isinstance(self.why, str) else self.why(config)


# What a changed field affects in a run: all results; the batches, and so the results; only later
# results or batches; the order of sums; or nothing. The last four may change on resume.
Changes = Literal["results", "batches", "later", "later_batches", "rounding", "nothing"]


def field(
    default: Any,
    words: str,  # the field's effect, with its unit; shown by --help and --print_config=words
    *,
    rule: Rule | None = None,  # condition on a value other than None, enforced by `check`
    choices: Collection[Any] = (),  # enforced by `check`; a table may grow later
    aliases: Iterable[str] = (),
    unstored: Any = REQUIRED,  # the value in a stored configuration that lacks the field
    read_if: ReadIf | None = None,  # when the field has an effect
    # Field -> why, for fields of a nested dataclass that never have an effect here.
    unread: Mapping[str, str] = MappingProxyType({}),
    changes: Changes | None = None,  # what a change affects; None inherits the outer dataclass's
    often: str = "",  # a few words for a short list; if "", only --help=all shows the flag
    name: str = "",  # the flag's name, if it is not the field's
    metavar: str = "",  # the value's name in help; by default it follows from the type
    alone: str | None = None,  # the text that the flag means if it is given without a value
    repeated: bool = False,  # the whole text of a flag is one element of the tuple
    joined: str = "",  # the separator that joins the texts of several uses of the flag
    positional: bool = False,  # the value is given without a flag's name; a tuple takes several
    bare: bool = False,  # the value may also be given without the flag's name
    flat: bool = False,  # the flags of a nested dataclass have no prefix
    partial: type | None = None,  # a dataclass whose flags the field holds as `flags.Given`
    rest: Callable[[Sequence[str], Collection[str]], None] | None = None,
) -> Any:
    """Returns a dataclass field that carries its own help text, rules and flag.

    A class or a function as `default` is called for each instance. `aliases` are former names,
    still accepted in flags and stored configurations: "--name" is a name without the prefix of the
    dataclass; "name.*" takes every flag that begins with "name.". `rest` makes the field take all
    words that are not flags; the function gets the unknown words and the known names, and
    refuses the unknown words before any other mistake is reported.
    """
    metadata = {**locals(), "aliases": tuple(aliases)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Rejected(ValueError):
    """A configuration rejects the value of a field; `rule` says what is allowed."""

    def __init__(self, field: str, value: object, rule: str):
        """`field` may start with the name of its class: "LossConfig.z_loss"."""
        super().__init__(f"{field} is {value!r}; it must be {rule}")
        owner, _, rest = field.partition(".")
        self.field = rest if owner[:1].isupper() else field
        self.value, self.rule = value, rule


class Unread(Rejected):
    """A field without an effect is set; `why` completes "it has no effect"."""

    def __init__(self, field: str, value: object, default: object, why: str):
        unset = "unset" if default is None else repr(default)
        super().__init__(field, value, f"{unset} {why}")
        self.why = why


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises `Rejected` unless `holds`."""
    if not holds:
        raise Rejected(field, value, rule)


def check(config: Any) -> None:
    """Checks every field of a dataclass against its own rule, choices and `read_if`.

    None always passes. A dataclass may have a method `unread` that returns {name: why} for further
    fields without an effect. Raises `Rejected`, which names the class and the field.
    """
    owner = type(config).__name__
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if value is None:
            continue
        if choices := each.metadata.get("choices"):
            require(value in choices, f"{owner}.{each.name}", value, one_of(choices))
        if rule := each.metadata.get("rule"):
            require(rule.holds(value), f"{owner}.{each.name}", value, rule.words)
    unread = config.unread() if hasattr(config, "unread") else {}
    for each in dataclasses.fields(config):
        value, read_if = getattr(config, each.name), each.metadata.get("read_if")
        if value is None or value == each.default:
            continue
        if read_if and not read_if.whole and not read_if.holds(config):
            unread[each.name] = read_if.reason(config)
        if each.name in unread:
            raise Unread(f"{owner}.{each.name}", value, each.default, unread[each.name])


class Checked:
    """A base class for dataclasses that `check` themselves."""

    def __post_init__(self) -> None:
        check(self)


def at_least(least: float) -> Rule:
    """Returns the rule for numbers with a lower bound."""
    return Rule(f"{least} or more", lambda value: value >= least)


def above(bound: float) -> Rule:
    """Returns the rule for numbers greater than `bound`."""
    return Rule(f"above {bound}", lambda value: value > bound)


SEED = Rule("a 64-bit integer", lambda seed: -(2**63) <= seed < 2**63)
BELOW_ONE = Rule("in [0, 1)", lambda value: 0 <= value < 1)
INSIDE_ONE = Rule("above 0 and below 1", lambda value: 0 < value < 1)
SHARE = Rule("from 0 to 1", lambda value: 0 <= value <= 1)


def one_of(names: Iterable[str]) -> str:
    """Returns the words of a rule that allows one of `names`."""
    return "one of " + ", ".join(repr(name) for name in sorted(names))


def parse_value(text: str, declared: Any, choices: Collection[Any] = ()) -> Any:
    """Reads `text` as a value of a declared field type; raises ValueError if it has the wrong type.

    One of the field's `choices` is taken literally, even "none", which otherwise means None.
    """
    kinds = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        if text in NONE and text not in choices:
            return None
        return parse_value(text, next(kind for kind in kinds if kind is not type(None)))
    if typing.get_origin(declared) is tuple:
        return tuple(parse_value(part.strip(), kinds[0]) for part in text.split(",") if part)
    if declared is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("neither true nor false")
        return text.lower() == "true"
    if declared is int and re.fullmatch(r"[0-9.]+e[0-9]+", text) and float(text).is_integer():
        return int(float(text))  # 4e9
    return declared(text)


def has_kind(value: object, declared: Any) -> bool:
    """Returns whether a value is of a declared field type; whole numbers have 64 bits."""
    kinds = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return any(has_kind(value, kind) for kind in kinds)
    if typing.get_origin(declared) is tuple:
        return isinstance(value, tuple) and all(has_kind(each, kinds[0]) for each in value)
    if declared in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**64
    return isinstance(value, declared) and value == value  # not NaN


def shown(value: object) -> str:
    """Returns a value of any type as a message shows it, cut to some words."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of more than 4,300 digits"


def as_flag(value: object) -> str:
    """Returns a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def kind_in_words(declared: Any) -> str:
    """Returns a declared type in words, such as "a number or None"."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(declared) if kind is not type(None)]
        return " or ".join([*map(kind_in_words, kinds), "None"])
    if typing.get_origin(declared) is tuple:
        return f"values separated by commas, each {kind_in_words(typing.get_args(declared)[0])}"
    return words.get(declared, str(declared))
