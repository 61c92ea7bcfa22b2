"""Arrow files in folders written by `save_to_disk` of Hugging Face `datasets`.

A `DatasetDict` has `dataset_dict.json`, which names its splits, and a folder for each; a `Dataset`
has `state.json`, which names its files. Other Arrow files in these folders are caches or left over
from an earlier save, and are not read.
"""

import dataclasses
from typing import Any

from tasks.reading import listers, listing
from tasks.reading.corpus import TRAIN, VALIDATION, CorpusSpec, SourceFile
from tasks.reading.splits import VALIDATION_NAMES
from tasks.storage import files
from tasks.terminal.command_line import UserError

_DICT, _STATE = "dataset_dict.json", "state.json"


def list_files(spec: CorpusSpec) -> tuple[CorpusSpec, list[SourceFile], list[str]] | None:
    """Lists files as `listing.list_files` does, with the data set's splits.

    Returns None if the location is not such a folder. Raises UserError if the folder is damaged.
    """
    folder = spec.location.rstrip("/")
    if "*" in folder:
        return None
    if files.exists(files.join(folder, _DICT)):
        wanted = {
            f"{name}/{file}": VALIDATION if name in VALIDATION_NAMES else name
            for name in _member(folder, _DICT, "splits", str)
            for file in _data_files(files.join(folder, name))
        }
        pattern = files.join(folder, "*", "*.arrow")
    elif files.exists(files.join(folder, _STATE)):
        wanted = dict.fromkeys(_data_files(folder), TRAIN)
        pattern = files.join(folder, "*.arrow")
    else:
        return None
    _, found, _ = listing.list_files(dataclasses.replace(spec, location=pattern), by_words=False)
    by_name, chosen = {file.name: file for file in found}, []
    for name, split in sorted(wanted.items()):
        if name not in by_name:
            raise UserError(f"{files.join(folder, name)} is missing: save the data set again")
        chosen.append(dataclasses.replace(by_name[name], split=split))
    left = len(found) - len(chosen)
    notes = [f"not read: Arrow files that are not part of the data set, {left:,}"] if left else []
    pinned = dataclasses.replace(spec, location=folder.rpartition("/")[2])
    return pinned, chosen, notes


def _data_files(folder: str) -> list[str]:
    state = files.join(folder, _STATE)
    if not files.exists(state):
        raise UserError(f"{state} is missing: save the data set again")
    value = files.read_json(state)
    if isinstance(value, dict) and value.get("_indices_data_files"):
        raise UserError(
            f"{folder} is a selection of rows: save it again after data_set.flatten_indices()"
        )
    names = [each.get("filename") for each in _member(folder, _STATE, "_data_files", dict)]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"{state} has a file without a filename: save the data set again")
    return names


def _member(folder: str, name: str, member: str, kind: type) -> list[Any]:
    path = files.join(folder, name)
    value = files.read_json(path)
    found = value.get(member) if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise UserError(f"{path} has no list {member}: save the data set again")
    return found


class ArrowFiles(listers.Files):
    """The kind `arrow`: files, or a folder written by `save_to_disk` of `datasets`."""

    reads_folders = True

    def list_files(self, spec: CorpusSpec, by_words: bool) -> listers.Listed:
        pinned, found, notes = list_files(spec) or listing.list_files(spec, by_words)
        return pinned, spec.kind, found, notes


LISTER = ArrowFiles()
