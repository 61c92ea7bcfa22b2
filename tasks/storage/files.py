"""Reads, writes, lists and copies files and folders, local or in a store; errors as in `Store`."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, cast

from tasks.storage.atomic import PARTIAL as PARTIAL
from tasks.storage.atomic import atomic_write as atomic_write
from tasks.storage.atomic import final_name as final_name
from tasks.storage.atomic import naming_full_disk as naming_full_disk
from tasks.storage.atomic import remove_partial as remove_partial
from tasks.storage.guard import Guard as Guard
from tasks.storage.paths import is_on_gcs as is_on_gcs
from tasks.storage.paths import is_remote as is_remote
from tasks.storage.paths import join as join
from tasks.storage.paths import local_path as local_path
from tasks.storage.store import Store, filesystem
from tasks.terminal.command_line import UserError

_REMOTE_THREADS = 64  # they mostly wait


def open_read(path: str) -> IO[bytes]:
    """Opens `path` for reading bytes; a URL is read in ranges, on demand."""
    return Store(path).open() if is_remote(path) else open(local_path(path), "rb")


def exists(path: str) -> bool:
    """Returns True if a file or folder exists."""
    if not is_remote(path):
        return os.path.exists(local_path(path))
    try:
        Store(path).info()
    except FileNotFoundError:
        return False
    return True


def size(path: str) -> int:
    """Returns a file's size in bytes."""
    return Store(path).info()["size"] if is_remote(path) else os.path.getsize(local_path(path))


def list_names(folder: str) -> list[str]:
    """Returns the sorted names of the files and folders in `folder`; [] if it does not exist."""
    if not is_remote(folder):
        path = local_path(folder)
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def listed(fs: Any, inner: str) -> list[str]:
        # An object may stand for the folder itself.
        found = [name.rstrip("/") for name in fs.ls(inner, detail=False)]
        return sorted(name.rpartition("/")[2] for name in found if name != inner.rstrip("/"))

    try:
        return Store(folder).ask(listed)
    except FileNotFoundError:
        return []


def list_sizes(folder: str, prefix: str = "") -> dict[str, int]:
    """Returns {name: bytes} of files in `folder` that begin with `prefix`; {} without a folder."""
    sizes: dict[str, int] = {}
    if not is_remote(folder):
        with contextlib.suppress(FileNotFoundError), os.scandir(local_path(folder)) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and entry.is_file():
                    with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def listed(fs: Any, inner: str) -> list[dict[str, Any]]:
        if prefix:
            return list(fs.find(inner, prefix=prefix, detail=True).values())
        return fs.ls(inner, detail=True)

    try:
        found = Store(folder).ask(listed)
    except FileNotFoundError:
        return {}
    for each in found:
        name = each["name"].rpartition("/")[2]
        if each["type"] == "file" and name and name.startswith(prefix):
            sizes[name] = each["size"]
    return sizes


def list_tree(folder: str) -> dict[str, int]:
    """Returns {path below `folder`: bytes} of all files in it; {} without a folder."""
    if not is_remote(folder):
        top = local_path(folder)
        paths = (os.path.join(inner, name) for inner, _, names in os.walk(top) for name in names)
        return {os.path.relpath(path, top): os.lstat(path).st_size for path in paths}

    def listed(fs: Any, inner: str) -> dict[str, int]:
        found = fs.find(inner, detail=True)
        return {name.removeprefix(f"{inner}/"): each["size"] for name, each in found.items()}

    try:
        return Store(folder.rstrip("/")).ask(listed)
    except FileNotFoundError:
        return {}


def threads(folder: str) -> int:
    """Returns the number of threads to use for a folder's files; on a store, they mostly wait."""
    return _REMOTE_THREADS if is_remote(folder) else os.cpu_count() or 1


def make_folder(path: str) -> None:
    """Makes the folder and its parents; raises UserError if none can be made, such as in /proc."""
    if is_remote(path):
        return
    try:
        os.makedirs(local_path(path), exist_ok=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no folder can be made here; choose another path") from error


def remove(path: str) -> None:
    """Deletes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            Store(path).ask(lambda fs, inner: fs.rm_file(inner))
        else:
            os.unlink(local_path(path))


def remove_all(path: str) -> None:
    """Deletes a file, or a folder with everything in it, if it exists.

    fsspec's `rm` would delete run1 and run2 as well if the folder is called run[12].
    """
    if is_remote(path):
        Store(path).ask(_remove_all)
    elif os.path.isdir(local := local_path(path)) and not os.path.islink(local):
        shutil.rmtree(local)
    else:
        remove(path)


def _remove_all(fs: Any, inner: str) -> None:
    def remove_one(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(name)

    with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        list(pool.map(remove_one, fs.find(inner)))
    for folder in sorted([inner, *fs.find(inner, withdirs=True)], reverse=True):
        if "/" in folder:  # else it is a bucket
            with contextlib.suppress(OSError):  # few stores have folders
                fs.rmdir(folder)


def rename(source: str, target: str) -> None:
    """Renames a file; in a store, copies it and then deletes the old one."""
    if not is_remote(source):
        os.replace(local_path(source), local_path(target))
        return
    inside = filesystem(target)[1]
    Store(source).ask(lambda fs, inner: fs.cp_file(inner, inside))
    remove(source)


def rename_folder(source: str, target: str) -> None:
    """Renames a folder to a free name; in a store, copies it and then deletes the old one."""
    if not is_remote(source):
        os.rename(local_path(source), local_path(target))
        return
    inside = filesystem(target)[1]

    def copy_all(fs: Any, inner: str) -> list[str]:
        names = [name for name in fs.find(inner) if not name.endswith("/")]
        for name in names:
            fs.cp_file(name, inside + name.removeprefix(inner))
        return names

    Store(source).ask(copy_all)
    remove_all(source)


def read_bytes(path: str) -> bytes:
    """Returns a file's bytes."""
    if is_remote(path):
        return Store(path).ask(lambda fs, inner: fs.cat_file(inner))
    with open_read(path) as file:
        return file.read()


def read_lines(path: str) -> Iterator[str]:
    r"""Yields a UTF-8 file's lines without "\n" or "\r\n"; holds one in memory at a time.

    A leading byte-order mark is dropped. Unicode's other line ends, such as U+2028, are text: JSON
    does not escape them. Raises FileNotFoundError, or UserError for a folder or text that is not
    UTF-8.
    """
    try:
        with open_read(path) as file:
            for number, line in enumerate(file):
                text = line.decode("utf-8" if number else "utf-8-sig")
                yield text.removesuffix("\n").removesuffix("\r")
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name a file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text") from error


def write_bytes(path: str, data: bytes, guard: Guard | None = None) -> None:
    """Writes a file completely or not at all; a `guard` may refuse it."""
    with atomic_write(path, guard=guard) as file:
        file.write(data)


def generation(path: str) -> str:
    """Returns the generation of a file in Cloud Storage, for `replace`; "" if there is no file."""
    return Store(path).current() if is_on_gcs(path) else ""


def replace(path: str, data: bytes, generation: str) -> bool:
    """Writes a file unless another writer came first since it had this `generation`.

    Returns whether it was written. Only Cloud Storage can tell.
    """
    if is_on_gcs(path):
        return bool(Store(path).replace(data, generation))
    write_bytes(path, data)
    return True


def read_json(path: str) -> Any:
    """Parses a JSON file; raises UserError if it is invalid, for example truncated."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): restore it from a copy") from error


def json_bytes(value: Any) -> bytes:
    """Returns indented JSON with sorted keys and a final newline; equal for equal values."""
    # Chunk by chunk: a plan for a million files would be a gigabyte of small strings at once.
    data = bytearray()
    for chunk in json.JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False).iterencode(value):
        data += chunk.encode()
    return bytes(data + b"\n")


def write_json(path: str, value: Any, guard: Guard | None = None) -> None:
    """Writes `json_bytes(value)` completely or not at all; a `guard` may refuse it."""
    write_bytes(path, json_bytes(value), guard)


def sha256(path: str) -> str:
    """Returns the hex SHA-256 of a file."""
    with open_read(path) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def copy(source: str, target: str) -> None:
    """Copies a file completely or not at all."""
    with open_read(source) as reader, atomic_write(target) as writer:
        shutil.copyfileobj(reader, writer)
