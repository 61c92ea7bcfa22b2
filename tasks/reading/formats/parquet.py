"""Parquet: one document per row."""

from collections.abc import Collection
from typing import IO, Any

from tasks.reading import batches, compression, opening
from tasks.reading.batches import Batches
from tasks.reading.columns import Columns
from tasks.reading.corpus import COLUMN_OPTIONS, Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import tables
from tasks.storage import files, store

# Bytes to read ahead per column of a local file.
_COLUMN_BYTES = 1 << 20


class Parquet:
    """The format `parquet`; a document without an id gets its row number.

    Ranges are in rows. A part that begins inside a row group decodes the group's earlier rows to
    skip them.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = True

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        with opening.open_file(file, ahead=0) as handle:
            parquet = _open(handle, file.path)
            raw_ids = tables.check(spec, file.path, parquet.schema_arrow)
            found = []
            row = 0
            for index in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(index)
                if group.num_rows:
                    size = _column_bytes(group, Columns(spec).names)
                    found.append(FileRange(row, row + group.num_rows, size, raw_ids=raw_ids))
                row += group.num_rows
        return found

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        texts = Columns(corpus.spec).names
        with opening.open_file(part.file, ahead=0) as handle:
            parquet = _open(handle, part.file.path)
            wanted = tables.wanted(corpus.spec, parquet.schema_arrow)
            stop = part.stop or 0
            following = 0
            for index in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(index)
                row, following = following, following + group.num_rows
                if not group.num_rows or following <= part.start or row >= stop:
                    continue
                # Arrow decodes this many rows at once: about one batch if rows have similar sizes.
                average = _column_bytes(group, texts) / group.num_rows
                rows = int(min(batch_documents, max(1, batches.BATCH_BYTES / max(average, 1))))
                for batch in parquet.iter_batches(rows, [index], wanted, use_threads=False):
                    first, last = max(part.start - row, 0), min(stop - row, batch.num_rows)
                    if first < last:
                        ours = batch.slice(first, last - first)
                        yield from tables.documents(
                            corpus, part.file.name, ours, row + first, batch_documents
                        )
                    row += batch.num_rows
                    if row >= stop:
                        break


def _open(handle: IO[bytes], path: str) -> Any:
    """Opens a ParquetFile that reads a little of each column at a time, not whole row groups."""
    import pyarrow.parquet as pq

    ahead = store.REQUEST_BYTES if files.is_remote(path) else _COLUMN_BYTES
    try:
        return pq.ParquetFile(handle, pre_buffer=False, buffer_size=ahead)
    except (OSError, ValueError):
        compression.refuse_packed(handle, path)
        raise


def _column_bytes(group: Any, names: Collection[str]) -> int:
    """Returns the uncompressed size of a row group's columns, from its metadata."""
    columns = map(group.column, range(group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema in names)
