"""Lists the files of a corpus in a folder or store."""

import contextlib
import dataclasses
import heapq
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from tasks.reading import opening
from tasks.reading.corpus import TRAIN, CorpusSpec, SourceFile
from tasks.reading.splits import split_of
from tasks.storage import files, store
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError

# Matches of a pattern that are not read.
_KINDS = {"directory": "folders", "seen": "links to folders also matched by another name"}
_NO_STATE: dict[str, str] = {}


class _Found(NamedTuple):
    """A path that matches a pattern; `type` is "file", "directory", …."""

    path: str
    type: str
    bytes: int | None
    etag: str


def list_files(spec: CorpusSpec, by_words: bool) -> tuple[CorpusSpec, list[SourceFile], list[str]]:
    """Lists the files that a pattern matches, sorted by path.

    Braces stand for alternatives, as in *.{txt,md}, unless files match without that. With
    `by_words`, words in the paths name the splits; otherwise all files are train. Returns the
    spec with its pattern relative to its fixed folder, the files, and notes on matches that are
    not read. Raises UserError if none matches, a link is broken, or a file name is not UTF-8.
    """
    is_remote = files.is_remote(spec.location)
    fs, pattern = store.filesystem(spec.location)
    relative, matches = _relative(pattern), _matching(spec, pattern, is_remote)
    if (first := next(matches, None)) is None:
        relative, matches = _relative(pattern, r"[*\[{]"), _of_alternatives(spec, is_remote)
    else:
        matches = itertools.chain([first], matches)
    base = pattern.removesuffix(relative)
    folder = fs.unstrip_protocol(pattern).removesuffix(relative) if is_remote else base
    listed: list[SourceFile] = []
    others: Counter[str] = Counter()
    for found in matches:
        name = found.path[len(base) :]
        if found.type != "file":
            others[_KINDS.get(found.type, "pipes and devices")] += 1
        elif name.rpartition("/")[2].startswith("."):
            others["hidden files"] += 1
        else:
            listed.append(_source_file(folder, name, found, by_words, is_remote))
    if pattern.endswith("**"):
        del others["folders"]  # their files match as well
    notes = [f"not read: {kind}, {count:,}" for kind, count in sorted(others.items())]
    if not listed:
        if store.CHAIN in spec.location:
            notes.append(store.ARCHIVES)
        raise UserError("; ".join([f"no file matches {spec.location}", *notes]))
    listed.sort(key=lambda file: file.name)
    return dataclasses.replace(spec, location=relative), listed, notes


def _source_file(
    folder: str, name: str, found: _Found, by_words: bool, is_remote: bool
) -> SourceFile:
    if found.bytes is None:
        raise UserError(f"{folder}{name} has no known size: copy it and name the copy")
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(folder + name).decode(errors="backslashreplace")
        raise UserError(f"the name of {shown} is not UTF-8: rename the file") from None
    split = split_of(name) if by_words else TRAIN
    state = {"etag": found.etag} if is_remote and found.etag else _NO_STATE
    return SourceFile(folder, name, split, found.bytes, state, "" if is_remote else found.etag)


def _relative(pattern: str, wildcards: str = r"[*\[]") -> str:
    """Returns the part of a pattern from its first wildcard component on, or else the file name."""
    components = pattern.split("/")
    first = next((i for i, part in enumerate(components) if re.search(wildcards, part)), -1)
    return "/".join(components[first:])


def alternatives(pattern: str) -> list[str]:
    """Returns the patterns that one with braces stands for; others stand for themselves."""
    braces = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if not braces:
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    found = (alternatives(f"{before}{word}{after}") for word in braces[1].split(","))
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _of_alternatives(spec: CorpusSpec, is_remote: bool) -> Iterator[_Found]:
    seen = {""}
    for each in alternatives(spec.location) if "{" in spec.location else ():
        one = dataclasses.replace(spec, location=each)
        for found in _matching(one, store.filesystem(each)[1], is_remote):
            if found.path not in seen:
                seen.add(found.path)
                yield found


def _matching(spec: CorpusSpec, pattern: str, is_remote: bool) -> Iterator[_Found]:
    try:
        if is_remote:
            found = [
                _Found(path, info["type"], info["size"], store.etag(info))
                for path, info in Store(spec.location).ask(_matches).items()
            ]
        elif "*" not in pattern and os.path.lexists(pattern):  # a name, even if it has brackets
            found = [_local(pattern, os.lstat(pattern))]
        else:
            yield from _walk(pattern)
            return
    except FileNotFoundError:
        return
    except ValueError as error:  # from fsspec, for FOLDER/**.txt instead of FOLDER/**/*.txt
        meant = re.sub(r"(?<![*/])\*\*|\*\*(?![*/]|$)", lambda _: "**/*", spec.location)
        raise UserError(f"{spec.location}: {error}; {meant} matches at any depth") from error
    except OSError as error:
        raise UserError(f"{spec.location} cannot be listed: {error}") from error
    if [(each.path, each.type) for each in found] == [(pattern, "directory")]:
        raise UserError(
            f"{spec.location} is a folder: name its files, for example {spec.kind}:"
            f"{files.join(spec.location, '*')}"
        )
    yield from found


def _matches(fs: Any, pattern: str) -> dict[str, dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return {pattern: fs.info(pattern)}
    found = fs.glob(pattern, detail=True)
    if not found:
        raise FileNotFoundError(pattern)
    return found


def _walk(pattern: str) -> Iterator[_Found]:
    """Yields local matches of a pattern, in fsspec's syntax.

    fsspec's own glob omits symbolic links, silently skips unreadable folders, and needs several
    times the time and memory. This one follows links and reads only folders that can lead to a
    match, once per component of the pattern: under the folder's own name if that matches, otherwise
    under its first link.
    """
    from fsspec.utils import glob_translate

    glob_translate(pattern)  # raises for patterns such as **.txt
    base = pattern.removesuffix(_relative(pattern))
    parts = _relative(pattern).split("/")
    matches = [re.compile(glob_translate(part)).match for part in parts]
    # (folder, index of the component that its entries must match).
    folders = [(base, 0)] if os.path.isdir(base) else []
    links: list[tuple[str, int]] = []
    seen: set[tuple[int, int, int]] = set()
    while folders or links:
        # Links come last, so that a folder keeps its own name.
        folder, place = folders.pop() if folders else heapq.heappop(links)
        state = os.stat(folder)
        key = (state.st_dev, state.st_ino, place)
        if key in seen:
            yield _Found(folder, "seen", None, "")
            continue
        seen.add(key)
        anywhere, last = parts[place] == "**", place + 1 == len(parts)
        if anywhere and not last:
            folders.append((folder, place + 1))
        for path, is_link, is_folder in _entries(folder, parts[place]):
            if not anywhere and not matches[place](os.path.basename(path)):
                continue
            if last:
                yield _local(path, os.lstat(path))
            if is_folder and (anywhere or not last):
                following = (path, place if anywhere else place + 1)
                heapq.heappush(links, following) if is_link else folders.append(following)


def _entries(folder: str, part: str) -> Iterator[tuple[str, bool, bool]]:
    """Yields (path, is a link, is a folder) for a folder's entries that `part` may match."""
    if not re.search(r"[*?\[]", part):  # a single name does not require a readable folder
        path = os.path.join(folder, part)
        if os.path.lexists(path):
            yield path, os.path.islink(path), os.path.isdir(path)
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            # Unlike the entry's own method, `isdir` is False for a link to itself.
            is_link = entry.is_symlink()
            yield entry.path, is_link, os.path.isdir(entry.path) if is_link else entry.is_dir()


def _local(path: str, state: os.stat_result) -> _Found:
    if stat.S_ISLNK(state.st_mode):
        try:
            state = os.stat(path)
        except OSError as error:
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which cannot be read "
                f"({error.strerror}): repair or delete the link"
            ) from error
    mode = state.st_mode
    kind = "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"
    return _Found(path, kind, state.st_size, opening.written(state))
