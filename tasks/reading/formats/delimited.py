"""CSV and TSV: one document a row of delimited fields, named by a header.

A row whose fields cannot be told apart, or that has another number of them than the header, is one
bad document. Without quotes every line is a row. With quotes, a field may hold line ends, so where
a row begins is known only from the file's start: such a file is read once when it is listed, and
cut only where rows begin.
"""

import collections
import csv
import io
from collections.abc import Iterable, Iterator

from tasks.reading import batches, long_json, opening, pairs
from tasks.reading.batches import Batches
from tasks.reading.corpus import NO_QUOTE, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import lines
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

# A longer row is left out. `csv` holds a field as four bytes a character.
_LONGEST_ROW_BYTES = 64 << 20
# Places where a file can be cut are at least so far apart.
_CUT_BYTES = 256 << 10
_PEEK_BYTES = 256 << 10
_LONG = f"a line longer than {_LONGEST_ROW_BYTES >> 20} MiB"
_INVALID, _FIELDS = "invalid CSV", "wrong number of fields"
_OTHER_DELIMITERS = {"\t": "tab", ";": ";", "|": "|", ",": ","}

# (offset in the file, the line with its end): None for a line that is too long.
_Line = tuple[int, bytes | None]
# (offset, fields, problem): bytes of fields are the characters of Latin-1.
_Row = tuple[int, list[str], str | None]


class Delimited:
    """The formats `csv` and `tsv`; a document without an id gets the offset of its first byte.

    An empty field is an empty text. Blank lines are skipped.
    """

    has_columns = True
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if not file.bytes or not _check_columns(spec, file):
            return []
        whole = lines.ranges(file)
        if spec.quote == NO_QUOTE or whole[0].stop is None:
            return whole
        return [FileRange(0, file.bytes, file.bytes, tuple(_cuts(spec, file)))]

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        spec, longest = corpus.spec, corpus.max_document_bytes
        header, names = _header(spec, part.file)
        with lines.open_part(part) as found:
            rows = _rows(spec, found)
            if part.start <= header:
                next(rows, None)
            if spec.unit is Unit.PAIR:
                made = _pairs(spec, part.file.name, names, rows)
                yield from pairs.collect(made, batch_documents)
            else:
                documents = _documents(spec, part.file.name, names, rows)
                yield from batches.collect(documents, batch_documents, longest)


def _check_columns(spec: CorpusSpec, file: SourceFile) -> bool:
    """Checks that a file has the columns; returns whether it has more than a header.

    Raises:
      UserError: it lacks a column, or has it twice.
    """
    _, head, is_all = _head(file)
    _, names = _header(spec, file)
    if is_all and not names:
        return False
    for column in filter(None, (*pairs.columns(spec), spec.id)):
        if column not in names:
            raise _missing(spec, file.path, column, names)
        if names.count(column) > 1:
            raise UserError(f"{file.path} has the column {column} {names.count(column)} times")
    if spec.columns or not is_all:
        return True
    rows = _rows(spec, [(0, head)])
    return next(rows, None) is not None and next(rows, None) is not None


def _missing(spec: CorpusSpec, path: str, column: str, names: list[str]) -> UserError:
    """Returns the error of a file without a column."""
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
    return UserError(f"{error}, or ?columns=A,B,… if its first line is no header")


def _head(file: SourceFile) -> tuple[int, bytes, bool]:
    """Returns (size of the byte order mark, the file's beginning after it, whether this is all).

    Raises:
      ValueError: it is UTF-16.
    """
    with (
        opening.open_file(file, _PEEK_BYTES) as handle,
        opening.decompress(handle, file.path) as stream,
    ):
        head = stream.read(_PEEK_BYTES)
        lines.check_encoding(head)
        is_all = len(head) < _PEEK_BYTES or not stream.read(1)
        mark = len(lines.MARK) if head.startswith(lines.MARK) else 0
        return mark, head[mark:], is_all


def _header(spec: CorpusSpec, file: SourceFile) -> tuple[int, list[str]]:
    """Returns (offset of the header's line, -1 if the file has none; names of the columns).

    Raises:
      ValueError: the header is no row of CSV, or not UTF-8.
    """
    if spec.columns:
        return -1, spec.columns.split(",")
    mark, head, _ = _head(file)
    rows = _rows(spec, [(0, head)])
    offset, fields, problem = next(rows, (0, [], None))
    if problem:
        raise ValueError(f"its header is {problem}")
    offset += mark if offset else 0  # the first line begins with the mark
    return offset, [_bytes(field).decode() for field in fields]


def _cuts(spec: CorpusSpec, file: SourceFile) -> Iterator[tuple[int, int]]:
    """Yields the places, some way from each other, at which rows begin."""
    yield 0, 0
    last = 0
    with lines.open_part(FilePart(file, 0, None, file.bytes)) as found:
        for offset, _, _ in _Quoted(spec, found).rows(starts_only=True):
            if offset - last >= _CUT_BYTES:
                yield offset, 0
                last = offset


def _rows(spec: CorpusSpec, found: lines.Lines) -> Iterator[_Row]:
    """Yields the rows of whole lines, without blank lines."""
    if spec.quote != NO_QUOTE:
        yield from _Quoted(spec, found).rows()
        return
    for offset, line in _single(found):
        if line is None:
            yield offset, [], _LONG
        elif line.strip(b"\r\n"):
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("latin-1")
            yield offset, text.split(spec.delimiter), None


def _single(found: lines.Lines) -> Iterator[_Line]:
    """Yields every line by itself."""
    for offset, data in found:
        if isinstance(data, bytes):
            for line in io.BytesIO(data):
                yield offset, line
                offset += len(line)
            continue
        whole: bytearray | None = bytearray()
        for chunk in data:
            if whole is not None:
                whole += chunk
                whole = whole if len(whole) <= _LONGEST_ROW_BYTES else None
        yield offset, whole if whole is None else bytes(whole) + b"\n" * data.ended


class _TooLong(Exception):
    """A row that is not held whole."""


class _Quoted:
    """The rows of lines whose fields may have quotes, by Python's `csv` in its strict mode.

    A row that is not CSV ends with its first line, and the next one begins after it. So a quote
    that is never closed costs one row; and a row that was cut off from the lines after it would be
    as bad as it is with them, so the rows do not depend on where the file is cut.
    """

    def __init__(self, spec: CorpusSpec, found: lines.Lines):
        csv.field_size_limit(_LONGEST_ROW_BYTES)
        self._quote = spec.quote.encode()
        self._reader = csv.reader(self, delimiter=spec.delimiter, quotechar=spec.quote, strict=True)
        self._blocks = iter(found)
        self._ahead: collections.deque[_Line] = collections.deque()
        self._taken: list[_Line] = []  # lines of the row that is being parsed
        self._size = 0

    def rows(self, starts_only: bool = False) -> Iterator[_Row]:
        """Yields the rows without blank lines.

        With `starts_only`, yields only some of the lines without a quote, and leaves fields out.
        """
        while True:
            if not self._ahead:
                block = next(self._blocks, None)
                if block is None:
                    return
                if starts_only and isinstance(block[1], bytes) and self._quote not in block[1]:
                    yield block[0], [], None
                    continue
                self._ahead.extend(_single([block]))
                if not self._ahead:  # a byte order mark and nothing else
                    continue
            if self._ahead[0][1] is None:
                yield self._ahead.popleft()[0], [], _LONG
                continue
            self._taken, self._size = [], 0
            try:
                fields = next(self._reader)
            except (csv.Error, _TooLong):
                self._ahead.extendleft(reversed(self._taken[1:]))
                yield self._taken[0][0], [], _INVALID
                continue
            if fields:
                yield self._taken[0][0], fields, None

    def __iter__(self) -> "_Quoted":
        return self

    def __next__(self) -> str:
        """Returns the next line to the parser.

        Raises:
          StopIteration: there is none.
          _TooLong: the row is too long.
        """
        if not self._ahead:
            self._ahead.extend(_single([next(self._blocks)]))
        offset, line = self._ahead.popleft()
        self._taken.append((offset, line))
        self._size += len(line or b"")
        if line is None or self._size > _LONGEST_ROW_BYTES:
            raise _TooLong
        return line.decode("latin-1")


def _documents(
    spec: CorpusSpec, file: str, names: list[str], rows: Iterable[_Row]
) -> Iterator[Document]:
    column, id_column = names.index(spec.column), _id_column(spec, names)
    for offset, fields, problem in rows:
        place = f"{file}:{offset}"
        if problem is None and len(fields) != len(names):
            problem = _FIELDS
        if problem is not None:
            yield place, None, problem, 0, place
            continue
        name = _name(fields, id_column, place)
        text = fields[column]
        if text.isascii():
            yield name, text, None, 0, place
            continue
        data = _bytes(text)
        valid = long_json.is_utf8(data)
        yield name, data if valid else None, None if valid else pairs.INVALID, 0, place


def _pairs(
    spec: CorpusSpec, file: str, names: list[str], rows: Iterable[_Row]
) -> Iterator[pairs.Pair]:
    columns = {name: names.index(name) for name in pairs.columns(spec)}
    id_column = _id_column(spec, names)
    for offset, fields, problem in rows:
        place = f"{file}:{offset}"
        if problem is None and len(fields) != len(names):
            problem = _FIELDS
        if problem is not None:
            yield place, None, None, problem, place
            continue
        name = _name(fields, id_column, place)
        try:
            row = {column: _bytes(fields[number]).decode() for column, number in columns.items()}
        except UnicodeDecodeError:
            yield name, None, None, pairs.INVALID, place
            continue
        yield name, *pairs.render(spec, row), place


def _id_column(spec: CorpusSpec, names: list[str]) -> int | None:
    wanted = spec.id or "id"
    return names.index(wanted) if wanted in names else None


def _name(fields: list[str], column: int | None, place: str) -> str:
    """Returns the id of a row; an empty one is replaced by the row's place."""
    if column is None or not fields[column]:
        return place
    return _bytes(fields[column]).decode(errors="replace")


def _bytes(field: str) -> bytes:
    return field.encode("latin-1")
