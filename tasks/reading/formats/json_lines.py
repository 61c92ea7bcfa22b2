"""JSON lines: one object a line, whose members are the columns."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from tasks.reading import batches, long_documents, long_json, opening, pairs
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import lines
from tasks.reading.formats.format import missing_column
from tasks.reading.long_documents import Document
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

_LONGEST_LINE_BYTES = 1 << 30
# A long line of pairs becomes Python objects, unlike one of text.
_LONGEST_PAIR_BYTES = 64 << 20
# The beginning of each file is checked for its columns: one small request each.
_PEEK_BYTES = 256 << 10
_PEEK_LINES = 100
_KINDS = {
    bool: "true or false", int: "number", float: "number", list: "array", dict: "object",
}  # fmt: skip
_BLANK = re.compile(rb"[\t-\r ]*+")


class JsonLines:
    """The format `json`; a document without an id gets the offset of its first byte."""

    has_columns = True
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        if file.bytes:
            _check_columns(spec, file)
        return lines.ranges(file)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        longest = corpus.max_document_bytes
        with lines.open_part(part) as found:
            if corpus.spec.unit is Unit.PAIR:
                yield from pairs.collect(
                    _pairs(corpus.spec, part.file.name, found), batch_documents
                )
                return
            documents = _documents(corpus.spec, part.file.name, found, longest)
            yield from batches.collect(documents, batch_documents, longest)


def _check_columns(spec: CorpusSpec, file: SourceFile) -> None:
    """Checks the first lines of a file for its columns, and that its text is text.

    Raises:
      UserError: they are not JSON objects, lack a column, or hold no text.
    """
    with (
        opening.open_file(file, _PEEK_BYTES) as handle,
        opening.decompress(handle, file.path) as stream,
    ):
        head = stream.read(_PEEK_BYTES)
        cut_short = len(head) == _PEEK_BYTES or stream.read(1)
    found = head.removeprefix(lines.MARK).split(b"\n")
    found = [line for line in (found[:-1] if cut_short else found) if line.strip()]
    if not found:  # or one long line, which is checked when it is read
        return
    rows = []
    for line in found[:_PEEK_LINES]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            rows += [value] if isinstance(value, dict) else []
    if not rows:
        raise UserError(f"{file.path} is not JSON lines: its first lines hold no JSON object")
    texts = pairs.columns(spec)
    for column in filter(None, (*texts, spec.id)):
        if not any(column in row for row in rows):
            raise missing_column(file.path, column, sorted(set().union(*rows)), spec)
    wanted = {str, int, bool} if spec.unit is Unit.PAIR else {str}
    for column in texts:
        kinds = {type(row[column]) for row in rows if column in row} - {type(None)}
        if kinds and not kinds & wanted:
            names = ", ".join(sorted(_KINDS[kind] for kind in kinds))
            raise UserError(f"{file.path}: column {column} is {names}, not text")


def _documents(spec: CorpusSpec, file: str, found: lines.Lines, longest: int) -> Iterator[Document]:
    for offset, data in found:
        if isinstance(data, lines.LongLine):
            yield from _long_document(spec, data, f"{file}:{offset}", longest)
            continue
        for line in data.split(b"\n"):
            if line.strip():
                yield _document(spec, line, f"{file}:{offset}")
            offset += len(line) + 1


def _document(spec: CorpusSpec, line: bytes, place: str) -> Document:
    name, text, problem = _parsed(spec, line, place)
    return name, text, problem, 0, place


def _pairs(spec: CorpusSpec, file: str, found: lines.Lines) -> Iterator[pairs.Pair]:
    for offset, data in found:
        if isinstance(data, lines.LongLine):
            yield from _long_pair(spec, data, f"{file}:{offset}")
            continue
        for line in data.split(b"\n"):
            if line.strip():
                yield _pair(spec, line, f"{file}:{offset}")
            offset += len(line) + 1


def _pair(spec: CorpusSpec, line: bytes, place: str) -> pairs.Pair:
    name, value, problem = _object(spec, line, place)
    if problem is not None:
        return name, None, None, problem, place
    return name, *pairs.render(spec, value), place


def _long_pair(spec: CorpusSpec, chunks: lines.LongLine, place: str) -> Iterator[pairs.Pair]:
    """Yields the pair of a long line, which is held whole; none if the line is blank."""
    line = bytearray()
    for chunk in chunks:
        if chunks.size <= _LONGEST_PAIR_BYTES:
            line += chunk
        else:
            line.clear()
    if chunks.size > _LONGEST_PAIR_BYTES:
        yield place, None, None, f"a line longer than {_LONGEST_PAIR_BYTES >> 20} MiB", place
    elif not _BLANK.fullmatch(line):
        yield _pair(spec, bytes(line), place)


def _object(spec: CorpusSpec, line: bytes, place: str) -> tuple[str, Any, str | None]:
    """Returns (id, object, problem) of a line."""
    broken = False
    try:
        text = line.decode()
    except UnicodeDecodeError:
        # Invalid bytes are inside strings, so the line can usually be parsed, and its id be kept.
        text, broken = line.decode(errors="replace"), True
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return place, None, "invalid UTF-8" if broken else "invalid JSON"
    if not isinstance(value, dict):
        return place, None, "invalid UTF-8" if broken else "missing column"
    name = _id(value.get(spec.id or "id"), place)
    return (name, None, "invalid UTF-8") if broken else (name, value, None)


def _parsed(spec: CorpusSpec, line: bytes, place: str) -> tuple[str, bytes | None, str | None]:
    """Returns (id, text, problem) of a line."""
    name, value, problem = _object(spec, line, place)
    if problem is not None:
        return name, None, problem
    if spec.column not in value:
        return name, None, "missing column"
    found = value[spec.column]
    if found is None:
        return name, None, "null"
    if not isinstance(found, str):
        return name, None, "not a string"
    try:
        return name, found.encode(), None
    except UnicodeEncodeError:  # JSON can hold half a surrogate pair, which is not a character
        return name, None, "invalid UTF-8"


def _id(value: Any, place: str) -> str:
    return place if value is None else str(value).encode(errors="replace").decode()


def _long_document(
    spec: CorpusSpec, chunks: lines.LongLine, place: str, longest: int
) -> Iterator[Document]:
    """Yields what `_document` returns, in parts, for a line too long to become Python objects."""
    line = bytearray()
    for chunk in chunks:
        if chunks.size <= _LONGEST_LINE_BYTES:
            line += chunk
        else:
            line.clear()
    id_column = spec.id or "id"
    if chunks.size > _LONGEST_LINE_BYTES:
        yield place, None, "longer than 1 GiB", 0, place
        return
    if _BLANK.fullmatch(line):
        return
    broken = not long_json.is_utf8(line)
    try:
        spans = long_json.find(line, {spec.column, id_column})
    except ValueError:
        yield place, None, "invalid UTF-8" if broken else "invalid JSON", 0, place
        return
    if spans is None:
        yield place, None, "invalid UTF-8" if broken else "missing column", 0, place
        return
    name = place
    if id_column in spans:
        value = json.loads(line[slice(*spans[id_column])].decode(errors="replace"))
        name = _id(value, place)
    if broken:
        yield name, None, "invalid UTF-8", 0, place
        return
    span = spans.get(spec.column)
    if span is None:
        yield name, None, "missing column", 0, place
    elif line[span[0]] != ord('"'):
        yield name, None, "null" if line[slice(*span)] == b"null" else "not a string", 0, place
    elif not long_json.is_text(line, span):
        yield name, None, "invalid UTF-8", 0, place
    else:
        yield from long_documents.parts(name, long_json.characters(line, span), longest, place)
