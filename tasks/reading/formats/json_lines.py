"""JSON lines: one object per line; its members are the columns."""

import contextlib
import json
from collections.abc import Iterator

from tasks.reading import batches
from tasks.reading.batches import Batches
from tasks.reading.columns import INVALID, MISSING, Columns
from tasks.reading.corpus import COLUMN_OPTIONS, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import lines
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

_PEEK_LINES = 100
_KINDS = {
    bool: "true or false", int: "number", float: "number", list: "array", dict: "object",
}  # fmt: skip


class JsonLines:
    """The format `json`; a document without an id gets the offset of its first byte."""

    options = COLUMN_OPTIONS
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if file.bytes:
            _check_columns(spec, file)
        return lines.ranges(file)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        with lines.open_part(part) as found:
            documents = _documents(corpus.spec, part.file.name, found)
            yield from batches.collect(
                documents, batch_documents, corpus.max_document_bytes, corpus.spec.unit
            )


def _check_columns(spec: CorpusSpec, file: SourceFile) -> None:
    """Checks that a file's first lines have the columns, and that these hold text."""
    head, is_all = lines.peek(file)
    found = head.removeprefix(lines.MARK).split(b"\n")
    found = [line for line in (found if is_all else found[:-1]) if line.strip()]
    if not found:  # or one long line, checked when it is read
        return
    rows = []
    for line in found[:_PEEK_LINES]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            rows += [value] if isinstance(value, dict) else []
    if not rows:
        raise UserError(f"{file.path} is not JSON lines: its first lines contain no JSON object")
    columns = Columns(spec)
    for column in columns.checked:
        if not any(column in row for row in rows):
            raise missing_column(file.path, column, sorted(set().union(*rows)), spec)
    wanted = {str, int, bool} if columns.unit is Unit.PAIR else {str}
    for column in columns.names:
        kinds = {type(row[column]) for row in rows if column in row} - {type(None)}
        if kinds and not kinds & wanted:
            names = ", ".join(sorted(_KINDS[kind] for kind in kinds))
            raise UserError(f"{file.path}: column {column} is {names}, not text")


def _documents(spec: CorpusSpec, file: str, found: lines.Lines) -> Iterator[Document]:
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
    name = place if name is None else str(name).encode(errors="replace").decode()
    content, problem = (None, INVALID) if broken else columns.content(value)
    return name, content, problem, 0, place
