"""Command-line flags made from a dataclass of options."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from tasks.terminal.command_line import UserError
from tasks.terminal.fields import Rejected

_Options = TypeVar("_Options")


class _Repeated(argparse.Action):
    """Collects the values of a flag that may be repeated in a tuple."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def add_flags(parser: argparse._ActionsContainer, options: type, prefix: str = "") -> None:
    """Adds to a parser or group a flag for every field of the dataclass `options`.

    Fields are made by `fields.field`. Names of flags begin with `prefix`, as "processes.".

    The field gives the flag's name, default, words, choices and aliases; one without a default is
    required. Its type parses the text: `Annotated[int, positive]` by `positive`, `float | None` by
    `float`. A `bool`, False by default, becomes a switch without a value. The flag of a tuple can
    be repeated.
    """
    types_of = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        names = [f"--{prefix}{name}" for name in (field.name, *field.metadata["aliases"])]
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        words = field.metadata["words"]
        if types_of[field.name] is bool:
            parser.add_argument(
                *names, dest=prefix + field.name, action="store_true", default=default, help=words
            )
            continue
        repeated = typing.get_origin(types_of[field.name]) is tuple
        parser.add_argument(
            *names,
            dest=prefix + field.name,
            action=_Repeated if repeated else "store",
            type=_parser_of(types_of[field.name]),
            required=required,
            default=default,
            choices=field.metadata["choices"] or None,
            help=words,
        )


def options_of(flags: argparse.Namespace, options: type[_Options], prefix: str = "") -> _Options:
    """Returns the dataclass of the flags that `add_flags` added.

    Raises:
      UserError: the dataclass rejects a value.
    """
    names = [field.name for field in dataclasses.fields(typing.cast(Any, options))]
    try:
        return options(**{name: getattr(flags, prefix + name) for name in names})
    except Rejected as error:
        flag = f"--{prefix}{error.field}={error.value}"
        raise UserError(f"{flag}: it must be {error.rule}") from error


def _parser_of(hint: Any) -> Callable[[str], Any]:
    """Returns the function that parses a flag's text into a value of type `hint`."""
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[1]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return hint
