"""The record of a conversion, a file in each folder that it makes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.model.config import ModelConfig

FILE = "conversion.json"
# Keys that may differ when a rerun skips a folder.
_OF_THE_FILES = ("name", "positions")


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a conversion.

    Attributes:
      source: path of the checkpoint.
      step: number of updates made.
      format: the format written.
      dtype: dtype of the stored parameters.
      scanned: whether layers were joined.
      model: the model.
      name: its preset, or the file that describes it.
      positions: the longest row of training, if known.
      vocabulary_sha256: checksum of the vocabulary written along, or None.
    """

    source: str
    step: int
    format: str
    dtype: str
    scanned: bool
    model: ModelConfig
    name: str
    positions: int
    vocabulary_sha256: str | None

    def as_json(self) -> dict[str, Any]:
        """Returns the record as the file has it."""
        values = _as_json(dataclasses.asdict(self))
        return {"from": place(values.pop("source")), **values}


def of_export(model_dir: str, step: int, vocabulary: str | None) -> dict[str, Any]:
    """Returns the record of the export of a run's checkpoint, with a vocabulary's path if given."""
    return {
        "from": place(model_dir),
        "step": step,
        "format": "huggingface",
        "vocabulary": vocabulary and place(vocabulary),
    }


def place(path: str) -> str:
    """Returns a remote path unchanged, and a local one as an absolute path."""
    return path if files.is_remote(path) else os.path.abspath(files.local_path(path))


def recorded(path: str) -> dict[str, Any] | None:
    """Returns the record in a folder; None if no conversion made it."""
    where = files.join(path, FILE)
    return files.read_json(where) if files.exists(where) else None


def checks(path: str) -> list[str]:
    """Returns the results of the checks of a finished conversion."""
    return list((recorded(path) or {}).get("checks", ()))


def is_finished(path: str, record: dict[str, Any], flag: str = "--to") -> bool:
    """Returns whether `path` is what `record` says, False if nothing is there.

    Args:
      path: the folder.
      record: what should be there.
      flag: the flag that named the folder, for messages.

    Raises:
      UserError: something else is there.
    """
    if not os.path.lexists(path):
        return False
    found = recorded(path)
    if found is None:
        raise UserError(f"{path} exists: name another folder by {flag}, or delete it")
    for key, value in record.items():
        if key not in _OF_THE_FILES and found.get(key) != value:
            what = "of another model" if key == "model" else f"with {key} {found.get(key)}"
            raise UserError(
                f"{path} is another conversion, {what}: name another folder by {flag}, or delete it"
            )
    return True


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value
