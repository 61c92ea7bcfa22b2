"""The record of a conversion: a file in each converted folder."""

import os
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError

FILE = "conversion.json"
# Keys that may differ when a rerun skips a folder.
_OF_THE_FILES = ("name", "positions", "ids")


def of_export(
    model_dir: str, step: int, vocabulary: str | None, average: str | None
) -> dict[str, Any]:
    """Returns the record of an export; `vocabulary` is a path or None, `average` its flag."""
    return {
        "from": place(model_dir),
        "step": step,
        "format": "huggingface",
        "vocabulary": vocabulary and place(vocabulary),
        "average": average,
    }


def place(path: str) -> str:
    """Makes a local path absolute and leaves a remote one unchanged."""
    return path if files.is_remote(path) else os.path.abspath(files.local_path(path))


def recorded(path: str) -> dict[str, Any] | None:
    """Returns the record in a folder; None if it was not converted."""
    where = files.join(path, FILE)
    return files.read_json(where) if files.exists(where) else None


def checks(path: str) -> list[str]:
    """Returns the check results of a finished conversion."""
    return list((recorded(path) or {}).get("checks", ()))


def is_finished(path: str, record: dict[str, Any], flag: str = "--to") -> bool:
    """Returns whether `path` holds the conversion `record`; refuses to touch anything else."""
    if not os.path.lexists(path):
        return False
    found = recorded(path)
    if found is None:
        raise UserError(f"{path} exists: name another folder with {flag}, or delete it")
    for key, value in record.items():
        if key == "model":  # an earlier release recorded fewer fields
            found = {**found, "model": {**value, **(found.get("model") or {})}}
        if key not in _OF_THE_FILES and found.get(key) != value:
            what = "of another model" if key == "model" else f"with {key} {found.get(key)}"
            raise UserError(
                f"{path} is a conversion {what}: name another folder with {flag}, or delete it"
            )
    return True
