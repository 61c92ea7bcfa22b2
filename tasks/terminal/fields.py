"""Fields of configuration dataclasses: words for `--help`, and one way to reject a value."""

import dataclasses
from collections.abc import Iterable
from typing import Any

REQUIRED = dataclasses.MISSING


def field(
    default: Any, words: str, *, choices: Iterable[str] = (), aliases: Iterable[str] = ()
) -> Any:
    """Returns a dataclass field that carries its own sentence.

    Args:
      default: the value if none is given; REQUIRED if there is none. A callable that is a class
        or function makes the default anew for each instance.
      words: what the field does, with its unit; shown by --help and --print_config.
      choices: the allowed values, where they are names.
      aliases: former names of the field's flag that are still accepted.
    """
    metadata = {"words": words, "choices": tuple(choices), "aliases": tuple(aliases)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Rejected(ValueError):
    """A configuration rejects the value of a field.

    Attributes:
      field: name of the field; a caller that knows where the dataclass sits puts the path before.
      value: the value that was rejected.
      rule: what the value must be, as in "0 or more".
    """

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(f"{field} is {value!r}; it must be {rule}")
        self.field, self.value, self.rule = field, value, rule


class Idle(Rejected):
    """A field was set that has no effect in this configuration.

    Stored configurations may hold such fields from before they were refused; a reader of one sets
    them back to their defaults.
    """


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises `Rejected` unless `holds`."""
    if not holds:
        raise Rejected(field, value, rule)


def one_of(names: Iterable[str]) -> str:
    """Returns the rule of a field that takes one of `names`."""
    return "one of " + ", ".join(repr(name) for name in sorted(names))
