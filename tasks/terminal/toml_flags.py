"""Tables whose keys are flags, of TOML files or Python: their values as typed on a command line."""

import dataclasses
import datetime
import numbers
import os
import pathlib
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import has_kind, shown
from tasks.terminal.flags import flags_of


def read(path: pathlib.Path, text: str | None = None) -> dict[str, Any]:
    """Returns a file's table; raises UserError if there is no such file or it is not TOML.

    `text` is what the file held when it was read.
    """
    try:
        return tomllib.loads(text_of(path) if text is None else text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def text_of(path: pathlib.Path) -> str:
    """Returns a file's text; raises UserError if there is no such file or it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a TOML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns dotted path -> value; TOML reads optimizer.name = … as a nested table."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = f"{path}.{name}" if path else str(name)
        found |= flat(value, inner) if isinstance(value, dict) else {inner: value}
    return found


def as_text(value: Any, name: str = "a value") -> str:
    """Returns a value as it would be typed on a command line; raises UserError if it cannot be."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return ",".join(as_text(each, name) for each in value)
    is_plain = value is None or isinstance(value, str | numbers.Number | datetime.date)
    if not is_plain or (isinstance(value, int) and not has_kind(value, int)):
        raise UserError(f"{name} is {shown(value)}: it must be a text, a number, true or false")
    return str(value)


def changed(config: Any) -> dict[str, Any]:
    """Returns flag -> value for the fields of a dataclass that are not at their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.metadata:  # set only by code
            continue
        value, name = getattr(config, field.name), field.metadata["name"] or field.name
        if dataclasses.is_dataclass(value):
            found |= changed(value) if field.metadata["flat"] else {name: changed(value)}
        elif value != field.default:
            found[name] = value
    return found


def words(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Returns a command line of the values of `texts`."""
    return [f"--{name}={text}" for name, found in texts(kind, values).items() for text in found]


def texts(kind: type, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns flag -> its texts, several if it repeats, of values for the flags of a dataclass.

    Values are as in TOML, or tuples, paths, or dataclasses for groups of flags, which stand for
    their fields that are not at their defaults. A flag that cannot be None is left out if it is.
    """
    flat_groups = {field.name for field in dataclasses.fields(kind) if field.metadata.get("flat")}
    known = {name: flag for flag in flags_of(kind) for name in flag.names}
    found: dict[str, tuple[str, ...]] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, os.PathLike):
            value = changed(value)
        of_group = name in flat_groups and isinstance(value, dict)  # not the flag of this name
        for key, inner in flat(value if of_group else {name: value}).items():
            flag = known.get(key.replace("-", "_"))
            if inner is None and flag and type(None) not in typing.get_args(flag.declared):
                continue
            repeats = flag and flag.field.metadata["repeated"] and isinstance(inner, list | tuple)
            spelt = flag.name if flag else key
            given = [as_text(each, spelt) for each in (inner if repeats else [inner])]
            found[spelt] = (*found.get(spelt, ()), *given)
    return found
