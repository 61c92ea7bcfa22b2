"""Arrow files: IPC files (Feather), and the IPC streams that `datasets` writes.

Files are cut between record batches. An IPC file's footer locates them; in a stream, each message
header leads to the next. Listing reads only these headers, a few hundred bytes per record batch.

Source: the Arrow columnar format, "Serialization and Interprocess Communication (IPC)", the tables
Message and RecordBatch of its `Message.fbs`, and Footer and Block of its `File.fbs`.
"""

import io
import struct
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tasks.reading import compression, opening
from tasks.reading.batches import Batches
from tasks.reading.columns import path_of
from tasks.reading.corpus import COLUMN_OPTIONS, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import tables
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC, _PARQUET, _FEATHER_1 = b"ARROW1", b"PAR1", b"FEA1"
_CONTINUED = 0xFFFFFFFF  # precedes the length of a message's header; missing before Arrow 0.15
_RECORD_BATCH = 3  # in the union MessageHeader
_PADDING = 64  # largest number of bytes that may follow the end
_LONGEST_HEADER_BYTES = 256 << 20
# Bytes per remote request: enough for one header, or for several of small record batches.
_AHEAD_BYTES = 64 << 10
# Smallest distance between two cuts.
_CUT_BYTES = 256 << 10


class Arrow:
    """The format `arrow`; a document without an id gets its row number.

    Ranges are bytes of whole record batches. Only one batch at a time is held in memory.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        import pyarrow as pa

        if not file.bytes:
            raise ValueError("it is empty")
        with opening.open_file(file, _AHEAD_BYTES) as handle:
            messages = list(_messages(handle, file))
            batches = [message for message in messages if message.rows is not None]
            first = batches[0].begin if batches else messages[-1].end if messages else 0
            schema = pa.ipc.open_file(handle).schema if _is_file(handle) else _schema(handle, first)
            raw_ids = tables.check(spec, file.path, schema)
        if not batches:
            return []
        cuts, rows = [(first, 0)], 0
        for message in batches:
            if message.begin - cuts[-1][0] >= _CUT_BYTES:
                cuts.append((message.begin, rows))
            rows += message.rows or 0
        if any(each.rows is None for each in messages if each.begin > first):
            del cuts[1:]  # a dictionary changes midway: later batches need all earlier ones
        stop = messages[-1].end
        return [FileRange(first, stop, stop - first, tuple(cuts), raw_ids)]

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        row = part.cuts[0][1]
        with opening.open_file(part.file) as handle:
            found = _of_file if _is_file(handle) else _of_stream
            for batch in found(handle, corpus.spec, part):
                _validate(batch)
                yield from tables.documents(corpus, part.file.name, batch, row, batch_documents)
                row += batch.num_rows


def _of_file(handle: IO[bytes], spec: CorpusSpec, part: FilePart) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    assert part.stop is not None
    reader = pa.ipc.open_file(handle, options=_options(spec, pa.ipc.open_file(handle).schema))
    for number, block in enumerate(_footer(handle, part.file)[1]):
        if part.start <= block.begin < part.stop:
            yield reader.get_batch(number)


def _of_stream(handle: IO[bytes], spec: CorpusSpec, part: FilePart) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    assert part.stop is not None
    first = next(each.begin for each in _in_stream(handle, part.file) if each.rows is not None)
    options = _options(spec, _schema(handle, first))
    spliced = io.BufferedReader(_Spliced(handle, [(0, first), (part.start, part.stop)]), 1 << 20)
    yield from pa.ipc.open_stream(spliced, options=options)


def _options(spec: CorpusSpec, schema: "pa.Schema") -> "pa.ipc.IpcReadOptions":
    import pyarrow as pa

    names = dict.fromkeys(path_of(schema, name)[0] for name in tables.wanted(spec, schema))
    fields = [schema.get_field_index(name) for name in names]
    return pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)


class _Message(NamedTuple):
    """A message in bytes [begin, end) of a file; `rows` is None unless it is a record batch."""

    begin: int
    end: int
    rows: int | None


class _Block(NamedTuple):
    """A message in bytes [begin, end) of a file, with a header of `head` bytes."""

    begin: int
    head: int
    end: int


def _is_file(handle: IO[bytes]) -> bool:
    handle.seek(0)
    return handle.read(len(_MAGIC)) == _MAGIC


def _messages(handle: IO[bytes], file: SourceFile) -> Iterator[_Message]:
    """Yields a file's messages in order of offset, without the schema of an IPC file."""
    compression.refuse_packed(handle, file.path)
    head = handle.read(len(_MAGIC))
    if head.startswith(_PARQUET):
        raise UserError(f"{file.path} is Parquet: read it as parquet:")
    if head.startswith(_FEATHER_1):
        raise UserError(f"{file.path} is Feather version 1: rewrite it as version 2")
    yield from (_in_file if head == _MAGIC else _in_stream)(handle, file)


def _in_file(handle: IO[bytes], file: SourceFile) -> Iterator[_Message]:
    dictionaries, batches = _footer(handle, file)
    for block in sorted(dictionaries + batches):
        handle.seek(block.begin)
        head = handle.read(block.head)
        try:
            skip = 8 if struct.unpack_from("<I", head)[0] == _CONTINUED else 4
            rows, body = _header(head[skip:])
        except (struct.error, IndexError):
            raise ValueError(f"it is corrupt at byte {block.begin:,}") from None
        if block.begin + block.head + body != block.end:
            raise ValueError(f"it is corrupt at byte {block.begin:,}, which contradicts its footer")
        yield _Message(block.begin, block.end, rows)


def _footer(handle: IO[bytes], file: SourceFile) -> tuple[list[_Block], list[_Block]]:
    """Returns an IPC file's dictionaries and record batches."""
    import pyarrow as pa

    end = file.bytes - len(_MAGIC) - 4
    handle.seek(max(len(_MAGIC), end))
    trailer = handle.read()
    if not trailer.endswith(_MAGIC) or len(trailer) < len(_MAGIC) + 4:
        raise ValueError("it is cut short: its footer is missing")
    (size,) = struct.unpack_from("<I", trailer)
    begin = end - size
    if begin < len(_MAGIC):
        raise ValueError("it is cut short, or its footer is corrupt")
    pa.ipc.open_file(handle)  # checks the flatbuffer
    handle.seek(begin)
    data = handle.read(size)
    try:
        (root,) = struct.unpack_from("<I", data)
        dictionaries, batches = (_blocks(data, root, number) for number in (2, 3))
    except (struct.error, IndexError):
        raise ValueError("its footer is corrupt") from None
    for block in dictionaries + batches:
        if not len(_MAGIC) <= block.begin < block.begin + block.head <= block.end <= begin:
            raise ValueError("its footer is corrupt: it misplaces a message")
    last = max((block.end for block in dictionaries + batches), default=begin)
    if last + 8 + _PADDING < begin:  # two joined files: the footer belongs to the second
        raise ValueError(f"it continues after its end at byte {last:,}")
    return dictionaries, batches


def _blocks(data: bytes, table: int, number: int) -> list[_Block]:
    """Returns a footer field that is a list of Block."""
    place = _field(data, table, number)
    if not place:
        return []
    place += struct.unpack_from("<I", data, place)[0]
    (count,) = struct.unpack_from("<I", data, place)
    each = struct.iter_unpack("<qi4xq", data[place + 4 : place + 4 + 24 * count])
    return [_Block(begin, head, begin + head + body) for begin, head, body in each]


def _in_stream(handle: IO[bytes], file: SourceFile) -> Iterator[_Message]:
    begin, stop = 0, file.bytes
    while begin < stop:
        handle.seek(begin)
        prefix = handle.read(min(8, stop - begin))
        try:
            size, skip = struct.unpack_from("<I", prefix)[0], 4
            if size == _CONTINUED:
                size, skip = struct.unpack_from("<I", prefix, 4)[0], 8
        except struct.error:
            break
        if not size:
            if begin + skip + _PADDING < stop:
                raise ValueError(f"it continues after its end at byte {begin + skip:,}")
            return
        if size > min(stop - begin - skip, _LONGEST_HEADER_BYTES):
            break
        handle.seek(begin + skip)
        try:
            rows, body = _header(handle.read(size))
        except (struct.error, IndexError):
            raise ValueError(f"it is not an Arrow file, or is corrupt at byte {begin:,}") from None
        end = begin + skip + size + body
        if body < 0 or end > stop:
            break
        yield _Message(begin, end, rows)
        begin = end
    raise ValueError("it is cut short: a message or the end marker is missing")


def _header(data: bytes) -> tuple[int | None, int]:
    """Returns (rows of a record batch or None, bytes of the body) from a message's flatbuffer."""
    (message,) = struct.unpack_from("<I", data)
    kind, length = _field(data, message, 1), _field(data, message, 3)
    body = struct.unpack_from("<q", data, length)[0] if length else 0
    if not kind or data[kind] != _RECORD_BATCH:
        return None, body
    header = _field(data, message, 2)
    table = header + struct.unpack_from("<I", data, header)[0]
    rows = _field(data, table, 0)
    return struct.unpack_from("<q", data, rows)[0] if rows else 0, body


def _field(data: bytes, table: int, number: int) -> int:
    """Returns the offset of a field in a flatbuffer table; 0 if it is missing."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def _schema(handle: IO[bytes], stop: int) -> "pa.Schema":
    import pyarrow as pa

    return pa.ipc.open_stream(_Spliced(handle, [(0, stop)])).schema


def _validate(rows: "pa.RecordBatch") -> None:
    """Checks that all offsets lie in their buffers, which Arrow does not check when it reads."""
    import pyarrow as pa

    for column in rows.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # that affects single rows only
                raise


class _Spliced(io.RawIOBase):
    """Presents stretches (begin, end) of a file as one file."""

    def __init__(self, handle: IO[bytes], stretches: Sequence[tuple[int, int]]):
        self._handle, self._left = handle, list(stretches)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._left and self._left[0][0] >= self._left[0][1]:
            del self._left[0]
        if not self._left:
            return 0
        begin, end = self._left[0]
        self._handle.seek(begin)
        data = self._handle.read(min(len(buffer), end - begin))
        if not data:
            raise ValueError("it is cut short")
        buffer[: len(data)] = data
        self._left[0] = (begin + len(data), end)
        return len(data)


ARROW = Arrow()
