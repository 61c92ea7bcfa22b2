"""JSON values of dataclasses; checks of the form of JSON values, with one line for each mistake."""

import dataclasses
import functools
import json
from collections.abc import Collection
from typing import Any

from tasks.terminal.command_line import UserError

RESTORE = "restore the file from a copy, or run the command that wrote it again"


def as_json(value: Any) -> Any:
    """Returns a value as JSON; a dataclass is an object without those of its fields that are None.

    `dataclasses.asdict` takes three times as long, seconds for a cache of 20,000 shards.
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


def check_keys(
    value: Any, name: str, needed: Collection[str], more: Collection[str] = frozenset()
) -> None:
    """Checks that `value` is an object with the keys `needed`, and no others but `more`."""
    check_form(value, dict, name, "an object")
    if value.keys() >= set(needed) and value.keys() <= {*needed, *more}:
        return
    for key in sorted(set(needed) - value.keys()):
        raise UserError(f"{name} has no {key}; {RESTORE}")
    for key in sorted(value.keys() - {*needed, *more}):
        raise UserError(f"{name} has {short(key)}, which is not of this version; {RESTORE}")


def check_form(value: Any, kind: type, name: str, words: str) -> Any:
    """Returns `value`; raises a UserError unless it is of the type `kind`."""
    if not isinstance(value, kind):
        raise wrong(name, value, words)
    return value


def check_count(value: Any, name: str, least: int = 0) -> None:
    """Raises a UserError unless `value` is an int of `least` or more."""
    if type(value) is not int or value < least:
        raise wrong(name, value, f"a whole number, {least} or more")


def wrong(name: str, value: Any, words: str) -> UserError:
    """Returns the error that says what `value` must be."""
    return UserError(f"{name} is {short(value)}, and must be {words}; {RESTORE}")
