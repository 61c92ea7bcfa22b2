"""Fields of nested frozen dataclasses by path: read, replaced, parsed from flags, described."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.fields import Idle


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (field path, value) of every field that is not itself a dataclass or a tuple of
    dataclasses, whose elements are numbered."""
    if isinstance(config, tuple):
        parts = [(str(place), value) for place, value in enumerate(config)]
    else:
        parts = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    for name, value in parts:
        inner = f"{path}.{name}" if path else name
        several = isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])
        if dataclasses.is_dataclass(value) or several:
            yield from leaves(value, inner)
        else:
            yield inner, value


def replace(config: Any, path: str, value: Any) -> Any:
    """Returns a copy of `config` with the field at `path` set.

    Raises:
      UserError: the dataclass refuses the value.
    """
    name, _, rest = path.partition(".")
    try:
        if isinstance(config, tuple):
            place = int(name)
            return (*config[:place], replace(config[place], rest, value), *config[place + 1 :])
        new = replace(getattr(config, name), rest, value) if rest else value
        return dataclasses.replace(config, **{name: new})
    except ValueError as error:
        raise UserError(str(error)) from error


def replace_all(config: Any, values: dict[str, Any]) -> Any:
    """Returns a copy of `config` with the fields at all paths set, those of a dataclass at once:
    what it checks is the whole, in whatever order they are given.

    Raises:
      UserError: a dataclass refuses the values.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        groups.setdefault(name, {})[rest] = value
    new = {
        name: group[""] if "" in group else replace_all(getattr(config, name), group)
        for name, group in groups.items()
    }
    try:
        return dataclasses.replace(config, **new)
    except ValueError as error:
        raise UserError(str(error)) from error


def field_type(config: Any, path: str) -> Any:
    """Returns the declared type of the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        inner = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
        return field_type(inner, rest)
    return typing.get_type_hints(type(config))[name]


def parse_value(text: str, declared: Any) -> Any:
    """Reads `text` as a value of a declared field type.

    Raises:
      ValueError: it is none.
    """
    choices = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        if text in ("None", "none", "null"):
            return None
        return parse_value(text, next(kind for kind in choices if kind is not type(None)))
    if typing.get_origin(declared) is tuple:
        return tuple(parse_value(part.strip(), choices[0]) for part in text.split(",") if part)
    if declared is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("neither true nor false")
        return text.lower() == "true"
    return declared(text)


def override(config: Any, origins: dict[str, str], arguments: list[str]) -> Any:
    """Applies `--field.path=value` (or `--field.path value`) and notes the origins.

    Raises:
      UserError: an unknown field, or a value of the wrong type.
    """
    known = {path for path, _ in leaves(config)}
    values: dict[str, Any] = {}
    pending = list(arguments)
    while pending:
        flag = pending.pop(0)
        path, equals, text = flag.removeprefix("--").partition("=")
        path = path.replace("-", "_")
        if not flag.startswith("--") or path not in known:
            raise UserError(f"unknown flag {flag.split('=')[0]}{nearest(path, known)}")
        if not equals:
            if not pending:
                raise UserError(f"--{path} needs a value")
            text = pending.pop(0)
        declared = field_type(config, path)
        try:
            values[path] = parse_value(text, declared)
        except ValueError as error:
            name = getattr(declared, "__name__", str(declared))
            raise UserError(f"--{path}={text}: not a value of type {name}") from error
        origins[path] = "command line"
    return replace_all(config, values)


def describe(config: Any, origins: dict[str, str]) -> str:
    """One line a field: its path, value and origin."""
    rows = [
        (path, json.dumps(value), origins.get(path, "default")) for path, value in leaves(config)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{path:<{widths[0]}} = {value:<{widths[1]}}  # {origin}" for path, value, origin in rows
    )


def from_dict(kind: type, value: dict[str, Any], path: str) -> Any:
    """Inverse of dataclasses.asdict, tuples and nested dataclasses included."""
    hints = typing.get_type_hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise UserError(f"{path} has fields of another version: {', '.join(sorted(unknown))}")
    known = {}
    for name, item in value.items():
        if dataclasses.is_dataclass(hints[name]):
            item = from_dict(hints[name], item, path)
        elif isinstance(item, list):
            item = tuple(item)
        known[name] = item
    while True:
        try:
            return kind(**known)
        except Idle as error:
            del known[error.field]
        except ValueError as error:
            raise UserError(f"{path} is of another version: {error}") from error
