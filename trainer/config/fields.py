"""Fields of nested frozen dataclasses by path: read, replaced, parsed from flags, described."""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.fields import NONE, REQUIRED, Rejected, kind_in_words, parse_value
from trainer.config import elsewhere


class RejectedField(UserError):
    """A configuration rejects a field; the message names its flag.

    Attributes:
      path: the field's path in the whole configuration.
      value: the rejected value.
      rule: what the value must be, as in "0 or more".
    """

    def __init__(self, path: str, value: object, rule: str):
        shown = "" if value is None else f"={as_flag(value)}"
        super().__init__(f"--{path}{shown}: it must be {rule}")
        self.path, self.value, self.rule = path, value, rule


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (field path, value) of every field that holds a plain value.

    Nested dataclasses and tuples of dataclasses are entered; elements of tuples are numbered.
    """
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
      UserError: a dataclass rejects the value.
    """
    return replace_all(config, {path: value})


def replace_all(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of `config` with the fields at all paths set.

    The fields of one dataclass are set at once, so its rules see them together, in any order.

    Raises:
      UserError: a dataclass rejects the values; a `RejectedField` where it says which one.
    """
    try:
        return _replaced(config, values, "")
    except ValueError as error:
        raise UserError(str(error)) from error


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
        raise RejectedField(path + error.field, error.value, error.rule) from error


def field_type(config: Any, path: str) -> Any:
    """Returns the declared type of the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        inner = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
        return field_type(inner, rest)
    return typing.get_type_hints(type(config))[name]


def metadata(config: Any, path: str) -> Mapping[str, Any]:
    """Returns what `tasks.terminal.fields.field` noted of the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        inner = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
        return metadata(inner, rest)
    return next(field.metadata for field in dataclasses.fields(config) if field.name == name)


def former_names(config: Any) -> dict[str, str]:
    """Returns former path -> path, of all fields that were renamed."""
    return {
        path.removesuffix(path.rpartition(".")[2]) + alias: path
        for path, _ in leaves(config)
        for alias in metadata(config, path).get("aliases", ())
    }


def refuse_unknown(config: Any, arguments: list[str]) -> None:
    """Raises `UserError` for the first of `arguments` that is no flag or lacks its value."""
    for _ in _given(config, arguments):
        pass


def _given(config: Any, arguments: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (name as typed, field path, text of the value) of each flag; see `override`."""
    known, former = {path for path, _ in leaves(config)}, former_names(config)
    pending = list(arguments)
    while pending:
        flag = pending.pop(0)
        name, equals, text = flag.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        path = former.get(name, name)
        if not flag.startswith("--") or path not in known:
            raise UserError(f"unknown flag {flag.split('=')[0]}{_meant(path, known)}")
        if not equals:
            if not pending:
                raise UserError(f"--{name} needs a value")
            text = pending.pop(0)
        yield name, path, text


def override(config: Any, origins: dict[str, str], arguments: list[str]) -> Any:
    """Applies `--field.path=value` (or `--field.path value`) and records the origins.

    Former names of a field are accepted. The last of several values holds.

    Raises:
      UserError: an unknown field, a value of the wrong type, or one that a field rejects.
    """
    values: dict[str, Any] = {}
    typed: dict[str, tuple[str, str]] = {}
    for name, path, text in _given(config, arguments):
        if name != path and text in NONE:  # a former name that is not set
            continue
        if path in typed and typed[path][0] != name:
            raise UserError(f"--{typed[path][0]} and --{name} are the same: set one of them")
        declared = field_type(config, path)
        try:
            values[path] = parse_value(text, declared, metadata(config, path).get("choices", ()))
        except ValueError as error:
            raise UserError(f"--{name}={text}: it must be {kind_in_words(declared)}") from error
        typed[path] = (name, text)
        origins[path] = "command line"
    try:
        return replace_all(config, values)
    except RejectedField as error:
        if error.path not in typed:
            raise
        name, text = typed[error.path]
        raise UserError(f"--{name}={text}: it must be {error.rule}") from error


def _meant(name: str, known: Collection[str]) -> str:
    """Returns " (did you mean --X?)" for the field that an unknown flag probably means, or ""."""
    theirs = elsewhere.FLAGS.get(name)
    if theirs == ():
        return " (a flag of another trainer, which has no counterpart here)"
    ends = [path for path in sorted(known) if path.rpartition(".")[2] == name]
    found = [ours if " --" in ours else f"--{ours}" for ours in theirs or ends]
    return f" (did you mean {' or '.join(found)}?)" if found else nearest(name, known)


def describe(config: Any, origins: Mapping[str, str], words: bool = False) -> str:
    """Returns one line per field, "path = value  # origin", the value as JSON.

    With `words`, an indented comment below each line says what the field does.
    """
    rows = [
        (path, json.dumps(value), origins.get(path, "default")) for path, value in leaves(config)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for path, value, origin in rows:
        lines.append(f"{path:<{widths[0]}} = {value:<{widths[1]}}  # {origin}")
        text = metadata(config, path).get("words") if words else None
        if text:
            lines += textwrap.wrap(text, 96, initial_indent="    # ", subsequent_indent="    # ")
    return "\n".join(lines)


def from_dict(kind: type, value: Mapping[str, Any], source: str) -> Any:
    """Inverse of dataclasses.asdict, tuples and nested dataclasses included.

    Former names of fields are accepted, and fields that `value` lacks have their `unstored` value.

    Args:
      kind: the dataclass.
      value: field name -> value.
      source: the file that holds them, named in errors.

    Raises:
      UserError: an unknown field, or a value that a field rejects.
    """
    return _from_dict(kind, value, source, "")


def _from_dict(kind: type, value: Mapping[str, Any], source: str, path: str) -> Any:
    hints = typing.get_type_hints(kind)
    value = dict(value)
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
        raise UserError(f"{source} has fields of another version: {names}")
    known = {}
    for name, item in value.items():
        if dataclasses.is_dataclass(hints[name]):
            item = _from_dict(hints[name], item, source, f"{path}{name}.")
        elif isinstance(item, list):
            item = tuple(item)
        known[name] = item
    try:
        return kind(**known)
    except Rejected as error:
        message = f"{path}{error.field} is {error.value!r}; it must be {error.rule}"
        raise UserError(f"{source} is of another version: {message}") from error
    except ValueError as error:
        raise UserError(f"{source} is of another version: {error}") from error


def as_flag(value: object) -> str:
    """Returns a value as it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def with_settings(value: Any, settings: Iterable[str], flag: str, name: str) -> Any:
    """Returns a copy of a dataclass with fields set, each given as "field.path=value".

    Args:
      value: the dataclass.
      settings: the settings.
      flag: the flag that they were given with, for error messages.
      name: what error messages call the dataclass.

    Raises:
      UserError: there is no such field, or the dataclass rejects its value.
    """
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
            raise UserError(f"--{flag}={setting}: it must be {error.rule}") from error
    return value
