"""Parquet: one document a row."""

from collections.abc import Collection
from typing import IO, TYPE_CHECKING, Any

from tasks.reading import batches, long_documents, opening, pairs
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats.format import missing_column
from tasks.storage import files
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

# Read ahead of each column of a local file.
_COLUMN_BYTES = 1 << 20


class Parquet:
    """The format `parquet`; a document without an id gets the number of its row.

    Ranges are in rows. A part that begins inside a row group decodes the group's earlier rows to
    skip them.
    """

    has_columns = True
    ranges_are_rows = True

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        with opening.open_file(file, ahead=0) as handle:
            parquet = _open(handle, file.path)
            _check_columns(spec, file.path, parquet.schema_arrow)
            found = []
            row = 0
            for index in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(index)
                if group.num_rows:
                    size = _column_bytes(group, pairs.columns(spec))
                    found.append(FileRange(row, row + group.num_rows, size))
                row += group.num_rows
        return found

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        import numpy as np

        spec, longest = corpus.spec, corpus.max_document_bytes
        with opening.open_file(part.file, ahead=0) as handle:
            parquet = _open(handle, part.file.path)
            id_column = spec.id or ("id" if "id" in parquet.schema_arrow.names else "")
            texts = pairs.columns(spec)
            columns = list(dict.fromkeys((*texts, *([id_column] if id_column else []))))
            stop = part.stop or 0
            following = 0
            for index in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(index)
                row, following = following, following + group.num_rows
                if not group.num_rows or following <= part.start or row >= stop:
                    continue
                # The rows of one batch if they are alike: Arrow decodes all of them at once.
                average = _column_bytes(group, texts) / group.num_rows
                rows = int(min(batch_documents, max(1, batches.BATCH_BYTES / max(average, 1))))
                for batch in parquet.iter_batches(rows, [index], columns, use_threads=False):
                    first, last = max(part.start - row, 0), min(stop - row, batch.num_rows)
                    if first < last:
                        ours = batch.slice(first, last - first)
                        numbers = np.arange(row + first, row + last)
                        places = batches.places(part.file.name, numbers)
                        ids = _ids(ours, id_column, places)
                        if spec.is_pairs:
                            of_texts = {name: ours.column(name) for name in texts}
                            sides = pairs.rendered(spec, of_texts)
                            found = pairs.batch_of(ids, sides, places)
                            yield from batches.bounded(found, batch_documents, pairs.SIDES)
                        else:
                            column = ours.column(spec.column)
                            yield from _batches(ids, column, places, batch_documents, longest)
                    row += batch.num_rows
                    if row >= stop:
                        break


def _open(handle: IO[bytes], path: str) -> Any:
    """Returns the pyarrow.parquet.ParquetFile of an unbuffered handle.

    It reads a little of each column at a time, not the whole row group.
    """
    import pyarrow.parquet as pq

    ahead = opening.REQUEST_BYTES if files.is_remote(path) else _COLUMN_BYTES
    return pq.ParquetFile(handle, pre_buffer=False, buffer_size=ahead)


def _check_columns(spec: CorpusSpec, path: str, schema: "pa.Schema") -> None:
    import pyarrow as pa

    texts = pairs.columns(spec)
    for column in filter(None, (*texts, spec.id)):
        if column not in schema.names:
            raise missing_column(path, column, schema.names)
    for column in texts:
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        if not (_is_text(kind) or (spec.is_pairs and plain)):
            raise UserError(f"{path}: column {column} is {kind}, not text")


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    types = pa.types
    text = (types.is_string, types.is_large_string, types.is_string_view)
    raw = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in (*text, *raw, types.is_null))


def _column_bytes(group: Any, names: Collection[str]) -> int:
    """Returns the uncompressed size of columns of a row group, from its metadata."""
    columns = map(group.column, range(group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema in names)


def _ids(batch: "pa.RecordBatch", column: str, places: "pa.StringArray") -> "pa.StringArray":
    """Returns the ids of rows; nulls get the places of their rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    given = batch.column(column) if column else pa.nulls(batch.num_rows, pa.string())
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    kind = given.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        ids = given.cast(pa.large_binary())
        try:
            ids = ids.cast(pa.large_string())  # checks that it is UTF-8
        except pa.ArrowInvalid:
            values = [value and value.decode(errors="replace") for value in ids.to_pylist()]
            ids = pa.array(values, pa.string())
        ids = ids.cast(pa.string())
    elif pa.types.is_integer(kind) or pa.types.is_null(kind):
        ids = given.cast(pa.string())
    else:
        values = given.to_pylist()
        ids = pa.array([None if value is None else str(value) for value in values], pa.string())
    return pc.coalesce(ids, places) if ids.null_count else ids


def _batches(
    ids: "pa.Array", texts: "pa.Array", places: "pa.StringArray", count: int, longest: int
) -> Batches:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts, problems = batches.as_text(texts.cast(pa.large_binary()))
    batch = batches.batch(ids, texts, problems, places)
    long = pc.fill_null(pc.greater(pc.binary_length(texts), longest), False)
    _, offsets, data = texts.buffers()  # a view of a value; texts[row] would copy it
    begin = 0
    for row in [*np.flatnonzero(long.to_numpy(zero_copy_only=False)).tolist(), len(texts)]:
        yield from batches.bounded(batch.slice(begin, row - begin), count)
        if row < len(texts):
            first, last = np.frombuffer(offsets, np.int64)[texts.offset + row :][:2]
            chunks = long_documents.chunked(memoryview(data)[first:last])
            parts = long_documents.parts(ids[row].as_py(), chunks, longest, places[row].as_py())
            yield from batches.collect(parts, count, longest)
        begin = row + 1
