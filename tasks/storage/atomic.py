"""Writes files completely or not at all, and reports a full disk."""

import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO

from tasks.storage.guard import Guard
from tasks.storage.paths import is_remote, local_path
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError

PARTIAL = ".partial-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming_full_disk(path: str) -> Iterator[None]:
    """Turns an error about a full disk, quota or file-size limit into an OSError naming `path`.

    Libraries such as safetensors and TensorStore wrap the system's message in their own errors.
    """
    try:
        yield
    except Exception as error:
        for code in _FULL:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), path) from error
        raise


@contextlib.contextmanager
def atomic_write(
    path: str, lasting: bool = True, guard: Guard | None = None
) -> Iterator[IO[bytes]]:
    """Yields a file whose complete content appears at `path` on success, and nothing on failure.

    Locally, the bytes are written beside `path`, flushed to disk and renamed. Unless `lasting`, the
    new name is left to the next file of the folder, which flushes both names to disk. For a remote
    path, they are collected in a temporary file and uploaded as one object, since closing a
    half-written fsspec file would publish half of it. A `guard` may refuse the write. Raises
    UserError if the folder is missing or not writable, `path` is a folder, or the store refuses the
    upload.
    """
    if is_remote(path):
        with tempfile.NamedTemporaryFile() as spool:
            yield spool
            spool.flush()
            guard.upload(path, spool.name) if guard else Store(path).upload(spool.name)
        return
    final = local_path(path)
    folder = os.path.dirname(final) or "."
    if os.path.isdir(final):
        raise UserError(f"{path} is a folder: name a file")
    aside = os.path.join(folder, f"{PARTIAL}{uuid.uuid4().hex}-{os.path.basename(final)}")
    try:
        with naming_full_disk(path), _created(aside, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        guard.rename(aside, path) if guard else os.replace(aside, final)
        if not lasting:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _created(aside: str, path: str) -> IO[bytes]:
    """Opens the new file `aside`; errors name `path`, its final name."""
    try:
        return open(aside, "xb")
    except FileNotFoundError as error:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(local_path(folder)):
            raise UserError(f"{path}: there is no folder {folder}; make it first") from error
        raise UserError(f"{path}: no file can be made in this folder; choose another") from error
    except OSError as error:
        error.filename = path
        raise


def final_name(partial: str) -> str:
    """Returns the name that a partial file gets in the end."""
    return partial.removeprefix(PARTIAL).partition("-")[2]


def remove_partial(folder: str) -> None:
    """Deletes partial files that killed writers left in a local `folder`."""
    if is_remote(folder) or not os.path.isdir(local_path(folder)):
        return
    for name in os.listdir(local_path(folder)):
        if name.startswith(PARTIAL):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(local_path(folder), name))
