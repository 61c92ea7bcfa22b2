"""Tells the compression of files by their first bytes, whatever their names are; decompresses."""

import gzip
import io
import re
import tarfile
from collections.abc import Callable
from typing import IO, Any, NamedTuple, Protocol

from tasks.terminal.command_line import UserError

HEAD_BYTES = 512  # the header of a tar's first member
_PACKED_BYTES = 16 << 10  # read in one step; of zstd, what they expand to is held in memory
_UNPACKED_BYTES = 256 << 10  # at most in one step, of bzip2 and xz
_ZSTD_LONGEST_WINDOW = 1 << 31  # as written by zstd --long=31; holding it takes 2 GiB of memory


class Archive(Exception):
    """A file is an archive, whose members an annex reads."""


class _Packing(NamedTuple):
    """A way to pack files: patterns of their first bytes and of the endings of their names."""

    first: bytes
    endings: str = ""
    # Opens the content of a compressed file; None for archives and what is not read.
    open: Callable[[IO[bytes]], Any] | None = None


class _Decompressor(Protocol):
    """Decompresses one stream, as `bz2.BZ2Decompressor` does."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zstd:
    """A decompressor of one frame, with windows of up to 2 GiB; Arrow's are limited to 128 MiB."""

    needs_input = True  # it holds nothing back

    def __init__(self) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_LONGEST_WINDOW)
        self._frame = decompressor.decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._frame.decompress(data)
        except self._error as error:
            raise ValueError(str(error)) from error


def _gzip(handle: IO[bytes]) -> Any:
    return gzip.open(handle)


def _bzip2() -> _Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _xz() -> _Decompressor:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ)


def _lzma() -> _Decompressor:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_ALONE)


def _opener(
    decompressor: Callable[[], _Decompressor], padding: int = 0
) -> Callable[[IO[bytes]], Any]:
    return lambda handle: io.BufferedReader(_Streams(handle, decompressor, padding))


# No text begins like any of these: they are not UTF-8, or, but for bzip2, have control characters.
_PACKINGS = {
    "gzip": _Packing(rb"\x1f\x8b\x08", "gz|gzip|tgz", _gzip),
    "bzip2": _Packing(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "bz2|bzip2|tbz2?", _opener(_bzip2)),
    "xz": _Packing(rb"\xfd7zXZ\0", "xz|txz", _opener(_xz, padding=4)),
    # The usual properties, a dictionary of whole blocks, and an unknown or a plausible size.
    "lzma": _Packing(rb"\]\0\0..(?:\xff{8}|.{5}\0{3})", "lzma|tlz", _opener(_lzma)),
    # The second form begins a skippable frame.
    "zstd": _Packing(
        rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
        "zst|zstd|tzst",
        _opener(_Zstd),
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


class _Streams(io.RawIOBase):
    """The content of all streams of a compressed file, to its last byte.

    The readers of `bz2` and `lzma` take bytes after the first stream that are no stream for the end
    of the file, and zstandard's takes a missing end for one. `padding` is the number of bytes of
    which whole multiples, zeros, may follow a stream of xz (its specification, 2.2).
    """

    def __init__(self, handle: IO[bytes], decompressor: Callable[[], _Decompressor], padding: int):
        self._handle, self._decompressor, self._padding = handle, decompressor, padding
        self._restart()

    def _restart(self) -> None:
        self._handle.seek(0)
        self._stream: _Decompressor | None = None  # the one being read
        self._packed, self._data = b"", memoryview(b"")
        self._position = 0
        self._zeros: int | None = None  # after a stream

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
        if not self._stream or self._stream.needs_input:
            packed = self._packed or self._handle.read(_PACKED_BYTES)
            self._packed = b""
            if not packed:
                self._check_padding()
                if self._stream:
                    raise EOFError("it is cut short: the end of its last stream is missing")
                return False
            if self._zeros is not None and self._padding:
                rest = packed.lstrip(b"\0")
                self._zeros += len(packed) - len(rest)
                if not rest:
                    return True
                packed = rest
                self._check_padding()
        else:
            packed = b""
        if not self._stream:
            self._stream, self._zeros = self._decompressor(), None
        self._data = memoryview(self._stream.decompress(packed, _UNPACKED_BYTES))
        if self._stream.eof:
            self._packed, self._stream, self._zeros = self._stream.unused_data, None, 0
        return True

    def _check_padding(self) -> None:
        if self._zeros and self._zeros % self._padding:
            raise ValueError(
                f"{self._zeros} zeros follow a stream, which is no multiple of {self._padding}"
            )
