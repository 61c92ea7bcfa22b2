"""CSV and TSV: one document per row of delimited fields, which a header names.

A row that cannot be parsed, or has a wrong number of fields, is one bad document. Without quotes,
every line is a row. Quoted fields may contain line ends, so row starts are known only by reading
from the file's start: one worker reads such a file.
"""

import collections
import csv
import io
import itertools
from collections.abc import Iterable, Iterator

from tasks.reading import batches
from tasks.reading.batches import Batches
from tasks.reading.columns import INVALID, Columns
from tasks.reading.corpus import (
    COLUMN_OPTIONS,
    NO_QUOTE,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    SourceFile,
)
from tasks.reading.formats import lines
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError

_INVALID_ROW, _FIELDS = "invalid CSV", "wrong number of fields"
_OTHER_DELIMITERS = {"\t": "tab", ";": ";", "|": "|", ",": ","}

# (offset in the file, line with its end); the line is None if it is too long.
_Line = tuple[int, bytes | None]
# (offset, fields, problem). A field holds one character per byte, as in Latin-1.
_Row = tuple[int, list[str], str | None]


class Delimited:
    """The formats `csv` and `tsv`; a document without an id gets the offset of its first byte.

    An empty field is an empty text. Blank lines are skipped.
    """

    ranges_are_rows = False

    def __init__(self, *options: str):
        self.options = options

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if not file.bytes or not _check_columns(spec, file):
            return []
        return lines.ranges(file, whole=spec.quote != NO_QUOTE)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        spec = corpus.spec
        header, names = _header(spec, b"" if spec.columns else lines.peek(part.file)[0])
        with lines.open_part(part) as found:
            rows = _rows(spec, found)
            if part.start <= header:
                next(rows, None)
            documents = _documents(spec, part.file.name, names, rows)
            yield from batches.collect(
                documents, batch_documents, corpus.max_document_bytes, spec.unit
            )


def _check_columns(spec: CorpusSpec, file: SourceFile) -> bool:
    """Checks a file's columns; returns True if it has more than a header."""
    head, is_all = lines.peek(file)
    lines.check_encoding(head)
    _, names = _header(spec, head)
    if is_all and not names:
        return False
    for column in Columns(spec).checked:
        if column not in names:
            raise _missing(spec, file.path, column, names)
        if names.count(column) > 1:
            raise UserError(f"{file.path} has the column {column} {names.count(column)} times")
    if spec.columns or not is_all:
        return True
    rows = _rows(spec, [(0, head.removeprefix(lines.MARK))])
    return next(rows, None) is not None and next(rows, None) is not None


def _missing(spec: CorpusSpec, path: str, column: str, names: list[str]) -> UserError:
    if spec.columns:
        return UserError(f"{path}: ?columns={spec.columns} does not name the column {column}")
    for delimiter, word in _OTHER_DELIMITERS.items():
        if len(names) == 1 and delimiter != spec.delimiter and delimiter in names[0]:
            return UserError(
                f"{path} has no column {column}: its first line, {names[0][:80]!r}, is one field; "
                f"if a {word!r} separates fields, read it as csv with ?delimiter={word}"
            )
    shown = [name if len(name) < 40 else f"{name[:40]}…" for name in names]
    error = missing_column(path, column, shown, spec)
    return UserError(f"{error}, or ?columns=A,B,… if its first line is not a header")


def _header(spec: CorpusSpec, head: bytes) -> tuple[int, list[str]]:
    """Returns (offset of the header's line, or -1 without a header; column names)."""
    if spec.columns:
        return -1, spec.columns.split(",")
    rows = _rows(spec, [(0, head.removeprefix(lines.MARK))])
    offset, fields, problem = next(rows, (0, [], None))
    if problem:
        raise ValueError(f"its header is {problem}")
    if offset and head.startswith(lines.MARK):  # the first line begins with the mark
        offset += len(lines.MARK)
    return offset, list(map(_text, fields))


def _rows(spec: CorpusSpec, found: lines.Lines) -> Iterator[_Row]:
    if spec.quote != NO_QUOTE:
        yield from _Quoted(spec, found).rows()
        return
    for offset, line in _single(found):
        if line is None:
            yield offset, [], lines.TOO_LONG
        elif line.strip(b"\r\n"):
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("latin-1")
            yield offset, text.split(spec.delimiter), None


def _single(found: lines.Lines) -> Iterator[_Line]:
    for offset, data in found:
        if isinstance(data, bytes):
            for line in io.BytesIO(data):
                yield offset, line
                offset += len(line)
        else:
            whole = lines.whole(data)
            yield offset, whole and whole + b"\n" * data.ended


class _TooLong(Exception):
    """A row that is too long to hold."""


class _Quoted:
    """Parses lines with quoted fields into rows, with Python's `csv` in strict mode.

    A row that is not CSV ends with its first line, and the next row begins after it, so an unclosed
    quote spoils only one row.
    """

    def __init__(self, spec: CorpusSpec, found: lines.Lines):
        csv.field_size_limit(lines.LONGEST_BYTES)
        self._reader = csv.reader(self, delimiter=spec.delimiter, quotechar=spec.quote, strict=True)
        self._lines = _single(found)
        self._ahead: collections.deque[_Line] = collections.deque()
        self._taken: list[_Line] = []  # lines of the row being parsed
        self._size = 0

    def rows(self) -> Iterator[_Row]:
        while True:
            if not self._ahead:
                self._ahead.extend(itertools.islice(self._lines, 1))
            if not self._ahead:
                return
            if self._ahead[0][1] is None:
                yield self._ahead.popleft()[0], [], lines.TOO_LONG
                continue
            self._taken, self._size = [], 0
            try:
                fields = next(self._reader)
            except (csv.Error, _TooLong):
                self._ahead.extendleft(reversed(self._taken[1:]))
                yield self._taken[0][0], [], _INVALID_ROW
                continue
            if fields:
                yield self._taken[0][0], fields, None

    def __iter__(self) -> "_Quoted":
        return self

    def __next__(self) -> str:
        offset, line = self._ahead.popleft() if self._ahead else next(self._lines)
        self._taken.append((offset, line))
        self._size += len(line or b"")
        if line is None or self._size > lines.LONGEST_BYTES:
            raise _TooLong
        return line.decode("latin-1")


def _documents(
    spec: CorpusSpec, file: str, names: list[str], rows: Iterable[_Row]
) -> Iterator[Document]:
    columns, id_column = Columns(spec), spec.id or "id"
    numbers = {name: names.index(name) for name in columns.names}
    id_number = names.index(id_column) if id_column in names else None
    for offset, fields, problem in rows:
        place = f"{file}:{offset}"
        if problem is None and len(fields) != len(names):
            problem = _FIELDS
        if problem is not None:
            yield place, None, problem, 0, place
            continue
        name = place
        if id_number is not None and fields[id_number]:
            name = _text(fields[id_number], errors="replace")
        try:
            row = {column: _text(fields[number]) for column, number in numbers.items()}
            yield name, *columns.content(row), 0, place
        except UnicodeDecodeError:
            yield name, None, INVALID, 0, place


def _text(field: str, errors: str = "strict") -> str:
    return field if field.isascii() else field.encode("latin-1").decode(errors=errors)


CSV = Delimited(*COLUMN_OPTIONS, "columns", "delimiter", "quote")
TSV = Delimited(*COLUMN_OPTIONS, "columns", "quote")
