"""Parquet: one document per row."""

import bisect
import collections
import itertools
import os
from collections.abc import Collection, Iterator
from typing import IO, TYPE_CHECKING, Any

from tasks.reading import batches, compression, opening
from tasks.reading.batches import Batches
from tasks.reading.columns import Columns
from tasks.reading.corpus import (
    COLUMN_OPTIONS,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    Member,
    SourceFile,
)
from tasks.reading.formats import tables
from tasks.storage import files, ranges
from tasks.storage.paths import local_path

if TYPE_CHECKING:
    import pyarrow as pa

_Key = tuple[int, SourceFile, str, CorpusSpec, int]

# Bytes to read ahead per column of a local file.
_COLUMN_BYTES = 1 << 20


class Parquet:
    """The format `parquet`; a document without an id gets its row number.

    Ranges are in rows. A part that begins inside a row group goes on with the decoder of a part
    before it that this process read last, or decodes the group's earlier rows to skip them.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = True

    def __init__(self) -> None:
        # At most one: a deque's methods are safe in threads.
        self._paused: collections.deque[_Decoder] = collections.deque(maxlen=1)

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
        decoder = self._decoder(corpus, part, batch_documents)
        try:
            decoder.expect(part.start, part.stop or 0)
            for row, batch in decoder.until(part.stop or 0):
                first, last = max(part.start - row, 0), min((part.stop or 0) - row, batch.num_rows)
                if first < last:
                    ours = batch.slice(first, last - first)
                    yield from tables.documents(
                        corpus, part.file.name, ours, row + first, batch_documents
                    )
        except BaseException:
            decoder.handle.close()
            raise
        # A member of an archive shares its position in the archive's copy.
        if decoder.ended or isinstance(part.file, Member):
            decoder.handle.close()
        else:
            self._take()  # closes another reader's decoder
            self._paused.append(decoder)

    def _decoder(self, corpus: Corpus, part: FilePart, batch_documents: int) -> "_Decoder":
        """Returns the decoder of an earlier part, if this part follows in its row group."""
        file = part.file
        # Processes that were forked share the position in an open file, and a path may name another
        # file by now, or one that was written in between. A remote one is read with its etag.
        is_local = not (file.is_remote or isinstance(file, Member))
        state = opening.written(os.stat(local_path(file.path))) if is_local else ""
        key = os.getpid(), file, state, corpus.spec, batch_documents
        if paused := self._take(key, part.start):
            return paused
        handle = opening.open_file(file, ahead=0)
        try:
            return _Decoder(key, handle, _open(handle, file.path), part.start)
        except BaseException:
            handle.close()
            raise

    def _take(self, key: "_Key | None" = None, row: int = 0) -> "_Decoder | None":
        """Returns the paused decoder if it leads to `row` of `key`'s file; closes another one."""
        try:
            paused = self._paused.pop()
        except IndexError:
            return None
        if paused.key == key and paused.reaches(row):
            return paused
        paused.handle.close()
        return None


class _Decoder:
    """Decodes a file's rows in order, from the row group of `start` on, and can be paused.

    Arrow decodes a row group from its beginning only, and one may hold a whole file. Decoders with
    the same `key` (process, file, when it was written, corpus, most documents of a batch) yield the
    same batches.
    """

    def __init__(self, key: _Key, handle: IO[bytes], parquet: Any, start: int):
        *_, spec, documents = key
        self.key, self.handle = key, handle
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        self._ends = list(itertools.accumulate(group.num_rows for group in groups))
        first = bisect.bisect_right(self._ends, start)
        self._batches = _decoded(parquet, spec, self._ends, first, documents)
        self._parquet, self._wanted = parquet, tables.wanted(spec, parquet.schema_arrow)
        # Rows before this one are expected; number of parts that were read.
        self._expected, self._parts = max((end for end in self._ends if end <= start), default=0), 0
        self._row = start  # of the next batch, or earlier in its row group
        self._current: tuple[int, Any] | None = None  # a batch that the next part begins in

    @property
    def ended(self) -> bool:
        return self._row >= max(self._ends, default=0)

    def reaches(self, row: int) -> bool:
        """Returns whether `row` is among the rows that are left of the current row group."""
        group = bisect.bisect_right(self._ends, self._row)
        return self._row <= row and group == bisect.bisect_right(self._ends, row)

    def expect(self, start: int, stop: int) -> None:
        """Lets a remote file fetch what the rows of a part are decoded from.

        A decoder that went on from an earlier part probably goes on to the next ones, too: then it
        fetches more, in few large requests.
        """
        if not isinstance(self.handle, ranges.Ranges):
            return
        known, rows = self._expected, max(self._ends, default=0)
        if self._parts:
            ahead = rows * ranges.CONNECTIONS * ranges.SPAN_BYTES // max(self._bytes(), 1)
            stop = known if known > stop + ahead // 2 else min(stop + ahead, rows)
        self._parts += 1
        self._expected = max(stop, known)
        first = bisect.bisect_right(self._ends, known)
        groups = range(first, min(bisect.bisect_left(self._ends, stop) + 1, len(self._ends)))
        self.handle.expect(ranges.spans(self._chunks(group, known, stop) for group in groups))

    def _bytes(self) -> int:
        groups = map(self._parquet.metadata.row_group, range(len(self._ends)))
        return sum(
            column.total_compressed_size for each in groups for column in self._columns(each)
        )

    def _columns(self, group: Any) -> list[Any]:
        columns = map(group.column, range(group.num_columns))
        return [column for column in columns if column.path_in_schema in self._wanted]

    def _chunks(self, index: int, start: int, stop: int) -> Iterator[ranges.Span]:
        """Yields the bytes of a row group's columns that rows are decoded from, as Arrow reads."""
        group = self._parquet.metadata.row_group(index)
        row, rows = self._ends[index] - group.num_rows, group.num_rows
        shares = [min(max(each - row, 0), rows) for each in (start, stop)]
        for column in self._columns(group) if rows else ():
            # The dictionary, if there is one, comes first.
            begin = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            size = column.total_compressed_size
            reads = [-(-size * share // (rows * ranges.REQUEST_BYTES)) for share in shares]
            first, end = (min(size, each * ranges.REQUEST_BYTES) for each in reads)
            yield begin + first, begin + end

    def until(self, stop: int) -> "Iterator[tuple[int, pa.RecordBatch]]":
        """Yields batches up to the one with row stop - 1, each after its first row's number."""
        while self._row < stop and (current := self._current or next(self._batches, None)):
            yield current
            row, batch = current
            if row + batch.num_rows > stop:
                self._row, self._current = row, current
                return
            self._row, self._current = row + batch.num_rows, None


def _decoded(
    parquet: Any, spec: CorpusSpec, ends: list[int], first: int, documents: int
) -> "Iterator[tuple[int, pa.RecordBatch]]":
    """Yields the batches of row groups from `first` on, each after its first row's number."""
    texts, wanted = Columns(spec).names, tables.wanted(spec, parquet.schema_arrow)
    for index in range(first, len(ends)):
        group = parquet.metadata.row_group(index)
        row = ends[index] - group.num_rows
        if not group.num_rows:
            continue
        # Arrow decodes this many rows at once: about one batch if rows have similar sizes.
        average = _column_bytes(group, texts) / group.num_rows
        rows = int(min(documents, max(1, batches.BATCH_BYTES / max(average, 1))))
        for batch in parquet.iter_batches(rows, [index], wanted, use_threads=False):
            yield row, batch
            row += batch.num_rows


def _open(handle: IO[bytes], path: str) -> Any:
    """Opens a ParquetFile that reads a little of each column at a time, not whole row groups."""
    import pyarrow.parquet as pq

    ahead = ranges.REQUEST_BYTES if files.is_remote(path) else _COLUMN_BYTES
    try:
        return pq.ParquetFile(handle, pre_buffer=False, buffer_size=ahead)
    except (OSError, ValueError):
        compression.refuse_packed(handle, path)
        raise


def _column_bytes(group: Any, names: Collection[str]) -> int:
    """Returns the uncompressed size of a row group's columns, from its metadata."""
    columns = map(group.column, range(group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema in names)
