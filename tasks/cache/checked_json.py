"""Checks of the form of JSON values, with one line for each mistake."""

import json
from collections.abc import Collection
from typing import Any

from tasks.terminal.command_line import UserError

RESTORE = "restore the file from a copy, or run the command that wrote it again"


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
