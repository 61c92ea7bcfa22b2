"""Opening files of a corpus: local or remote, checked against the listing, decompressed."""

import bz2
import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from tasks.reading.corpus import SourceFile
from tasks.storage import files, remote
from tasks.terminal.command_line import UserError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Bytes per request for a remote file.
REQUEST_BYTES = 8 << 20


@contextlib.contextmanager
def user_errors(path: str) -> Iterator[None]:
    """Turns the errors that a broken file causes into a UserError that names it."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path} cannot be read: {reason} (is it truncated, or of another format?)"
        ) from error


def open_file(file: SourceFile, ahead: int = REQUEST_BYTES) -> IO[bytes]:
    """Opens a local or remote file of a corpus for reading and seeking.

    Args:
      file: the file as it was when the corpus was listed.
      ahead: fewest bytes to request of a remote file; 0: exactly the bytes asked for.

    Raises:
      UserError: it has changed, or (also while reading) cannot be reached despite retries.
      OSError: it cannot be opened.
    """
    path, size, etag = file.path, file.bytes, file.etag
    if not files.is_remote(path):
        check_unchanged(file)
        return files.open_read(path)
    if path.startswith("hf://"):
        from tasks.reading import hub

        fetch = hub.fetch_from_hub(path, size, etag)
    else:
        fetch = files.fetch_from_store(path, size, etag)
    raw = remote.File(path, size, fetch)
    return io.BufferedReader(raw, ahead) if ahead else cast(IO[bytes], raw)


def check_unchanged(file: SourceFile) -> None:
    """Compares a local file with the listing.

    Raises:
      UserError: the file has changed.
      FileNotFoundError: the file is gone.
    """
    state = os.stat(files.local_path(file.path))
    remote.check(file.path, (file.bytes, ""), (state.st_size, ""))
    if file.written and file.written != files.etag({"mtime": state.st_mtime}):
        raise UserError(
            f"{file.path} was written again since the corpus was listed: run the same command again"
        )


def decompress(handle: IO[bytes], path: str) -> Any:
    """Returns the uncompressed stream of a file; the end of its name says how it is compressed."""
    if path.endswith(".gz"):
        return gzip.open(handle)
    if path.endswith(".bz2"):
        return bz2.open(handle)
    if path.endswith(".xz"):
        import lzma

        return lzma.open(handle)
    if path.endswith(".zst"):
        import pyarrow as pa

        # Unlike zstandard's own reader, this reads all frames and notices a missing end.
        return io.BufferedReader(pa.CompressedInputStream(handle, "zstd"))
    return handle
