"""JSON: one object per line, or in an array, or over several lines; its members are the columns."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from tasks.document_kind import DocumentKind
from tasks.reading import batches
from tasks.reading.batches import Batches
from tasks.reading.columns import INVALID, MISSING, Columns, nested
from tasks.reading.corpus import COLUMN_OPTIONS, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import json_values, lines
from tasks.reading.formats.format import innermost, missing_column, not_text
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError

_PEEK = 100  # lines or values
_KINDS = {
    bool: "true or false", int: "number", float: "number", list: "array", dict: "object",
}  # fmt: skip


class JsonLines:
    """The format `json`; a document without an id gets the offset of its first byte.

    A range with a cut at its beginning is not read by lines, but by `json_values.split`.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if not file.bytes:
            return []
        head, is_all = lines.peek(file)
        first = _first_lines(head, is_all)
        rows = list(_objects(first))
        in_lines = rows and 2 * len(rows) >= len(first)
        if not in_lines and json_values.are_in(head, is_all):
            values = list(_first_values(head))
            if values or is_all:  # or one long value
                _check_columns(spec, file.path, list(_objects(values)))
            return [FileRange(0, None, file.bytes, ((0, 0),))]
        if first:  # or one long line, checked when it is read
            _check_columns(spec, file.path, rows)
        return lines.ranges(file)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        spec, file, longest = corpus.spec, part.file.name, corpus.max_document_bytes
        if part.cuts:
            with lines.open_chunks(part) as chunks:
                documents = _of_values(spec, file, chunks)
                yield from batches.collect(documents, batch_documents, longest, spec.unit)
            return
        with lines.open_part(part) as found:
            documents = _of_lines(spec, file, found)
            yield from batches.collect(documents, batch_documents, longest, spec.unit)


def _first_lines(head: bytes, is_all: bool) -> list[bytes]:
    found = head.removeprefix(lines.MARK).split(b"\n")
    return [line for line in (found if is_all else found[:-1]) if line.strip()][:_PEEK]


def _first_values(head: bytes) -> Iterator[bytes]:
    with contextlib.suppress(ValueError):  # the last value may be cut
        for _, value in itertools.islice(json_values.split([head], len(head)), _PEEK):
            yield value


def _objects(values: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for each in values:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(each), dict):
                yield value


def _check_columns(spec: CorpusSpec, path: str, rows: list[dict[str, Any]]) -> None:
    """Checks that a file's first rows have the columns, and that these hold text."""
    if not rows:
        raise UserError(
            f"{path} is not JSON lines, nor an array of objects: it begins with no JSON object"
        )
    columns = Columns(spec)
    for column in columns.checked:
        if not any(column in row for row in rows) and column not in (known := _names(rows)):
            raise missing_column(path, column, innermost(known), spec)
    wanted = {str, int, bool, float} if columns.unit is DocumentKind.PAIR else {str}
    for column in columns.names:
        kinds = {type(nested(row, column)) for row in rows} - {type(None)}
        if kinds and not kinds & wanted:
            names = ", ".join(sorted(_KINDS[kind] for kind in kinds))
            raise not_text(path, column, names, _names(rows))


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the sorted names of the rows' columns, nested ones included."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).extend([value] if isinstance(value, dict) else [])
    inner = ([f"{name}.{each}" for each in _names(values)] for name, values in found.items())
    return sorted([*found, *itertools.chain.from_iterable(inner)])


def _of_values(spec: CorpusSpec, file: str, found: Iterable[bytes]) -> Iterator[Document]:
    columns, id_column = Columns(spec), spec.id or "id"
    for offset, value in json_values.split(found, lines.LONGEST_BYTES):
        yield _document(columns, id_column, value, f"{file}:{offset}")


def _of_lines(spec: CorpusSpec, file: str, found: lines.Lines) -> Iterator[Document]:
    columns, id_column = Columns(spec), spec.id or "id"
    for offset, data in found:
        block = lines.whole(data)
        if block is None:
            place = f"{file}:{offset}"
            yield place, None, lines.TOO_LONG, 0, place
            continue
        for line in block.split(b"\n"):
            if line.strip():
                yield _document(columns, id_column, line, f"{file}:{offset}")
            offset += len(line) + 1


def _document(columns: Columns, id_column: str, line: bytes, place: str) -> Document:
    broken = False
    try:
        text = line.decode()
    except UnicodeDecodeError:
        # Invalid bytes lie inside strings, so the id of most such lines can still be parsed.
        text, broken = line.decode(errors="replace"), True
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return place, None, INVALID if broken else "invalid JSON", 0, place
    if not isinstance(value, dict):
        return place, None, INVALID if broken else MISSING, 0, place
    name = value.get(id_column)
    if name is None and "." in id_column:
        name = nested(value, id_column)
    name = place if name is None else str(name).encode(errors="replace").decode()
    content, problem = (None, INVALID) if broken else columns.content(value)
    return name, content, problem, 0, place
