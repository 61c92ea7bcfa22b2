"""WARC and WET: one document a record that holds text, as the WET files of Common Crawl do.

The columns are `text`, the record's block, and the names of its headers, such as WARC-Target-URI.
Records of the type `conversion`, and `resource` records of plain text, are documents. Requests and
metadata are passed over; a response is HTML and no document of ours.

In a .gz file every record is usually a gzip member of its own, with a checksum. A member that is
corrupt or cut short is one bad document, and reading goes on at the next member that begins a
record; what lies between belongs to the bad one. If it holds several records, it is an error, as in
any other .gz file. In files that are not compressed a record that does not begin as records do is
one bad document, which ends where the next `WARC/` begins a line; so is one whose length is too
small, or reaches into the records after it. A continuation of another record is a bad document.

Source: ISO 28500 (WARC 1.0 and 1.1); the WET files of Common Crawl.
"""

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from typing import IO

from tasks.reading import batches, long_json, opening, pairs
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

TEXT = "text"
_ID = "warc-record-id"
_CONVERSION, _RESOURCE, _RESPONSES = "conversion", "resource", ("response", "revisit")
_CORRUPT, _SHORT, _RESPONSE = "corrupt record", "record cut short", "a response, not text"
_NOT_PLAIN = "not plain text"
_CONTINUATION = "continuation"
_SEGMENT = "continuation of another record"
_LONGEST_BYTES = 64 << 20
_LONG = f"a record longer than {_LONGEST_BYTES >> 20} MiB"
_LONGEST_HEADERS = 1 << 20
_BLOCK_BYTES = 1 << 20
# Of members, so much is read at a time: after each, zlib copies what is left.
_STEP_BYTES = 16 << 10
_MEMBER = b"\x1f\x8b\x08"
_BEGINS = re.compile(rb"(?m)^WARC/\d")
_PEEK_RECORDS = 16

# (place, headers by lower-case name, block, problem); without headers and block if they are broken.
_Record = tuple[str, dict[str, str], bytes, str | None]


class Warc:
    """The formats `warc` and `wet`.

    A document's id is its WARC-Record-ID unless another header is named; its place is the byte
    offset of its gzip member or record. A file is one piece.
    """

    has_columns = True
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if not file.bytes:
            return []
        _check(spec, file)
        return [FileRange(0, None, file.bytes)]

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        spec = corpus.spec
        with opening.open_file(part.file) as handle:
            records = _documents_of(_records(handle, part.file))
            if spec.unit is Unit.PAIR:
                yield from pairs.collect(_pairs(spec, records), batch_documents)
            else:
                longest = corpus.max_document_bytes
                yield from batches.collect(_documents(spec, records), batch_documents, longest)


def _check(spec: CorpusSpec, file: SourceFile) -> None:
    """Checks the first records of a file.

    Raises:
      UserError: they are no records, hold responses, or lack a header that is used as a column.
    """
    kinds: list[str] = []
    headers: dict[str, str] = {}
    with opening.open_file(file, _BLOCK_BYTES) as handle:
        for number, (_, of_record, _, _) in enumerate(_records(handle, file)):
            kinds.append(of_record.get("warc-type", ""))
            if kinds[-1] in (_CONVERSION, _RESOURCE):
                headers |= of_record
            if number == _PEEK_RECORDS:
                break
    if not any(kinds):
        raise ValueError("it does not begin with WARC records")
    if _CONVERSION not in kinds and set(kinds) & set(_RESPONSES):
        raise UserError(
            f"{file.path} holds the responses of servers, not text: name the WET files of the same "
            "crawl, or extract their text first"
        )
    for name in filter(None, (*pairs.columns(spec), spec.id)):
        if headers and name.lower() not in (TEXT, *headers):
            raise missing_column(file.path, name, [TEXT, *sorted(headers)], spec)


def _documents_of(records: Iterator[_Record]) -> Iterator[_Record]:
    """Yields the records that are documents, good or bad."""
    for place, headers, block, problem in records:
        kind = headers.get("warc-type", "")
        if kind in _RESPONSES:
            yield place, headers, b"", problem or _RESPONSE
        elif kind == _RESOURCE and not headers.get("content-type", "").startswith("text/plain"):
            yield place, headers, b"", problem or _NOT_PLAIN
        elif kind == _CONTINUATION:
            yield place, headers, b"", problem or _SEGMENT
        elif problem or kind in (_CONVERSION, _RESOURCE):
            yield place, headers, block, problem


def _id(spec: CorpusSpec, place: str, headers: dict[str, str]) -> str:
    return headers.get((spec.id or _ID).lower()) or place


def _documents(spec: CorpusSpec, records: Iterator[_Record]) -> Iterator[Document]:
    for place, headers, block, problem in records:
        name, text = _id(spec, place, headers), block
        if problem is None and spec.column.lower() != TEXT:
            value = headers.get(spec.column.lower())
            text, problem = (value or "").encode(), None if value is not None else pairs.MISSING
        if problem is None and not long_json.is_utf8(text):
            problem = pairs.INVALID
        yield name, None if problem else text, problem, 0, place


def _pairs(spec: CorpusSpec, records: Iterator[_Record]) -> Iterator[pairs.Pair]:
    columns = {name: name.lower() for name in pairs.columns(spec)}
    for place, headers, block, problem in records:
        name = _id(spec, place, headers)
        row = {}
        try:
            for column, key in columns.items() if problem is None else ():
                if key == TEXT:
                    row[column] = block.decode()
                elif key in headers:
                    row[column] = headers[key]
        except UnicodeDecodeError:
            problem = pairs.INVALID
        if problem is not None:
            yield name, None, None, problem, place
        else:
            yield name, *pairs.render(spec, row), place


def _records(handle: IO[bytes], file: SourceFile) -> Iterator[_Record]:
    """Yields the records of a file."""
    if not file.name.endswith(".gz"):
        with opening.decompress(handle, file.path) as stream:
            yield from _parsed(stream, file.name, 0)
        return
    for offset, member in _members(handle):
        place = f"{file.name}:{offset}"
        if isinstance(member, str):
            yield place, {}, b"", member
        elif isinstance(member, bytes):
            yield from _parsed(io.BytesIO(member), file.name, offset)
        else:  # records without members of their own
            handle.seek(offset)
            with opening.decompress(handle, file.path) as stream:
                yield from _parsed(stream, file.name, offset)
            return


def _members(handle: IO[bytes]) -> Iterator[tuple[int, bytes | str | None]]:
    """Yields (offset, content) of every gzip member.

    The content of a broken member is the reason; None, the last, stands for a member that is too
    long to be a record.
    """
    offset, pending = 0, handle.read(_STEP_BYTES)
    while pending:
        expander, content, problem = zlib.decompressobj(31), bytearray(), ""
        consumed = 0
        try:
            while not expander.eof:
                content += expander.decompress(pending, _LONGEST_BYTES + _LONGEST_HEADERS)
                left = expander.unconsumed_tail or expander.unused_data
                consumed += len(pending) - len(left)
                if len(content) >= _LONGEST_BYTES + _LONGEST_HEADERS:
                    yield offset, None
                    return
                pending = left
                if not expander.eof and not pending:
                    pending = handle.read(_STEP_BYTES)
                    if not pending:
                        problem = _SHORT
                        break
        except zlib.error:
            problem = _CORRUPT
        if not problem:
            yield offset, bytes(content)
            offset += consumed
            pending = pending or handle.read(_STEP_BYTES)
            if pending and not pending.strip(b"\0"):  # padding, as tar has
                pending = b""
            continue
        if _begun(_salvaged(handle, offset)) > 1:
            raise ValueError(
                f"{problem} in the gzip member at byte {offset:,}, which holds several records"
            )
        yield offset, problem
        offset, pending = _next_member(handle, offset + 1)


def _salvaged(handle: IO[bytes], offset: int) -> bytes:
    """Returns the content of a broken member up to a few bytes before its fault."""
    handle.seek(offset)
    expander, content = zlib.decompressobj(31), bytearray()
    with contextlib.suppress(zlib.error):
        while len(content) < _LONGEST_BYTES and (block := handle.read(_STEP_BYTES)):
            while block and not expander.eof:
                content += expander.decompress(block, _STEP_BYTES // 64)
                block = expander.unconsumed_tail
    return bytes(content)


def _begun(content: bytes) -> int:
    """Returns the number of records that begin in a broken member, as far as they can be told."""
    found = _parsed(io.BytesIO(content), "", 0)
    return sum(problem in (None, _SHORT) for _, _, _, problem in found)


def _next_member(handle: IO[bytes], begin: int) -> tuple[int, bytes]:
    """Returns (offset of the first member after `begin` that starts a record, bytes from there).

    The bytes are empty if there is none.
    """
    handle.seek(begin)
    data = handle.read(_BLOCK_BYTES)
    while data:
        place = data.find(_MEMBER)
        while place >= 0 and len(data) - place < _BLOCK_BYTES // 2:
            more = handle.read(_BLOCK_BYTES)
            if not more:
                break
            data += more
        if place >= 0:
            if _begins_record(data[place : place + (64 << 10)]):
                return begin + place, data[place:]
            begin, data = begin + place + 1, data[place + 1 :]
            continue
        kept = data[-len(_MEMBER) + 1 :]
        begin += len(data) - len(kept)
        more = handle.read(_BLOCK_BYTES)
        data = kept + more if more else b""
    return begin, b""


def _begins_record(data: bytes) -> bool:
    try:
        return bool(_BEGINS.match(zlib.decompressobj(31).decompress(data, 64)))
    except zlib.error:
        return False


class _Again:
    """A stream from which what was read can be read once more."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._pushed = stream, io.BytesIO()

    def push(self, data: bytes) -> None:
        self._pushed = io.BytesIO(data + self._pushed.read())

    def read(self, size: int) -> bytes:
        data = self._pushed.read(size)
        return data if len(data) == size else data + self._stream.read(size - len(data))

    def readline(self, size: int) -> bytes:
        line = self._pushed.readline(size)
        if line.endswith(b"\n") or len(line) == size:
            return line
        return line + self._stream.readline(size - len(line))


def _parsed(source: IO[bytes], file: str, offset: int) -> Iterator[_Record]:
    """Yields the records of an uncompressed stream; `offset` is added to the places."""
    position, stream = 0, _Again(source)
    while True:
        begin = position
        line = stream.readline(_LONGEST_HEADERS)
        position += len(line)
        if not line:
            return
        if not line.strip():  # two line ends follow a record
            continue
        place = f"{file}:{offset + begin}"
        if not _BEGINS.match(line):
            position += _skip_to_next(stream)
            yield place, {}, b"", _CORRUPT
            continue
        headers, size = _headers(stream)
        position += size
        try:
            length = int(headers.get("content-length", ""))
        except ValueError:
            length = -1
        if length < 0:
            position += _skip_to_next(stream)
            yield place, headers, b"", _CORRUPT
            continue
        if length > _LONGEST_BYTES:
            position += _skip(stream, length, place)
            yield place, headers, b"", _LONG
            continue
        block, after = stream.read(length), stream.readline(_LONGEST_HEADERS)
        stream.push(after)
        if after.strip() or len(block) < length:
            # Without a blank line after it, a block in which another record begins is too long.
            found = _BEGINS.search(block + after)
            if found and found.start() < len(block):
                stream.push(block[found.start() :])
                position += found.start()
                yield place, headers, b"", _CORRUPT
                continue
            if after.strip() and not found:  # its length is too small: there is more of it
                position += len(block) + _skip_to_next(stream)
                yield place, headers, b"", _CORRUPT
                continue
        position += len(block)
        yield place, headers, block, None if len(block) == length else _SHORT


def _skip_to_next(stream: _Again) -> int:
    """Reads up to the line that begins the next record; returns the number of bytes."""
    size = 0
    while (line := stream.readline(_LONGEST_HEADERS)) and not _BEGINS.match(line):
        size += len(line)
    stream.push(line)
    return size


def _skip(stream: _Again, length: int, place: str) -> int:
    """Reads a block of that length, or up to the end of the stream; returns the number of bytes.

    Raises:
      ValueError: the length is wrong, and other records begin in the block.
    """
    size, tail, begins = 0, b"", False
    while size < length and (data := stream.read(min(length - size, _BLOCK_BYTES))):
        size += len(data)
        begins = begins or _BEGINS.search(tail + data, 1) is not None
        tail = data[-len(b"\nWARC/1") + 1 :]
    after = stream.readline(_LONGEST_HEADERS)
    stream.push(after)
    if begins and (after.strip() or size < length):
        raise ValueError(
            f"the record at {place} has a Content-Length of {length:,}, and others begin before "
            "its end: correct it, or remove the record"
        )
    return size


def _headers(stream: _Again) -> tuple[dict[str, str], int]:
    """Returns the headers up to an empty line, by lower-case name, and their size in bytes."""
    headers: dict[str, str] = {}
    size, name = 0, ""
    while line := stream.readline(_LONGEST_HEADERS):
        size += len(line)
        text = line.decode(errors="replace").rstrip("\r\n")
        if not text or size > _LONGEST_HEADERS:
            break
        if text[0] in " \t" and name:  # goes on from the line before
            headers[name] += " " + text.strip()
            continue
        name, _, value = text.partition(":")
        name = name.strip().lower()
        headers[name] = value.strip()
    return headers, size
