"""Opens a corpus's files, local or remote, and checks them against the listing."""

import contextlib
import functools
import os
import zlib
from collections.abc import Iterator
from typing import IO

from tasks.reading.corpus import Member, SourceFile
from tasks.storage import files, ranges, store
from tasks.storage.paths import local_path
from tasks.terminal.command_line import UserError

_BROKEN: tuple[type[Exception], ...]
_BROKEN = (OSError, EOFError, ValueError, NotImplementedError, zlib.error)
with contextlib.suppress(ImportError):  # of a Python built without it
    from lzma import LZMAError

    _BROKEN += (LZMAError,)


@contextlib.contextmanager
def user_errors(path: str) -> Iterator[None]:
    """Turns errors from a broken file into a UserError that names the file."""
    try:
        yield
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path} cannot be read: {reason} (is it truncated, or in another format?)"
        ) from error


def open_file(file: SourceFile, ahead: int = ranges.REQUEST_BYTES) -> IO[bytes]:
    """Opens a local or remote file of a corpus, or a member of an archive, for reading and seeking.

    `ahead` is as in `Store.open`; with 0, a remote file is a `Ranges`. Raises UserError, also while
    reading, if a remote file has changed or cannot be reached despite retries (for local files, see
    `unchanged`); OSError if it cannot be opened.
    """
    path, listed = file.path, (file.bytes, file.etag)
    if isinstance(file, Member):
        os.lseek(file.copy, 0, os.SEEK_SET)
        return open(os.dup(file.copy), "rb")
    if not file.is_remote:
        return open(local_path(path), "rb")
    if path.startswith("hf://"):
        from tasks.reading import hub

        return ranges.open_ranges(path, file.bytes, hub.fetch_from_hub(path, *listed), ahead)
    return store.Store(path).open(listed, ahead)


def changed(file: SourceFile) -> bool:
    """Returns True if a local file may have been changed since it was listed."""
    return written(os.stat(local_path(file.path))) != file.written


@contextlib.contextmanager
def unchanged(file: SourceFile) -> Iterator[None]:
    """Raises UserError if a local file is changed before or while the block reads it."""
    before = "" if file.is_remote else _checked(file)
    yield
    # A file truncated while it is open seems to end normally.
    if before and _checked(file) != before:
        raise _written_again(file)


def written(state: os.stat_result) -> str:
    """Returns when a local file was written, and what tells it from another in its place.

    Programs that copy files set back the first number, but not the others.
    """
    return f"{state.st_mtime} {state.st_ctime_ns} {state.st_ino}"


def _checked(file: SourceFile) -> str:
    """Returns a local file's `written`; raises UserError if it is not the file that was listed.

    A file with a new inode or time of change, which differ from machine to machine, is unchanged if
    its checksum is.
    """
    state = os.stat(local_path(file.path))
    if state.st_size != file.bytes:
        store.check_same(file.path, (file.bytes, ""), (state.st_size, ""))
    now = written(state)
    if file.written and now != file.written:
        same_time = now.partition(" ")[0] == file.written.partition(" ")[0]
        if not same_time or (file.sha256 and _sha256(file.path, now) != file.sha256):
            raise _written_again(file)
    return now


@functools.lru_cache(maxsize=4096)
def _sha256(path: str, now: str) -> str:
    return files.sha256(path)


def _written_again(file: SourceFile) -> UserError:
    return UserError(
        f"{file.path} was written again since the corpus was listed: run the same command again"
    )
