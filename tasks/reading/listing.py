"""Listing the files of a corpus in a folder or store."""

import contextlib
import dataclasses
import re
from typing import Any

from tasks.reading import opening
from tasks.reading.corpus import CorpusSpec, SourceFile
from tasks.reading.splits import split_of
from tasks.storage import files
from tasks.terminal.command_line import UserError


def list_files(spec: CorpusSpec) -> tuple[CorpusSpec, list[SourceFile]]:
    """Returns the spec with its pattern relative to the fixed folder, and the files that match.

    Raises:
      UserError: no file matches, or the store cannot list them.
    """
    is_remote = files.is_remote(spec.location)
    fs, pattern = files.filesystem(spec.location)
    relative = _relative(pattern)
    base = pattern.removesuffix(relative)
    found = []
    for path, info in sorted(_matching_files(spec, pattern).items()):
        name = path[len(base) :]
        if info["type"] != "file" or name.rsplit("/", 1)[-1].startswith("."):
            continue
        url = fs.unstrip_protocol(path) if is_remote else path
        if info["size"] is None:
            raise UserError(f"{url} has no known size: copy it and name the copy")
        etag = files.etag(info)
        state = {"etag": etag} if etag and is_remote else {}
        written = "" if is_remote else etag
        found.append(SourceFile(url, name, split_of(name), info["size"], state, written))
    if not found:
        raise UserError(f"no file matches {spec.location}")
    return dataclasses.replace(spec, location=relative), found


def _relative(pattern: str) -> str:
    """Returns a pattern from its first component with a wildcard on; the file's name if none."""
    components = pattern.split("/")
    first = next((i for i, part in enumerate(components) if re.search(r"[*\[]", part)), -1)
    return "/".join(components[first:])


def _matching_files(spec: CorpusSpec, pattern: str) -> dict[str, dict[str, Any]]:
    try:
        found = files.on_store(spec.location, _matches)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{spec.location} cannot be listed: {error}") from error
    if list(found) == [pattern] and found[pattern]["type"] == "directory":
        raise UserError(
            f"{spec.location} is a folder: name its files, as in {spec.kind}:"
            f"{files.join(spec.location, '*')}"
        )
    return found


def _matches(fs: Any, pattern: str) -> dict[str, dict[str, Any]]:
    """Returns {path: the store's info} of all that matches a pattern.

    Raises:
      FileNotFoundError: nothing matches.
    """
    with contextlib.suppress(FileNotFoundError):
        return {pattern: fs.info(pattern)}
    found = fs.glob(pattern, detail=True)
    if not found:
        raise FileNotFoundError(pattern)
    return found


def pinned_state(file: SourceFile) -> dict[str, str]:
    """Returns what identifies a file's content: the store's etag, or a local file's checksum.

    Raises:
      UserError: a local file cannot be read.
    """
    if file.state:
        return file.state
    if files.is_remote(file.path):
        return {}
    with opening.user_errors(file.path):
        return {"sha256": files.sha256(file.path)}
