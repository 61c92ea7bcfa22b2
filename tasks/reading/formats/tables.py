"""Reads Arrow tables as documents, for Parquet and Arrow files."""

from typing import TYPE_CHECKING, Any

from tasks import arrow
from tasks.document_kind import DocumentKind
from tasks.reading import batches, long_documents
from tasks.reading.batches import Batches
from tasks.reading.columns import Columns, column_of
from tasks.reading.corpus import RULES_DECODED, Corpus, CorpusSpec
from tasks.reading.formats.format import innermost, missing_column, not_text

if TYPE_CHECKING:
    import pyarrow as pa


def wanted(spec: CorpusSpec, schema: "pa.Schema") -> list[str]:
    """Returns the distinct columns to read, of which some may be nested."""
    return list(dict.fromkeys((*Columns(spec).names, *filter(None, [_id_column(spec, schema)]))))


def _id_column(spec: CorpusSpec, schema: "pa.Schema") -> str:
    return spec.id or ("id" if "id" in schema.names else "")


def check(spec: CorpusSpec, path: str, schema: "pa.Schema") -> bool:
    """Returns whether the ids are bytes.

    Raises UserError if a file lacks the corpus's columns or they do not hold text.
    """
    import pyarrow as pa

    columns = Columns(spec)
    known = _types(schema)
    for column in columns.checked:
        if column not in known:
            raise missing_column(path, column, innermost(known), spec)
    for column in columns.names:
        kind = _value_type(known[column])
        types = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating)
        plain = any(test(kind) for test in types)
        if not (_is_text(kind) or (columns.unit is DocumentKind.PAIR and plain)):
            raise not_text(path, column, str(kind), known)
    id_column = _id_column(spec, schema)
    return bool(id_column) and _is_raw(_value_type(known[id_column]))


def _value_type(kind: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _types(schema: "pa.Schema") -> dict[str, "pa.DataType"]:
    """Returns the types of all columns, nested ones included."""
    import pyarrow as pa

    found = {field.name: field.type for field in schema}

    def add(kind: pa.DataType, name: str) -> None:
        for field in kind if pa.types.is_struct(kind) else ():
            found.setdefault(f"{name}.{field.name}", field.type)
            add(field.type, f"{name}.{field.name}")

    for field in schema:
        add(field.type, field.name)
    return found


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    types = pa.types
    text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    return _is_raw(kind) or any(test(kind) for test in text)


def _is_raw(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    types = pa.types
    raw = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in raw)


def documents(
    corpus: Corpus, file: str, rows: "pa.RecordBatch", first_row: int, count: int
) -> Batches:
    """Yields the documents of rows with the `wanted` columns, at most `count` per batch.

    `first_row` is the first row's number in the file.
    """
    import numpy as np

    places = batches.places(file, np.arange(first_row, first_row + rows.num_rows))
    decoded = corpus.record["rules"] >= RULES_DECODED
    ids = _ids(rows, _id_column(corpus.spec, rows.schema), places, decoded)
    columns = Columns(corpus.spec)
    texts, problems = columns.contents(rows)
    found = batches.batch(ids, texts, problems, places)
    if columns.unit is DocumentKind.PAIR:
        yield from batches.bounded(found, count, columns.unit)
    else:
        yield from _split_long(found, count, corpus.max_document_bytes)


def _ids(
    batch: "pa.RecordBatch", column: str, places: "pa.StringArray", decoded: bool
) -> "pa.StringArray":
    import pyarrow as pa
    import pyarrow.compute as pc

    if not column:
        return places
    given = column_of(batch, column)
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    kind = given.type
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        ids = given.cast(pa.string())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        raw = given.cast(pa.large_binary())
        try:
            ids = raw.cast(pa.large_string()).cast(pa.string())  # fails unless it is UTF-8
        except pa.ArrowInvalid:
            values = [value and value.decode(errors="replace") for value in raw.to_pylist()]
            ids = pa.array(values, pa.string())
    else:
        text = _decoded if decoded else str
        values = [None if value is None else text(value) for value in given.to_pylist()]
        ids = pa.array(values, pa.string())
    return pc.coalesce(ids, places) if ids.null_count else ids


def _decoded(value: Any) -> str:
    """Returns bytes of UTF-8 as text; other values, as Python writes them."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        return str(value)


def _split_long(batch: "pa.RecordBatch", count: int, longest: int) -> Batches:
    """Divides a batch into bounded batches; splits texts of more than `longest` bytes."""
    import numpy as np

    ids, texts, places = (batch.column(name) for name in ("id", "text", "place"))
    bounds, data = arrow.bounds(texts), texts.buffers()[2]  # for views: texts[row] would copy
    begin = 0
    for row in [*np.flatnonzero(arrow.sizes(texts) > longest).tolist(), len(texts)]:
        yield from batches.bounded(batch.slice(begin, row - begin), count)
        if row < len(texts):
            chunks = long_documents.chunked(memoryview(data)[bounds[row] : bounds[row + 1]])
            parts = long_documents.parts(ids[row].as_py(), chunks, longest, places[row].as_py())
            yield from batches.collect(parts, count, longest)
        begin = row + 1
