"""Tells the compression of files by their first bytes, whatever their names are; decompresses."""

import importlib
import io
import re
import tarfile
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from tasks.terminal.command_line import UserError

HEAD_BYTES = 512  # the header of a tar's first member
_ZSTD_STEP_BYTES = 16 << 10  # of compressed data; what it expands to is held in memory
_ZSTD_LONGEST_WINDOW = 1 << 31  # as written by zstd --long=31; holding it takes 2 GiB of memory


class Archive(Exception):
    """A file is an archive; `tasks.reading.archives` reads its members."""


class _Packing(NamedTuple):
    """A way to pack files: patterns of their first bytes and of the endings of their names."""

    first: bytes
    endings: str = ""
    # Opens the content of a compressed file; None for archives and what is not read.
    open: Callable[[IO[bytes]], Any] | None = None


def _opener(library: str) -> Callable[[IO[bytes]], Any]:
    return lambda handle: importlib.import_module(library).open(handle)


# No text begins like any of these: they are not UTF-8, or, but for bzip2, have control characters.
_PACKINGS = {
    "gzip": _Packing(rb"\x1f\x8b\x08", "gz|gzip|tgz", _opener("gzip")),
    "bzip2": _Packing(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "bz2|bzip2|tbz2?", _opener("bz2")),
    "xz": _Packing(rb"\xfd7zXZ\0", "xz|txz", _opener("lzma")),
    # The usual properties, a dictionary of whole blocks, and an unknown or a plausible size.
    "lzma": _Packing(rb"\]\0\0..(?:\xff{8}|.{5}\0{3})", "lzma|tlz", _opener("lzma")),
    # The second form begins a skippable frame.
    "zstd": _Packing(
        rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
        "zst|zstd|tzst",
        lambda handle: io.BufferedReader(_Zstd(handle)),
    ),
    "zip": _Packing(rb"PK(?:\x03\x04|\x05\x06)", "zip"),
    "tar": _Packing(rb"(?!)", "tar"),  # see `_is_tar`
    "7-Zip": _Packing(rb"7z\xbc\xaf\x27\x1c"),
    "RAR": _Packing(rb"Rar!\x1a\x07"),
    "LZ4": _Packing(rb"\x04\x22\x4d\x18"),
    "compress": _Packing(rb"\x1f\x9d"),
}
# One pattern for all, as there may be a million files; the number of a group is that of a packing.
_FIRST = re.compile(b"|".join(b"(%b)" % each.first for each in _PACKINGS.values()), re.DOTALL)
_ENDINGS = re.compile(
    rf"(?i)\.(?:{'|'.join(f'({each.endings})' for each in _PACKINGS.values() if each.endings)})$"
)


def named_packed(name: str) -> bool:
    """Returns True if a file's name says that it is compressed or an archive."""
    return bool(_ENDINGS.search(name))


def is_gzip(handle: IO[bytes]) -> bool:
    """Returns True if an open file is compressed by gzip."""
    return _packing(_head(handle)) == "gzip"


def is_zip(handle: IO[bytes]) -> bool:
    """Returns True if an open file is a zip archive."""
    return _packing(_head(handle)) == "zip"


def decompress(handle: IO[bytes], path: str, archives: bool = False) -> Any:
    """Returns the uncompressed stream of an open file, which is `handle` itself if it is plain.

    Raises Archive for an archive unless `archives` are wanted, and UserError for a file that is
    packed in another way, or is not what its name says.
    """
    head = _head(handle)
    packing = _packing(head)
    if not packing:
        if said := _ENDINGS.search(path):
            raise UserError(
                f"{path} is not {_group(said)}, though its name says so (it begins with "
                f"{head[:8]!r}): rename it, or restore it from a copy"
            )
        return handle
    stream = handle
    if opened := _PACKINGS[packing].open:
        stream = opened(handle)
        head = _head(stream)
    if not archives:
        check_archive(head, path)
    return stream


def check_archive(head: bytes, path: str) -> None:
    """Raises Archive if uncompressed content begins an archive; UserError for what is not read."""
    packing = _packing(head)
    if packing == "tar" or (packing == "zip" and path.lower().endswith(".zip")):
        raise Archive(path)
    if packing == "zip":
        raise UserError(
            f"{path} is a zip archive, as Office documents and EPUB are: extract its text first, "
            "or rename an archive of corpus files to .zip"
        )
    if packing and _PACKINGS[packing].open:
        raise UserError(f"{path} is compressed twice: decompress it once")
    if packing:
        raise UserError(f"{path} is packed by {packing}, which is not read: unpack it first")


def refuse_packed(handle: IO[bytes], path: str) -> None:
    """Raises UserError if an open file is packed, for formats that are read from plain files."""
    handle.seek(0)
    if packing := _packing(_head(handle)):
        raise UserError(
            f"{path} is packed by {packing}, from which files of this format are not read: unpack "
            "it first"
        )


def _packing(head: bytes) -> str:
    """Returns how a file that begins with `head` is packed; "" if it is not."""
    if found := _FIRST.match(head):
        return _group(found)
    # A header has padding.
    return "tar" if len(head) == HEAD_BYTES and b"\0" in head and _is_tar(head) else ""


def _group(found: re.Match[Any]) -> str:
    return list(_PACKINGS)[(found.lastindex or 0) - 1]


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "replace")  # compares the checksum
    except tarfile.HeaderError:
        return False
    return True


def _head(stream: Any) -> bytes:
    """Returns the first bytes of a stream at its beginning, and goes back there."""
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    return head


class _Zstd(io.RawIOBase):
    """The content of all frames of a zstd file, with windows of up to 2 GiB.

    zstandard's own reader takes a missing end for the end of the file, and Arrow's limits windows
    to 128 MiB.
    """

    def __init__(self, handle: IO[bytes]):
        self._handle = handle
        self._restart()

    def _restart(self) -> None:
        self._handle.seek(0)
        self._frame: Any = None  # the frame being read
        self._packed, self._data = b"", memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only from the beginning")
        if offset < self._position:
            self._restart()
        while self._position < offset and (self._data or self._advance()):
            self._take(offset - self._position)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view) and (self._data or self._advance()):
            some = self._take(len(view) - filled)
            view[filled : filled + len(some)] = some
            filled += len(some)
        return filled

    def _take(self, count: int) -> memoryview:
        some, self._data = self._data[:count], self._data[count:]
        self._position += len(some)
        return some

    def _advance(self) -> bool:
        """Decompresses a step, which may give no data; returns False at the end of the file."""
        import zstandard

        packed = self._packed or self._handle.read(_ZSTD_STEP_BYTES)
        self._packed = b""
        if not packed:
            if self._frame:
                raise EOFError("it is cut short: the end of a zstd frame is missing")
            return False
        if not self._frame:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_LONGEST_WINDOW)
            self._frame = decompressor.decompressobj()
        try:
            self._data = memoryview(self._frame.decompress(packed))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True
