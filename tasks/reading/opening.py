"""Opens a corpus's files, local or remote: checks them against the listing, decompresses them."""

import contextlib
import importlib
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any

from tasks.reading.corpus import SourceFile
from tasks.storage import store
from tasks.storage.paths import is_remote, local_path
from tasks.terminal.command_line import UserError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@contextlib.contextmanager
def user_errors(path: str) -> Iterator[None]:
    """Turns errors from a broken file into a UserError that names the file."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path} cannot be read: {reason} (is it truncated, or in another format?)"
        ) from error


def open_file(file: SourceFile, ahead: int = store.REQUEST_BYTES) -> IO[bytes]:
    """Opens a local or remote file of a corpus for reading and seeking.

    `ahead` is as in `Store.open`. Raises UserError if the file has changed, or (also while reading)
    cannot be reached despite retries; OSError if it cannot be opened.
    """
    path, listed = file.path, (file.bytes, file.etag)
    if not is_remote(path):
        check_unchanged(file)
        return open(local_path(path), "rb")
    if path.startswith("hf://"):
        from tasks.reading import hub

        return store.open_ranges(path, file.bytes, hub.fetch_from_hub(path, *listed), ahead)
    return store.Store(path).open(listed, ahead)


def check_unchanged(file: SourceFile) -> None:
    """Raises UserError for a changed local file, FileNotFoundError for a missing one."""
    state = os.stat(local_path(file.path))
    store.check_same(file.path, (file.bytes, ""), (state.st_size, ""))
    if file.written and file.written != store.etag({"mtime": state.st_mtime}):
        raise UserError(
            f"{file.path} was written again since the corpus was listed: run the same command again"
        )


def decompress(handle: IO[bytes], path: str) -> Any:
    """Returns a file's uncompressed stream; the suffix of `path` tells the compression."""
    if path.endswith(".zst"):
        import pyarrow as pa

        # Unlike zstandard's own reader, this reads all frames and notices a missing end.
        return io.BufferedReader(pa.CompressedInputStream(handle, "zstd"))
    for ending, library in ((".gz", "gzip"), (".bz2", "bz2"), (".xz", "lzma")):
        if path.endswith(ending):
            return importlib.import_module(library).open(handle)
    return handle
