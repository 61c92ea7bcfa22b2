"""WARC files and WET files, such as Common Crawl's: one document per text record.

The columns are `text` (the record's block) and the record's headers, by name. The documents are
`conversion` records and `resource` records of plain text.

FastWARC parses the records and stops at damage. This module finds where the damage and the next
record begin; the bytes in between are one bad document. In a .gz file, reading resumes at the next
gzip member that begins a record; in other files, at the next line that begins with `WARC/`.
A .gz file compressed as a whole cannot be read beyond its first fault, which is an error.

Source: ISO 28500 (WARC 1.0 and 1.1); the WET files of Common Crawl.
"""

import contextlib
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from tasks.reading import batches, compression, opening
from tasks.reading.batches import Batches
from tasks.reading.columns import INVALID, Columns
from tasks.reading.corpus import COLUMN_OPTIONS, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import lines
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError

TEXT = "text"
_ID = "warc-record-id"
_CONVERSION, _RESOURCE, _RESPONSES = "conversion", "resource", ("response", "revisit")
_CORRUPT, _SHORT, _NOT_PLAIN = "corrupt record", "record cut short", "not plain text"
_PROBLEMS = {
    **dict.fromkeys(_RESPONSES, "a response, not text"),
    "continuation": "continuation of another record",
}
# Records without text, which are passed over; with the others, all types of the standard.
_OTHERS = ("warcinfo", "request", "metadata")
_NO_TYPE = "no known WARC-Type"
_LONGEST_BYTES = 64 << 20
_LONG = f"a record longer than {_LONGEST_BYTES >> 20} MiB"
_LONGEST_HEADERS = 1 << 20
_BLOCK_BYTES = 1 << 20
_STEP_BYTES = 64
_GZIP = b"\x1f\x8b\x08"
_MEMBER = re.compile(re.escape(_GZIP))
_BEGINS = re.compile(rb"\nWARC/\d")
_PEEK_RECORDS = 16


class _Record(NamedTuple):
    """A record at byte `offset`: headers by lower-case name and a block, or a problem."""

    offset: int
    headers: dict[str, str]
    block: bytes
    problem: str | None


class Warc:
    """The formats `warc` and `wet`; files are not cut.

    A document's id is its WARC-Record-ID unless another header is named. Its place is the offset of
    its record, or of its member in a .gz file.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if file.bytes:
            _check(spec, file)
        return lines.ranges(file, whole=True)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        spec, longest = corpus.spec, corpus.max_document_bytes
        with opening.open_file(part.file) as handle:
            documents = _documents(spec, part.file.name, _records(handle, part.file))
            yield from batches.collect(documents, batch_documents, longest, spec.unit)


def _check(spec: CorpusSpec, file: SourceFile) -> None:
    kinds: list[str] = []
    headers: dict[str, str] = {}
    with opening.open_file(file, _BLOCK_BYTES) as handle:
        for number, record in enumerate(_records(handle, file)):
            kinds.append(record.headers.get("warc-type", ""))
            if kinds[-1] in (_CONVERSION, _RESOURCE):
                headers |= record.headers
            if number == _PEEK_RECORDS:
                break
    if not any(kinds):
        raise ValueError("it does not begin with WARC records")
    if _CONVERSION not in kinds and set(kinds) & set(_RESPONSES):
        raise UserError(
            f"{file.path} holds server responses, not text: name the WET files of the same "
            "crawl, or extract the text first"
        )
    for name in Columns(spec).checked:
        if headers and name.lower() not in (TEXT, *headers):
            raise missing_column(file.path, name, [TEXT, *sorted(headers)], spec)


def _documents(spec: CorpusSpec, file: str, records: Iterator[_Record]) -> Iterator[Document]:
    columns, id_header = Columns(spec), (spec.id or _ID).lower()
    keys = {name: name.lower() for name in columns.names}
    for offset, headers, block, problem in records:
        kind = headers.get("warc-type", "")
        problem = problem or _PROBLEMS.get(kind)
        plain = headers.get("content-type", "").startswith("text/plain")
        if kind == _RESOURCE and not plain:
            problem = problem or _NOT_PLAIN
        if not problem and kind in _OTHERS:
            continue
        if kind not in (_CONVERSION, _RESOURCE):
            problem = problem or _NO_TYPE
        place = f"{file}:{offset}"
        name = headers.get(id_header) or place
        if "content-length" not in headers or not name.isprintable():  # the headers are damaged
            name = place
        row = {column: headers[key] for column, key in keys.items() if key in headers}
        try:
            row |= {column: block.decode() for column, key in keys.items() if key == TEXT}
        except UnicodeDecodeError:
            problem = problem or INVALID
        content, problem = (None, problem) if problem else columns.content(row)
        yield name, content, problem, 0, place


def _records(handle: IO[bytes], file: SourceFile) -> Iterator[_Record]:
    """Yields a file's records, and one bad record per damaged place."""
    # Damage to the first bytes must cost one record, so the name counts as well.
    is_gzip = compression.is_gzip(handle) or file.name.lower().endswith(".gz")
    if is_gzip and not _is_one_member(handle, file.path):
        yield from _resynchronised(_Members(handle))
        return
    handle.seek(0)
    with compression.decompress(handle, file.path) as stream:
        yield from _resynchronised(_Lines(stream))


def _is_one_member(handle: IO[bytes], path: str) -> bool:
    expander, content = zlib.decompressobj(31), bytearray()
    handle.seek(0)
    with contextlib.suppress(zlib.error):  # the bytes before a fault are enough
        while len(content) < _BLOCK_BYTES and not expander.eof:
            if not (step := handle.read(_STEP_BYTES)):
                break
            content += expander.decompress(step)
    compression.check_archive(bytes(content[: compression.HEAD_BYTES]), path)
    return len(list(itertools.islice(_parsed(io.BytesIO(content), 0), 2))) == 2


def _resynchronised(source: "_Lines") -> Iterator[_Record]:
    begin: int | None = 0
    while begin is not None:
        last = None  # held back: if its length is wrong, it hides the records after it
        for record in _parsed(source.file, begin):
            if last:
                yield last
            last = record
        end = source.end(last.offset) if last else begin
        if last and (end is None or end == math.inf):
            begin = source.following(last.offset + 1)
            cut = end == math.inf and begin is None
            yield last._replace(block=b"", problem=_SHORT if cut else _CORRUPT)
            continue
        assert isinstance(end, int)
        if last:
            yield last
        if source.is_end(end):
            return
        begin = end if last else source.following(end + 1)
        if not last:
            yield _Record(end, {}, b"", source.problem(end))


def _parsed(file: IO[bytes], begin: int) -> Iterator[_Record]:
    """Yields the records from `begin` on, up to the first that cannot be parsed."""
    from fastwarc.warc import ArchiveIterator

    file.seek(begin)
    with contextlib.suppress(OSError):  # FastWARC's error for damaged data
        for record in ArchiveIterator(file, parse_http=False):
            headers = {name.lower(): value for name, value in record.headers}
            block, problem = b"", None
            length = headers.get("content-length", "")
            if not length.isdecimal():
                problem = _CORRUPT
            elif record.content_length > _LONGEST_BYTES:
                problem = _LONG
            else:
                block = record.reader.read()
                problem = _SHORT if len(block) < record.content_length else None
            # FastWARC takes the length to be 0 if its name is not written in the usual case.
            is_misread = length.isdecimal() and int(length) != record.content_length
            yield _Record(record.stream_pos, headers, block, _CORRUPT if is_misread else problem)
            if is_misread:
                return


class _Lines:
    """An uncompressed stream, in which each record begins on a new line."""

    def __init__(self, file: IO[bytes]):
        self.file = file

    def end(self, offset: int) -> float | None:
        """Returns the offset at which a record and the blank lines after it end.

        Returns None if something else follows the block, infinity if the file ends inside it.
        """
        self.file.seek(offset)
        length = b""
        while (line := self.file.readline(_LONGEST_HEADERS)).strip():
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = value.strip()
        if not length.isdigit():
            return None if line else math.inf
        end = self.file.tell() + int(length)
        self.file.seek(end - 1)
        if not self.file.read(1):
            return math.inf
        ended = False
        while line := self.file.readline(_LONGEST_HEADERS):
            if line.strip():
                return end if ended else None
            end, ended = end + len(line), True
        return end

    def is_end(self, offset: int) -> bool:
        self.file.seek(offset)
        return not self.file.read(1)

    def following(self, begin: int) -> int | None:
        """Returns the offset of the first record from `begin` on, or None."""
        self.file.seek(begin)
        position, tail = begin, b""
        while data := self.file.read(_BLOCK_BYTES):
            data, position = tail + data, position - len(tail)
            if found := _BEGINS.search(data):
                return position + found.start() + 1
            position, tail = position + len(data), data[-len(b"\nWARC/") :]
        return None

    def problem(self, offset: int) -> str:
        return _CORRUPT


class _Members(_Lines):
    """A .gz file, in which each record is a gzip member."""

    def end(self, offset: int) -> float | None:
        self.file.seek(offset)
        expander, content = zlib.decompressobj(31), bytearray()
        size = 0
        try:
            while not expander.eof:
                if not (data := expander.unconsumed_tail or self.file.read(_BLOCK_BYTES)):
                    return math.inf
                size += len(data)
                some = expander.decompress(data, _BLOCK_BYTES)
                size -= len(expander.unconsumed_tail or expander.unused_data)
                if len(content) < _LONGEST_BYTES + _LONGEST_HEADERS:
                    content += some
        except zlib.error:
            return None
        is_long = len(content) >= _LONGEST_BYTES + _LONGEST_HEADERS
        is_record = is_long or _Lines(io.BytesIO(content)).end(0) == len(content)
        return offset + size if is_record else None

    def is_end(self, offset: int) -> bool:
        self.file.seek(offset)
        blocks = iter(lambda: self.file.read(_BLOCK_BYTES), b"")
        return not any(block.strip(b"\0") for block in blocks)  # padding, as in tar

    def following(self, begin: int) -> int | None:
        while True:
            self.file.seek(begin)
            data = self.file.read(_BLOCK_BYTES)
            for found in _MEMBER.finditer(data):
                place = begin + found.start()
                self.file.seek(place)
                with contextlib.suppress(zlib.error):
                    head = zlib.decompressobj(31).decompress(self.file.read(64 << 10), 64)
                    if _BEGINS.match(b"\n" + head):
                        return place
            if len(data) < len(_GZIP):
                return None
            begin += len(data) - len(_GZIP) + 1  # a member may begin across two blocks

    def problem(self, offset: int) -> str:
        return _SHORT if self.end(offset) == math.inf else _CORRUPT


WARC = Warc()
