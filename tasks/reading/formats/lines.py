"""Reads byte ranges of files with one document per line."""

import codecs
import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from tasks.reading import compression, opening
from tasks.reading.corpus import FilePart, FileRange, SourceFile
from tasks.terminal.command_line import UserError

MARK = codecs.BOM_UTF8
# The mark of UTF-32 in this order of bytes begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_ENCODING_BYTES = 4096  # of a file, in which NULs are counted
_NULS, _NUL_SHARE = 8, 0.05  # text in UTF-8 has fewer

_BLOCK_BYTES = 1 << 20
_PEEK_BYTES = 256 << 10  # one small request
_SMALL_BYTES = 64 << 10  # at most a piece, of which compressed files must be whole
# Longer lines are not read as part of a block.
_LONG_LINE_BYTES = 4 << 20
# A longer line of JSON or CSV is a bad document and is not parsed.
LONGEST_BYTES = 64 << 20
TOO_LONG = f"a line longer than {LONGEST_BYTES >> 20} MiB"


def ranges(file: SourceFile, whole: bool = False) -> list[FileRange]:
    """Returns the file as one range of bytes; a `whole` or compressed file cannot be cut."""
    if not file.bytes:
        return []
    return [FileRange(0, None if whole or _is_compressed(file) else file.bytes, file.bytes)]


def _is_compressed(file: SourceFile) -> bool:
    # Looking into a small file takes longer than reading it, and into a remote one a request.
    if file.is_remote or file.bytes <= _SMALL_BYTES:
        return compression.named_packed(file.name)
    with opening.open_file(file) as handle:
        return compression.decompress(handle, file.path) is not handle


def peek(file: SourceFile) -> tuple[bytes, bool]:
    """Returns a file's first bytes, to check its columns, and True if they are the whole file."""
    with (
        opening.open_file(file, _PEEK_BYTES) as handle,
        compression.decompress(handle, file.path) as stream,
    ):
        head = stream.read(_PEEK_BYTES)
        return head, len(head) < _PEEK_BYTES or not stream.read(1)


def check_encoding(head: bytes) -> None:
    """Raises ValueError if a file that begins with `head` is UTF-16 or UTF-32."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            raise ValueError(_converted(f"it is {name}", name.lower()))
    head = head[:_ENCODING_BYTES]
    nuls = [head[place::4].count(0) for place in range(4)]
    before, after = nuls[0] + nuls[2], nuls[1] + nuls[3]
    letters = len(head) // 4
    if min(nuls[2:]) >= letters > 20 * nuls[0]:  # of every letter, the last two bytes
        name = "utf-32le"
    elif min(nuls[:2]) >= letters > 20 * nuls[3]:
        name = "utf-32be"
    elif max(before, after) < max(_NULS, _NUL_SHARE * len(head), 20 * min(before, after)):
        return
    else:  # Latin letters, or spaces and line ends alone
        name = "utf-16le" if after > before else "utf-16be"
    seen = f"{sum(nuls):,} of its first {len(head):,} bytes are NUL, as in {name[:6].upper()}"
    raise ValueError(_converted(f"{seen} without a byte order mark", name))


def _converted(seen: str, name: str) -> str:
    return f"{seen}: convert it to UTF-8, e.g. with iconv -f {name} -t utf-8"


class LongLine:
    """A long line in chunks of bytes, without its newline. Iterate once, to the end."""

    def __init__(self, file: IO[bytes], head: bytes, mark: int):
        self._file, self._head = file, head[mark:]
        self.size = mark  # includes the newline; complete after the iteration
        self.ended = False  # True if it ends with a newline
        self.after = b""  # bytes of the following lines, already read

    def __iter__(self) -> Iterator[bytes]:
        block, self._head = self._head, b""
        while block:
            chunk, newline, self.after = block.partition(b"\n")
            self.size += len(chunk) + len(newline)
            yield chunk
            if newline:
                self.ended = True
                return
            block = self._file.read(_BLOCK_BYTES)


def whole(line: bytes | LongLine) -> bytes | None:
    """Returns bytes unchanged; joins a long line, without its newline, or None if too long."""
    if isinstance(line, bytes):
        return line
    data = bytearray()
    for chunk in line:
        if line.size <= LONGEST_BYTES:
            data += chunk
        else:
            data.clear()
    return bytes(data) if line.size <= LONGEST_BYTES else None


Lines = Iterable[tuple[int, bytes | LongLine]]


@contextlib.contextmanager
def open_part(part: FilePart, to_the_end: bool = False) -> Iterator[Lines]:
    """Yields (offset, data) as `_lines` does; `to_the_end` continues to the file's last line."""
    with opening.open_file(part.file) as handle, _content(handle, part) as file:
        stop = part.stop if file is handle and not to_the_end else None
        yield _lines(file, part.start, stop)


@contextlib.contextmanager
def open_chunks(part: FilePart) -> Iterator[Iterable[bytes]]:
    """Yields a whole file's uncompressed bytes, in chunks."""
    with (
        opening.open_file(part.file) as handle,
        compression.decompress(handle, part.file.path) as file,
    ):
        yield iter(lambda: file.read(_BLOCK_BYTES), b"")


def _content(handle: IO[bytes], part: FilePart) -> Any:
    if part.start:
        return handle
    is_whole = part.stop in (None, part.file.bytes)
    try:
        stream = compression.decompress(handle, part.file.path)
        if is_whole or stream is handle:
            return stream
    except compression.Archive:
        if is_whole:
            raise
    raise UserError(
        f"{part.file.path} is compressed or an archive: say so by the ending of its name, such as "
        ".gz, .zst or .tar"
    )


def _lines(file: IO[bytes], start: int, stop: int | None) -> Iterator[tuple[int, bytes | LongLine]]:
    """Yields (offset, data) for the lines that begin in [start, stop).

    `data` is either whole lines (only the file's last line may lack its newline) or one long line.
    The byte order mark is left out.
    """
    position, pending = 0, b""
    if start:  # begin a byte earlier: a line that begins at `start` itself belongs to this range
        file.seek(start - 1)
        position = start - 1
        newline = b""
        while not newline:
            block = file.read(_BLOCK_BYTES)
            if not block or (stop is not None and position >= stop):
                return
            skipped, newline, pending = block.partition(b"\n")
            position += len(skipped) + len(newline)
    while stop is None or position < stop:
        block = file.read(_BLOCK_BYTES)
        pending += block
        if position == 0:
            check_encoding(pending)
        marked = position == 0 and pending.startswith(MARK)
        # A line with a byte order mark is yielded alone: its offsets in the file differ from those
        # in `data`.
        cut = 1 + (pending.find(b"\n") if marked else pending.rfind(b"\n"))
        if cut:
            data, pending = pending[:cut], pending[cut:]
            if stop is not None and position + cut > stop:
                # After the first newline at stop - 1 or later, lines belong to the next part.
                data = data[: data.index(b"\n", max(0, stop - 1 - position)) + 1]
            yield position, data.removeprefix(MARK) if marked else data
            position += cut
        elif not block:
            if pending:
                yield position, pending.removeprefix(MARK) if marked else pending
            return
        elif len(pending) > _LONG_LINE_BYTES:
            line = LongLine(file, pending, len(MARK) if marked else 0)
            yield position, line
            position += line.size
            pending = line.after
