"""JSON values of dataclasses: conversion, comparison and validation."""

import dataclasses
import functools
import json
from collections.abc import Collection
from typing import Any, TypeVar, get_args, get_origin

from tasks.terminal.command_line import UserError

Kind = TypeVar("Kind")
RESTORE = "restore the file from a copy, or run the command that wrote it again"


def as_json(value: Any) -> Any:
    """Converts a value to JSON; a dataclass becomes an object without the fields that are None.

    `dataclasses.asdict` takes three times as long: seconds for a cache of 20,000 shards.
    """
    kind: Any = type(value)
    if kind in (str, int):
        return value
    if dataclasses.is_dataclass(value):
        held = ((name, getattr(value, name)) for name in _field_names(kind))
        return {name: as_json(each) for name, each in held if each is not None}
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def short(value: Any) -> str:
    """Returns a value as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Returns the differences between two JSON values, each as "field: ours, there: theirs"."""
    if _has_labels(mine) and _has_labels(theirs):
        ours, others = ({_label(each): each for each in some} for some in (mine, theirs))
        if ours == others and mine != theirs:
            return [f"order of {path}: {short([*ours])}, there: {short([*others])}"]
        mine, theirs = ours, others
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return [
            each
            for key in sorted({*mine, *theirs})
            for each in differences(mine.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if mine == theirs else [f"{path}: {short(mine)}, there: {short(theirs)}"]


def _has_labels(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "label" in e for e in value)


def _label(value: dict[str, Any]) -> str:
    side = value.get("settings", {}).get("side", "both")
    return value["label"] if side == "both" else f"{value['label']} of {side}"


def checked(kind: type[Kind], value: Any, name: str, where: str = "{name}.{key}") -> Kind:
    """Parses a dataclass from a JSON object; inverse of `as_json`; raises UserError if invalid.

    Fields that may be None may be missing. Integers must be 0 or more. Nested dataclasses, and
    tuples and dicts of them, are parsed too; types other than int, str and dict are not checked
    and stay JSON. `name` and `where` are for messages.
    """
    of_kind: Any = kind
    needed, optional, parsers = _form(of_kind)
    check_keys(value, name, needed, optional)
    found = {**dict.fromkeys(optional), **value}
    for key, parse in parsers:
        if found[key] is not None or key in needed:
            found[key] = parse(found[key], where.format(name=name, key=key))
    return kind(**found)


@functools.cache
def _form(kind: Any) -> tuple[frozenset[str], frozenset[str], list[tuple[str, Any]]]:
    """Returns a dataclass's required fields, its optional fields, and their parsers."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    optional = frozenset(name for name, each in types.items() if type(None) in get_args(each))
    parsers = ((name, _parser(each)) for name, each in types.items())
    return frozenset(types) - optional, optional, [parser for parser in parsers if parser[1]]


def _parser(kind: Any) -> Any:
    """Returns a function (JSON value, name) -> value for a declared type, or None to accept any."""
    args = get_args(kind)
    if type(None) in args:
        return _parser(args[0])
    of: Any = next(filter(dataclasses.is_dataclass, (kind, *args)), None)
    if of is kind:
        return functools.partial(checked, of)
    if of and get_origin(kind) is tuple:
        return lambda value, name: tuple(
            checked(of, each, name) for each in check_form(value, list, name, "a list")
        )
    if of:
        return lambda value, name: {
            key: checked(of, each, key, "{key} of {name}")
            for key, each in check_form(value, dict, name, "an object").items()
        }
    return _CHECKS.get(get_origin(kind) or kind)


def check_keys(
    value: Any, name: str, needed: Collection[str], more: Collection[str] = frozenset()
) -> None:
    """Raises UserError unless `value` is an object with all `needed` keys and at most `more`."""
    check_form(value, dict, name, "an object")
    if value.keys() >= set(needed) and value.keys() <= {*needed, *more}:
        return
    for key in sorted(set(needed) - value.keys()):
        raise UserError(f"{name} has no {key}; {RESTORE}")
    for key in sorted(value.keys() - {*needed, *more}):
        raise UserError(f"{name} has {short(key)}, which this version does not know; {RESTORE}")


def check_form(value: Any, kind: type, name: str, words: str) -> Any:
    """Returns `value`; raises UserError unless it is a `kind`."""
    if not isinstance(value, kind):
        raise wrong(name, value, words)
    return value


def check_count(value: Any, name: str, least: int = 0) -> Any:
    """Returns `value`; raises UserError unless it is an int of at least `least`."""
    if type(value) is not int or value < least:
        raise wrong(name, value, f"a whole number, {least} or more")
    return value


_CHECKS: dict[Any, Any] = {
    int: check_count,
    str: lambda value, name: check_form(value, str, name, "text"),
    dict: lambda value, name: check_form(value, dict, name, "an object"),
}


def wrong(name: str, value: Any, words: str) -> UserError:
    return UserError(f"{name} is {short(value)}, but must be {words}; {RESTORE}")
