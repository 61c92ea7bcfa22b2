"""TOML files whose tables are flags: reading them, and their values as typed on a command line."""

import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from tasks.terminal.command_line import UserError


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns a file's table; raises UserError if there is no such file or it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns dotted path -> value; TOML reads optimizer.name = … as a nested table."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = f"{path}.{name}" if path else name
        found |= flat(value, inner) if isinstance(value, dict) else {inner: value}
    return found


def as_text(value: Any) -> str:
    """Returns a value as it would be typed on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(as_text, value)) if isinstance(value, list) else str(value)
