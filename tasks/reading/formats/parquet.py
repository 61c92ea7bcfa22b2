"""Parquet: one document per row."""

import bisect
import collections
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from tasks.reading.formats.format import PARTS_AHEAD
from tasks.storage import files, ranges
from tasks.storage.paths import local_path

if TYPE_CHECKING:
    import pyarrow as pa

# Process, corpus, most documents of a batch.
_Key = tuple[int, CorpusSpec, int]
# Path, etag, first row and end of a part.
_Name = tuple[str, str, int, int | None]

# Bytes to read ahead per column of a local file.
_COLUMN_BYTES = 1 << 20
_OPENERS = 4  # remote files that are opened at a time


class Parquet:
    """The format `parquet`; a document without an id gets its row number.

    Ranges are in rows. A part that begins inside a row group goes on with the decoder of a part
    before it that this process read last, or decodes the group's earlier rows to skip them.
    """

    options = COLUMN_OPTIONS
    ranges_are_rows = True
    reads_ahead = True

    def __init__(self) -> None:
        # At most one: a deque's methods are safe in threads.
        self._paused: collections.deque[_Reader] = collections.deque(maxlen=1)

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

    def read(
        self,
        corpus: Corpus,
        part: FilePart,
        batch_documents: int,
        upcoming: Sequence[FilePart] = (),
    ) -> Batches:
        reader = self._reader((os.getpid(), corpus.spec, batch_documents))
        try:
            decoder = reader.decoder(part, upcoming)
            for row, batch in decoder.until(part.stop or 0):
                first, last = max(part.start - row, 0), min((part.stop or 0) - row, batch.num_rows)
                if first < last:
                    ours = batch.slice(first, last - first)
                    yield from tables.documents(
                        corpus, part.file.name, ours, row + first, batch_documents
                    )
        except BaseException:
            reader.close()
            raise
        if reader.end(part):
            self._reader().close()  # another reader's
            self._paused.append(reader)
        else:
            reader.close()

    def _reader(self, key: "_Key | None" = None) -> "_Reader":
        """Returns the paused reader if it has this key, else closes it and returns a new one."""
        try:
            paused = self._paused.pop()
        except IndexError:
            return _Reader(key)
        if paused.key == key:
            return paused
        paused.close()
        return _Reader(key)


class _Reader:
    """Reads the parts of a corpus in turn, and fetches what is read next from remote files.

    Arrow decodes a row group from its beginning only, and one may hold a whole file. So the decoder
    is kept for a part that goes on in its row group.
    """

    def __init__(self, key: _Key | None):
        self.key = key
        self._decoder: _Decoder | None = None
        # Remote files are opened by threads; an error is raised when it is the file's turn.
        self._opened: dict[str, Future[_Source]] = {}  # by path
        self._expected: dict[_Name, int] = {}  # turns of parts
        self._turn = 0
        self._ahead, self._openers = ranges.Ahead(), ThreadPoolExecutor(_OPENERS)

    def decoder(self, part: FilePart, upcoming: Sequence[FilePart]) -> "_Decoder":
        """Returns a decoder for a part, and fetches PARTS_AHEAD of the upcoming ones."""
        parts = [part, *upcoming][: PARTS_AHEAD + 1]
        asked = {_name(each) for each in parts}
        self._expected = {key: turn for key, turn in self._expected.items() if key in asked}
        # A path may name another file by now, or one that was written in between. A remote one is
        # read with its etag.
        is_local = not (part.file.is_remote or isinstance(part.file, Member))
        state = opening.written(os.stat(local_path(part.file.path))) if is_local else ""
        decoder = self._decoder
        goes_on = (
            decoder
            and (decoder.source.file, decoder.source.state) == (part.file, state)
            and decoder.reaches(part.start)
        )
        if not goes_on:
            self._decoder = None
            self._keep({path for path, *_ in self._expected})
        if part.file.path not in self._opened:
            self._open(part.file, state)
        for number, each in enumerate(parts):
            if each.file.is_remote and _name(each) not in self._expected:
                if each.file.path not in self._opened:
                    self._open(each.file)
                self._expect(each, number == len(upcoming))
        turn = self._expected.pop(_name(part), 0)
        if goes_on and decoder:
            return decoder
        source = self._opened[part.file.path].result()
        if part.file.is_remote:
            self._ahead.forget(source.handle, turn)
        self._decoder = _Decoder(source, self.key, part.start)
        return self._decoder

    def _open(self, file: SourceFile, state: str = "") -> None:
        if file.is_remote:
            self._opened[file.path] = self._openers.submit(_Source, file, state, self.key)
        else:
            opened = self._opened[file.path] = Future[_Source]()
            opened.set_result(_Source(file, state, self.key))

    def _expect(self, part: FilePart, last: bool) -> None:
        """Fetches what a part is decoded from, once its file is open."""
        self._turn += 1
        turn = self._expected[_name(part)] = self._turn

        def expect(opened: Future[_Source]) -> None:
            if not opened.cancelled() and not opened.exception():
                source = opened.result()
                spans = source.spans(part.start, part.stop or 0)
                self._ahead.expect(source.handle, spans, turn, last)

        self._opened[part.file.path].add_done_callback(expect)

    def _keep(self, kept: Collection[str]) -> None:
        """Closes all files but those of these paths."""
        for path in self._opened.keys() - kept:
            opened = self._opened.pop(path)
            if not opened.cancel():
                opened.add_done_callback(_close)

    def end(self, part: FilePart) -> bool:
        """Ends a part; returns whether there are files or rows to go on with."""
        kept = {path for path, *_ in self._expected}
        # A member of an archive shares its position in the archive's copy.
        if self._decoder and (self._decoder.ended or isinstance(part.file, Member)):
            self._decoder = None
        if self._decoder:
            kept.add(part.file.path)
        self._keep(kept)
        return bool(kept)

    def close(self) -> None:
        self._decoder = None
        self._keep(())
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._ahead.close()


def _name(part: FilePart) -> _Name:
    return part.file.path, part.file.etag, part.start, part.stop


def _close(opened: "Future[_Source]") -> None:
    if not opened.exception():
        opened.result().handle.close()


class _Source:
    """An open file of a corpus; `state` tells a local one from others that its path may name."""

    def __init__(self, file: SourceFile, state: str, key: _Key | None):
        assert key
        self.file, self.state = file, state
        self.handle: Any = opening.open_file(file, ahead=0)
        try:
            self.parquet = _open(self.handle, file.path)
            self._wanted = tables.wanted(key[1], self.parquet.schema_arrow)
        except BaseException:
            self.handle.close()
            raise
        self.groups = list(map(self.parquet.metadata.row_group, range(self.parquet.num_row_groups)))
        self.ends = list(itertools.accumulate(group.num_rows for group in self.groups))
        self._expected = 0  # rows before this one

    def spans(self, start: int, stop: int) -> Iterator[ranges.Span]:
        """Returns what the rows of a part are decoded from, but for earlier parts' spans."""
        first = max(self._expected, max((end for end in self.ends if end <= start), default=0))
        self._expected = max(stop, first)
        begin = bisect.bisect_right(self.ends, first)
        numbers = range(begin, min(bisect.bisect_left(self.ends, stop) + 1, len(self.ends)))
        return ranges.spans(self._chunks(number, first, stop) for number in numbers)

    def _chunks(self, index: int, start: int, stop: int) -> Iterator[ranges.Span]:
        """Yields the bytes of a row group's columns that rows are decoded from, as Arrow reads."""
        group = self.groups[index]
        row, rows = self.ends[index] - group.num_rows, group.num_rows
        shares = [min(max(each - row, 0), rows) for each in (start, stop)]
        columns = map(group.column, range(group.num_columns)) if rows else ()
        for column in (each for each in columns if each.path_in_schema in self._wanted):
            # The dictionary, if there is one, comes first.
            begin = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            size = column.total_compressed_size
            reads = [-(-size * share // (rows * ranges.REQUEST_BYTES)) for share in shares]
            first, end = (min(size, each * ranges.REQUEST_BYTES) for each in reads)
            if first < end:
                yield begin + first, begin + end


class _Decoder:
    """Decodes a file's rows in order, from the row group of `start` on, and can be paused.

    Decoders of readers with the same `key` yield the same batches of a file.
    """

    def __init__(self, source: _Source, key: _Key | None, start: int):
        assert key
        self.source, self._ends = source, source.ends
        first = bisect.bisect_right(self._ends, start)
        self._batches = _decoded(source.parquet, key[1], self._ends, first, key[2])
        self._row = start  # of the next batch, or earlier in its row group
        self._current: tuple[int, Any] | None = None  # a batch that the next part begins in

    @property
    def ended(self) -> bool:
        return self._row >= max(self._ends, default=0)

    def reaches(self, row: int) -> bool:
        """Returns whether `row` is among the rows that are left of the current row group."""
        group = bisect.bisect_right(self._ends, self._row)
        return self._row <= row and group == bisect.bisect_right(self._ends, row)

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
