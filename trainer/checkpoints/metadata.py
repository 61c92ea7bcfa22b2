"""The description of a run in its checkpoints: `checkpoint_STEP/run/metadata`, a JSON file.

It holds the arrays' checksums and its own SHA-256. This module needs neither JAX nor Orbax.
"""

import json
import os
import re
from typing import Any

from tasks.storage import files, seal
from tasks.terminal.command_line import UserError
from trainer import config as run_config
from trainer.config import Config
from trainer.engine.damage import Damaged

# Keys of the checksums by array, the number of updates, and the SHA-256 of everything else.
CHECKSUMS = "checksums"
STEP = "step"
_REQUIRED = ("config", "cache_fingerprints", CHECKSUMS)
# Orbax's files for the item `run` and for the tree of arrays.
_FILE = ("run", "metadata")
_TREE = ("state", "_METADATA")
# Orbax finds the files of a checkpoint by a pattern that begins with the checkpoint's path.
_OF_PATTERNS = re.compile(r"[][*?\\]")


def check_folder(folder: str, flag: str) -> None:
    """Raises UserError if Orbax cannot write checkpoints below a folder, the value of a flag."""
    path = folder if files.is_remote(folder) else os.path.abspath(files.local_path(folder))
    if found := _OF_PATTERNS.search(path):
        of = "" if found[0] in folder else f", which is {path}"
        raise UserError(
            f"{flag}={folder}{of}: checkpoints need a path without [, ], *, ? and \\: choose "
            "another folder"
        )


def read(checkpoint: str) -> dict[str, Any]:
    """Returns the description in a checkpoint's folder.

    Raises:
      Damaged: it is missing, cannot be read, or does not match its SHA-256.
      UserError: the store cannot be reached, or an earlier version wrote it.
    """
    name, found = "/".join(_FILE), _json(checkpoint, _FILE)
    if not isinstance(found, dict):
        raise Damaged(checkpoint, f"{name} is not a description")
    found, is_whole = seal.opened(found)
    if is_whole is None:
        if CHECKSUMS in found:
            raise Damaged(checkpoint, f"{name} has lost its SHA-256")
        raise UserError(
            f"checkpoint {checkpoint} was written by an earlier version, without checksums: use "
            "the version that wrote it"
        )
    if not is_whole:
        raise Damaged(checkpoint, f"{name} does not match its SHA-256")
    named_by = re.fullmatch(r"checkpoint_(\d+)", checkpoint.rstrip("/").rpartition("/")[2])
    if named_by and found.get(STEP, int(named_by[1])) != int(named_by[1]):
        raise Damaged(checkpoint, f"it is a copy of checkpoint_{found[STEP]}")
    for key in _REQUIRED:
        if not isinstance(found.get(key), dict):
            raise Damaged(checkpoint, f"{name} has no {key}")
    return found


def newest(model_dir: str) -> tuple[int, dict[str, Any]]:
    """Returns the newest undamaged checkpoint's step and description; (0, {}) if there is none."""
    names = (re.fullmatch(r"checkpoint_(\d+)", name) for name in files.list_names(model_dir))
    for step in sorted((int(name[1]) for name in names if name), reverse=True):
        try:
            return step, read(files.join(model_dir, f"checkpoint_{step}"))
        except Damaged:
            continue
    return 0, {}


def load_config(model_dir: str) -> tuple[Config, dict[str, str]]:
    """Returns what `config.load_config` does.

    Raises UserError if the newest checkpoint is of a run that this configuration cannot resume.
    """
    config, origins = run_config.load_config(model_dir)
    step, stored = newest(model_dir)
    if stored:
        path = files.join(model_dir, run_config.CONFIG_FILE)
        before = run_config.stored_config(stored["config"], model_dir)
        if differences := run_config.config_changes(before, config, step):
            raise UserError(
                f"{path} is not of the run that wrote checkpoint_{step} "
                f"({'; '.join(differences)}): restore it from a copy"
            )
    return config, origins


def update(checkpoint: str, **changes: Any) -> None:
    """Replaces entries of a checkpoint's description, atomically."""
    path = files.join(checkpoint, *_FILE)
    text = json.dumps(seal.sealed({**read(checkpoint), **changes}))
    files.write_bytes(path, text.encode())


def array_names(checkpoint: str) -> set[str]:
    """Returns the paths of a checkpoint's arrays, such as "params/decoder/decoder_norm/scale"."""
    try:
        tree = _json(checkpoint, _TREE)["tree_metadata"]
        return {
            "/".join(str(part["key"]) for part in entry["key_metadata"]) for entry in tree.values()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(checkpoint, f"{'/'.join(_TREE)} cannot be read") from error


def _json(checkpoint: str, parts: tuple[str, ...]) -> Any:
    name = "/".join(parts)
    try:
        return json.loads(files.read_bytes(files.join(checkpoint, *parts)))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(checkpoint, f"{name} is missing") from error
    except ValueError as error:
        raise Damaged(checkpoint, f"{name} is not valid JSON") from error


def compare(checkpoint: str, stored: dict[str, str], found: dict[str, str]) -> None:
    """Compares checksums of arrays just read with the stored ones; raises Damaged if any differ."""
    wrong = [name for name, checksum in found.items() if stored.get(name) != checksum]
    if wrong:
        others = f"; nor do {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise Damaged(checkpoint, f"{wrong[0]} does not match its checksum{others}")
