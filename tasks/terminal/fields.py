"""Fields of configuration dataclasses: their help, their rules, and one way to reject a value."""

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

REQUIRED = dataclasses.MISSING
# Texts that stand for None.
NONE = ("None", "none", "null")


class Rule(NamedTuple):
    """A condition on the value of a field.

    `words` completes "it must be …", as in "0 or more"; `holds` tells whether a value complies.
    """

    words: str
    holds: Callable[[Any], bool]


def field(
    default: Any,
    words: str,
    *,
    rule: Rule | None = None,
    choices: Collection[Any] = (),
    aliases: Iterable[str] = (),
    unstored: Any = REQUIRED,
) -> Any:
    """Returns a dataclass field that carries its own help text.

    Args:
      default: the value if none is given; REQUIRED if there is none. A class or a function is
        called for each instance.
      words: what the field does, with its unit; shown by --help and --print_config=words.
      rule: what a value other than None must be, enforced by `check`.
      choices: the allowed values, where they can be listed; enforced by `check`. A table that grows
        later is read as it is then.
      aliases: former names of the field, which flags and stored configurations may still use.
      unstored: the value of a stored configuration that lacks the field, as it was written before
        there was one; the default if not given.
    """
    metadata = {
        "words": words,
        "rule": rule,
        "choices": choices,
        "aliases": tuple(aliases),
        "unstored": unstored,
    }
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Rejected(ValueError):
    """A configuration rejects the value of a field.

    Attributes:
      field: path of the field within the dataclass that rejects it, without the class.
      value: the rejected value.
      rule: what the value must be, as in "0 or more".
    """

    def __init__(self, field: str, value: object, rule: str):
        """`field` may start with the name of its class: "LossConfig.z_loss"."""
        super().__init__(f"{field} is {value!r}; it must be {rule}")
        owner, _, rest = field.partition(".")
        self.field = rest if owner[:1].isupper() else field
        self.value, self.rule = value, rule


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises `Rejected` unless `holds`."""
    if not holds:
        raise Rejected(field, value, rule)


def check(config: Any) -> None:
    """Checks every field of a dataclass against its own rule and choices; None always passes.

    Raises:
      Rejected: names the class and the field.
    """
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        rule, choices = each.metadata.get("rule"), each.metadata.get("choices")
        if value is None:
            continue
        name = f"{type(config).__name__}.{each.name}"
        if choices:
            require(value in choices, name, value, one_of(choices))
        if rule:
            require(rule.holds(value), name, value, rule.words)


def at_least(least: float) -> Rule:
    """Returns the rule of numbers that have a smallest value."""
    return Rule(f"{least} or more", lambda value: value >= least)


def above(bound: float) -> Rule:
    """Returns the rule of numbers greater than `bound`."""
    return Rule(f"above {bound}", lambda value: value > bound)


# A share that leaves something: dropout rates, decay rates of moments.
SEED = Rule("a 64-bit integer", lambda seed: -(2**63) <= seed < 2**63)
BELOW_ONE = Rule("in [0, 1)", lambda value: 0 <= value < 1)


def one_of(names: Iterable[str]) -> str:
    """Returns the words of a rule that allows one of `names`."""
    return "one of " + ", ".join(repr(name) for name in sorted(names))


def parse_value(text: str, declared: Any, choices: Collection[Any] = ()) -> Any:
    """Reads `text` as a value of a declared field type.

    A text that is one of the field's `choices` is that choice, even "none", which otherwise stands
    for None.

    Raises:
      ValueError: the text does not have that type.
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
    return declared(text)


def kind_in_words(declared: Any) -> str:
    """Returns a declared type in words, as in "a number or None"."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(declared) if kind is not type(None)]
        return " or ".join([*map(kind_in_words, kinds), "None"])
    if typing.get_origin(declared) is tuple:
        return f"values separated by commas, each {kind_in_words(typing.get_args(declared)[0])}"
    return words.get(declared, str(declared))
