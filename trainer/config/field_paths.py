"""Reads, replaces, parses and describes fields of nested frozen dataclasses by path."""

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import (
    REQUIRED,
    Rejected,
    as_flag,
    has_kind,
    kind_in_words,
    parse_value,
    shown,
)
from tasks.terminal.flags import Given, refusal


class RejectedField(UserError):
    """A configuration rejects the field at `path`; `rejected` holds its value and the rule."""

    def __init__(self, path: str, rejected: Rejected):
        shown = "" if rejected.value is None else f"={as_flag(rejected.value)}"
        super().__init__(str(refusal(rejected, f"--{path}{shown}")))
        self.path, self.rejected = path, rejected


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (field path, value) for plain values, also inside nested dataclasses and tuples."""
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
    """Returns a copy of `config` with the field at `path` set; raises a UserError if rejected."""
    return replace_all(config, {path: value})


def replace_all(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy with the fields at all paths set; raises a UserError for rejected values."""
    try:
        return _replaced(config, values, "")
    except ValueError as error:
        raise UserError(str(error)) from error


def implied(config: Any, origins: dict[str, str], values: Mapping[str, Any], by: str) -> Any:
    """Returns a copy with the fields at all paths set; `by`, which implies them, is their origin.

    Raises a UserError for rejected values.
    """
    origins |= dict.fromkeys(values, by)
    return replace_all(config, values)


def _replaced(config: Any, values: Mapping[str, Any], path: str) -> Any:
    groups: dict[str, dict[str, Any]] = {}
    for inner, value in values.items():
        name, _, rest = inner.partition(".")
        groups.setdefault(name, {})[rest] = value

    def changed(name: str, old: Any) -> Any:
        group = groups[name]
        return group[""] if "" in group else _replaced(old, group, f"{path}{name}.")

    if isinstance(config, tuple):
        return tuple(
            changed(str(place), old) if str(place) in groups else old
            for place, old in enumerate(config)
        )
    new = {name: changed(name, getattr(config, name)) for name in groups}
    try:
        return dataclasses.replace(config, **new)
    except Rejected as error:
        raise RejectedField(path + error.field, error) from error


def field_type(config: Any, path: str) -> Any:
    """Returns the declared type of the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        inner = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
        return field_type(inner, rest)
    return typing.get_type_hints(type(config))[name]


def metadata(config: Any, path: str) -> Mapping[str, Any]:
    """Returns the metadata that `flag_fields.field` attached to the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        inner = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
        return metadata(inner, rest)
    return next(field.metadata for field in dataclasses.fields(config) if field.name == name)


def override(config: Any, origins: dict[str, str], given: Given) -> Any:
    """Returns `config` with the given flags applied, and records their origin."""
    try:
        return implied(config, origins, given.values, "command line")
    except RejectedField as error:
        if error.path not in given.typed:
            raise
        raise refusal(error.rejected, given.typed[error.path]) from error


def describe(config: Any, origins: Mapping[str, str], words: bool = False) -> str:
    """Returns a line per field, "path = JSON  # origin"; with `words`, also its help."""
    rows = [(name, json.dumps(each), origins.get(name, "default")) for name, each in leaves(config)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for path, value, origin in rows:
        lines.append(f"{path:<{widths[0]}} = {value:<{widths[1]}}  # {origin}")
        text = metadata(config, path).get("words") if words else None
        if text:
            lines += textwrap.wrap(text, 96, initial_indent="    # ", subsequent_indent="    # ")
    return "\n".join(lines)


def from_dict(kind: type, value: Mapping[str, Any], source: str, path: str = "") -> Any:
    """Inverts dataclasses.asdict, including tuples and nested dataclasses.

    Accepts former names of fields; fields missing from `value` get their `unstored` value. Unknown
    and missing fields, and values that are rejected or of another type, raise a UserError that
    names the file `source`.
    """
    hints = typing.get_type_hints(kind)
    value = {str(name): each for name, each in value.items()}
    for field in dataclasses.fields(kind):
        for alias in field.metadata.get("aliases", ()):
            former = value.pop(alias, None)
            if former is not None:
                value[field.name] = former
        unstored = field.metadata.get("unstored", REQUIRED)
        if unstored is not REQUIRED:
            value.setdefault(field.name, unstored)
    unknown = set(value) - set(hints)
    if unknown:
        names = ", ".join(path + name for name in sorted(unknown))
        raise UserError(
            f"{source} has fields from a different version, or of an annex that is not installed: "
            f"{names}"
        )
    known: dict[str, Any] = {}
    for name, item in value.items():
        is_group = dataclasses.is_dataclass(hints[name])
        if is_group and isinstance(item, Mapping):
            known[name] = from_dict(hints[name], item, source, f"{path}{name}.")
            continue
        known[name] = tuple(item) if isinstance(item, list) else item
        if is_group or not has_kind(known[name], hints[name]):
            kind_of = "a group of settings" if is_group else kind_in_words(hints[name])
            raise UserError(f"{source}: {path}{name} is {shown(item)}; it must be {kind_of}")
    for field in dataclasses.fields(kind):
        if field.default is field.default_factory is REQUIRED and field.name not in known:
            raise UserError(f"{source} lacks {path}{field.name}")
    try:
        return kind(**known)
    except Rejected as error:
        message = f"{path}{error.field} is {error.value!r}; it must be {error.rule}"
        raise UserError(f"{source} is from a different version: {message}") from error
    except ValueError as error:
        raise UserError(f"{source} is from a different version: {error}") from error


def refuse_two_values(settings: Iterable[str], flag: str) -> None:
    """Raises UserError if two of the settings "NAME=VALUE" give one name different values."""
    first: dict[str, str] = {}
    for setting in settings:
        name = setting.partition("=")[0].strip()
        if first.setdefault(name, setting) != setting:
            raise UserError(f"--{flag}{first[name]} and --{flag}{setting}: give one of them")


def with_settings(value: Any, settings: Sequence[str], flag: str, name: str) -> Any:
    """Returns a copy of a dataclass with fields set, each given as "field.path=value".

    UserErrors name the settings' `flag` and call the dataclass `name`.
    """
    refuse_two_values(settings, f"{flag}=")
    for setting in settings:
        path, _, text = setting.partition("=")
        known = {path for path, _ in leaves(value)}
        if path not in known:
            listed = ", ".join(sorted(known)) or "no fields that can be set"
            raise UserError(f"--{flag}={setting}: {name} has no field {path}; it has {listed}")
        declared = field_type(value, path)
        try:
            parsed = parse_value(text, declared, metadata(value, path).get("choices", ()))
        except ValueError as error:
            raise UserError(f"--{flag}={setting}: it must be {kind_in_words(declared)}") from error
        try:
            value = replace(value, path, parsed)
        except RejectedField as error:
            raise refusal(error.rejected, f"--{flag}={setting}") from error
    return value


def check_pattern(name: str, pattern: str | None) -> None:
    """Raises `Rejected` if a field is not a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise Rejected(name, pattern, f"a regular expression: {error}") from error
