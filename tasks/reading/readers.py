"""Reading documents out of files: lines (text, JSON) and Parquet, in batches of bounded size.

Readers never fail for one bad document; a batch says what is wrong with it (see `sources.read`).

Memory is bounded whatever the input. A line of text is never held: what is longer than a document
may be is split as it streams, each part being checked by itself. A line of JSON is held as bytes
only, up to 1 GiB; a value of Parquet is one buffer of Arrow.

A document of more than `longest` bytes of UTF-8 is split: as long as more than that is left, a part
ends at the last white space (any of Unicode's) that leaves it at most `longest` bytes, and that one
character is dropped; where there is none, it ends between two characters.
"""

import bz2
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from tasks.reading import long_json
from tasks.storage import files, remote
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from tasks.reading.sources import Corpus, CorpusSpec, Piece

Batches = Generator["pa.RecordBatch", None, None]
Text = str | bytes | None
# (id, UTF-8 or str, problem, part): see `sources.read`.
Document = tuple[str, Text, str | None, int]

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

_BATCH_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
# Longer lines are read piecemeal: text is split, and JSON is searched instead of parsed.
_LONG_LINE_BYTES = 4 << 20
_LONGEST_JSON_LINE_BYTES = 1 << 30
# What one request of a file elsewhere brings.
_REQUEST_BYTES = 8 << 20
# Read ahead of each column of a local Parquet file.
_COLUMN_BYTES = 1 << 20

# Those characters for which str.isspace() holds, as UTF-8, the last of them as group 1.
_LAST_SPACE = re.compile(
    rb"(?s).+([\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80"
    rb"|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
)
_MARK = b"\xef\xbb\xbf"
_BLANK = re.compile(rb"[\t-\r ]*+")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what a broken file makes readers raise into one line that names it."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path} cannot be read: {reason} (is it truncated, or of another format?)"
        ) from error


def open_file(path: str, size: int, etag: str, ahead: int = _REQUEST_BYTES) -> IO[bytes]:
    """Opens a file of a corpus, here or elsewhere, for reading and seeking.

    Args:
      path: a path or URL.
      size: the bytes that it had when the corpus was listed.
      etag: its etag then, or "" where none was said.
      ahead: bytes that one request for a file elsewhere brings at least; 0: what is asked for.

    Raises:
      UserError: it has changed, or (from reading too) it cannot be had for minutes.
      OSError: it cannot be opened.
    """
    if not files.is_remote(path):
        check_unchanged(path, size, etag)
        return files.open_read(path)
    if path.startswith("hf://"):
        from tasks.reading import hub

        fetch = hub.fetch_from_hub(path, size, etag)
    else:
        fetch = files.fetch_from_store(path, size, etag)
    raw = remote.File(path, size, fetch)
    return io.BufferedReader(raw, ahead) if ahead else cast(IO[bytes], raw)


def check_unchanged(path: str, size: int, written: str) -> None:
    """Holds a file of this machine against what was listed; an empty `written` is unknown.

    Raises:
      UserError: it is another one now.
      FileNotFoundError: it is gone.
    """
    state = os.stat(files.local_path(path))
    remote.check(path, (size, ""), (state.st_size, ""))
    if written and written != files.etag({"mtime": state.st_mtime}):
        raise UserError(
            f"{path} was written again since the corpus was listed: run the same command again"
        )


# --- batches


def collect(documents: Iterable[Document], count: int, longest: int) -> Batches:
    """Yields batches of at most `count` documents, none of more than `longest` bytes."""
    rows: list[Document] = []
    size = 0
    for document in _split_long(documents, longest):
        taken = len(document[1] or "")
        if rows and (len(rows) >= count or size + taken > _BATCH_BYTES):
            yield _batch_of(rows)
            rows, size = [], 0
        rows.append(document)
        size += taken
    if rows:
        yield _batch_of(rows)


def _split_long(documents: Iterable[Document], longest: int) -> Iterator[Document]:
    for document in documents:
        name, text, _, part = document
        # No character takes more than four bytes.
        if isinstance(text, str) and 4 * len(text) > longest:
            text = text.encode()
        if isinstance(text, bytes) and len(text) > longest and not part:
            yield from _parts(name, _slices(text), longest)
        else:
            yield name, text, *document[2:]


def _batch_of(rows: list[Document]) -> "pa.RecordBatch":
    import pyarrow as pa

    ids, texts, problems, parts = map(list, zip(*rows, strict=True))
    return _batch(
        pa.array(ids, pa.string()),
        _text_array(texts),
        pa.array(problems, pa.string()),
        pa.array(parts, pa.int32()),
    )


def _text_array(texts: list[Text]) -> "pa.LargeStringArray":
    """The array of texts that are known to be UTF-8, without the slack of Arrow's own builder."""
    import numpy as np
    import pyarrow as pa

    data = [text.encode() if isinstance(text, str) else text or b"" for text in texts]
    bounds = np.cumsum([0, *map(len, data)], dtype=np.int64)
    valid = None
    if None in texts:
        present = np.array([text is not None for text in texts])
        valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    joined = data[0] if len(data) == 1 else b"".join(data)
    buffers = [valid, pa.py_buffer(bounds), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers)


def _batch(ids: "pa.Array", texts: "pa.Array", problems: "pa.Array", parts: Any = None) -> Any:
    import numpy as np
    import pyarrow as pa

    parts = pa.array(np.zeros(len(ids), np.int32)) if parts is None else parts
    columns = {"id": ids, "text": texts, "problem": problems, "part": parts}
    return pa.RecordBatch.from_pydict(columns)


def _bounded(batch: "pa.RecordBatch", count: int) -> Batches:
    """Slices a batch into ones of at most `count` documents and, unless one is larger, 4 MB."""
    import numpy as np
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.binary_length(batch.column("text")), 0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    begin = 0
    while begin < batch.num_rows:
        done = ends[begin - 1] if begin else 0
        fits = int(np.searchsorted(ends, done + _BATCH_BYTES, side="right"))
        end = min(max(fits, begin + 1), begin + count)
        yield batch.slice(begin, end - begin)
        begin = end


# --- long documents


def _slices(data: Any) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[i : i + _BLOCK_BYTES]) for i in range(0, len(view), _BLOCK_BYTES))


def _parts(name: str, chunks: Iterable[bytes], longest: int) -> Iterator[Document]:
    """Yields the document whose UTF-8 streams in, in parts if it is long; checks each part."""
    pieces = _cut(chunks, longest)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        yield _checked(name, first, 0)
        return
    yield _checked(name, first, 1)
    for number, piece in enumerate(itertools.chain([second], pieces), 2):
        yield _checked(f"{name}#part{number}", piece, number)


def _checked(name: str, piece: bytes, number: int) -> Document:
    if long_json.is_utf8(piece):
        return name, piece, None, number
    return name, None, "invalid UTF-8", number


def _cut(chunks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Yields the parts, at least one, of bytes that stream in; see the top of this file."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        # With one whole character more than a part may have: it may be the white space.
        while len(rest) >= longest + 4:
            yield _take(rest, longest)
    while len(rest) > longest:
        yield _take(rest, longest)
    yield bytes(rest)


def _take(rest: bytearray, longest: int) -> bytes:
    """Takes the first part from `rest`, which has more than `longest` bytes."""
    found = _LAST_SPACE.match(rest, 0, longest + 3)
    while found and found.start(1) > longest:
        found = _LAST_SPACE.match(rest, 0, found.start(1))
    if found:
        stop, begin = found.span(1)
    else:
        stop = longest
        while stop > longest - 3 and rest[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        begin = stop
    part = bytes(memoryview(rest)[:stop])
    del rest[:begin]
    return part


# --- lines


def read_lines(corpus: "Corpus", piece: "Piece", count: int) -> Batches:
    """Yields batches of the documents of a piece of a file of text or JSON lines."""
    longest = corpus.max_document_bytes
    with (
        open_file(piece.path, piece.file_bytes, piece.etag) as handle,
        decompress(handle, piece.path) as file,
    ):
        blocks = _lines(file, piece.start, piece.stop)
        if piece.format == "json":
            documents = _json_documents(corpus.spec, piece.file, blocks, longest)
            yield from collect(documents, count, longest)
            return
        for offset, data in blocks:
            if isinstance(data, bytes):
                yield from _text_batches(data, offset, piece.file, count, longest)
            else:
                parts = _text_parts(f"{piece.file}:{offset}", _without_return(data), longest)
                yield from collect(parts, count, longest)


class _LongLine:
    """A line in chunks, without its newline, to be read once and to its end."""

    def __init__(self, file: IO[bytes], head: bytes, mark: int):
        self._file, self._head = file, head[mark:]
        self.size = mark  # with its newline
        self.after = b""  # what was read of the following lines

    def __iter__(self) -> Iterator[bytes]:
        block, self._head = self._head, b""
        while block:
            chunk, newline, self.after = block.partition(b"\n")
            self.size += len(chunk) + len(newline)
            yield chunk
            if newline:
                return
            block = self._file.read(_BLOCK_BYTES)


def _lines(
    file: IO[bytes], start: int, stop: int | None
) -> Iterator[tuple[int, bytes | _LongLine]]:
    """Yields (offset, data) of the lines that begin in [start, stop).

    `data` are some whole lines, of which only the file's last may lack its newline, or a long one.
    A mark that the file is UTF-8 is left out.
    """
    position, pending = 0, b""
    if start:  # from one byte earlier: the line that begins at `start` itself is ours
        file.seek(start - 1)
        position = start - 1
        newline = b""
        while not newline:
            block = file.read(_BLOCK_BYTES)
            if not block or (stop is not None and position >= stop):
                return
            skipped, newline, pending = block.partition(b"\n")
            position += len(skipped) + len(newline)
    while stop is None or position < stop:
        block = file.read(_BLOCK_BYTES)
        pending += block
        marked = position == 0 and pending.startswith(_MARK)
        # The first line alone if it is marked: offsets in the file are not those in `data` then.
        cut = 1 + (pending.find(b"\n") if marked else pending.rfind(b"\n"))
        if cut:
            data, pending = pending[:cut], pending[cut:]
            if stop is not None and position + cut > stop:
                # Behind the first newline at stop - 1 or later begin lines of the next piece.
                data = data[: data.index(b"\n", max(0, stop - 1 - position)) + 1]
            yield position, data.removeprefix(_MARK) if marked else data
            position += cut
        elif not block:
            if pending:
                yield position, pending.removeprefix(_MARK) if marked else pending
            return
        elif len(pending) > _LONG_LINE_BYTES:
            line = _LongLine(file, pending, len(_MARK) if marked else 0)
            yield position, line
            position += line.size
            pending = line.after


def _without_return(chunks: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        held = b"\r" if chunk.endswith(b"\r") else b""
        yield chunk.removesuffix(b"\r")


def _text_batches(data: bytes, offset: int, file: str, count: int, longest: int) -> Batches:
    """Yields the documents of whole lines, the first of them at `offset` of the file."""
    import numpy as np

    data = data if data.endswith(b"\n") else data + b"\n"
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    begin = 0
    for row in [*np.flatnonzero(ends - starts > longest).tolist(), len(starts)]:
        if begin < row:
            first, last = int(starts[begin]), int(ends[row - 1])
            some = data[first : last + 1]
            yield from _bounded(_short_lines(some, offset + first, file), count)
        if row < len(starts):
            line = data[starts[row] : ends[row]].removesuffix(b"\r")
            parts = _text_parts(f"{file}:{offset + starts[row]}", _slices(line), longest)
            yield from collect(parts, count, longest)
        begin = row + 1


def _text_parts(name: str, chunks: Iterable[bytes], longest: int) -> Iterator[Document]:
    """As `_parts`, without those that are blank."""
    for document in _parts(name, chunks, longest):
        if document[1] is None or document[1].strip():
            yield document


def _short_lines(data: bytes, offset: int, file: str) -> "pa.RecordBatch":
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    characters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    returns = (characters[ends - 1] == ord("\r")) & (ends > starts)
    kept = data.replace(b"\r\n", b"\n") if returns.any() else data
    bounds = np.concatenate([[0], np.cumsum(ends - starts - returns)])
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(kept.translate(None, b"\n"))]
    texts = pa.Array.from_buffers(pa.large_string(), len(starts), buffers)
    blank = pc.or_(pc.ascii_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    texts, problems = _as_text(texts.view(pa.large_binary()))
    names = _names(file, offset + starts)
    return _batch(names, texts, problems).filter(pc.invert(blank))


def _names(file: str, numbers: "np.ndarray") -> "pa.StringArray":
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(f"{file}:", pa.array(numbers).cast(pa.string()), "")


def _json_documents(
    spec: "CorpusSpec", file: str, blocks: Iterable[tuple[int, bytes | _LongLine]], longest: int
) -> Iterator[Document]:
    for offset, data in blocks:
        if isinstance(data, _LongLine):
            yield from _long_json_document(spec, data, f"{file}:{offset}", longest)
            continue
        for line in data.split(b"\n"):
            if line.strip():
                yield _json_document(spec, line, f"{file}:{offset}")
            offset += len(line) + 1


def _json_document(spec: "CorpusSpec", line: bytes, where: str) -> Document:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return where, None, "invalid UTF-8", 0
    except (ValueError, RecursionError):
        return where, None, "invalid JSON", 0
    if not isinstance(value, dict):
        return where, None, "missing column", 0
    name = _json_name(value.get(spec.id or "id"), where)
    if spec.column not in value:
        return name, None, "missing column", 0
    text = value[spec.column]
    if text is None:
        return name, None, "null", 0
    if not isinstance(text, str):
        return name, None, "not a string", 0
    try:
        return name, text.encode(), None, 0
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, which is no character
        return name, None, "invalid UTF-8", 0


def _json_name(given: Any, where: str) -> str:
    return where if given is None else str(given).encode(errors="replace").decode()


def _long_json_document(
    spec: "CorpusSpec", chunks: _LongLine, where: str, longest: int
) -> Iterator[Document]:
    """As _json_document, of a line too long to become Python objects; in parts."""
    line = bytearray()
    for chunk in chunks:
        if chunks.size <= _LONGEST_JSON_LINE_BYTES:
            line += chunk
        else:
            line.clear()
    id_column = spec.id or "id"
    if chunks.size > _LONGEST_JSON_LINE_BYTES:
        yield where, None, "longer than 1 GiB", 0
        return
    if _BLANK.fullmatch(line):
        return
    if not long_json.is_utf8(line):
        yield where, None, "invalid UTF-8", 0
        return
    try:
        spans = long_json.find(line, {spec.column, id_column})
    except ValueError:
        yield where, None, "invalid JSON", 0
        return
    if spans is None:
        yield where, None, "missing column", 0
        return
    name = where
    if id_column in spans:
        name = _json_name(json.loads(line[slice(*spans[id_column])].decode()), where)
    span = spans.get(spec.column)
    if span is None:
        yield name, None, "missing column", 0
    elif line[span[0]] != ord('"'):
        yield name, None, "null" if line[slice(*span)] == b"null" else "not a string", 0
    elif not long_json.is_text(line, span):
        yield name, None, "invalid UTF-8", 0
    else:
        yield from _parts(name, long_json.characters(line, span), longest)


def decompress(handle: IO[bytes], path: str) -> Any:
    """The uncompressed stream of a file, by the end of its name."""
    if path.endswith(".gz"):
        return gzip.open(handle)
    if path.endswith(".bz2"):
        return bz2.open(handle)
    if path.endswith(".xz"):
        import lzma

        return lzma.open(handle)
    if path.endswith(".zst"):
        import pyarrow as pa

        # Unlike zstandard's own reader, this reads all frames and notices a missing end.
        return io.BufferedReader(pa.CompressedInputStream(handle, "zstd"))
    return handle


# --- Parquet


def open_parquet(handle: IO[bytes], path: str) -> Any:
    """Returns the pyarrow.parquet.ParquetFile of a handle that is not buffered.

    It reads a little of each column at a time, not the row group.
    """
    import pyarrow.parquet as pq

    ahead = _REQUEST_BYTES if files.is_remote(path) else _COLUMN_BYTES
    return pq.ParquetFile(handle, pre_buffer=False, buffer_size=ahead)


def column_bytes(group: Any, column: str) -> int:
    """Uncompressed size of a column of a row group, from its metadata."""
    columns = map(group.column, range(group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == column)


def read_parquet(corpus: "Corpus", piece: "Piece", count: int) -> Batches:
    """Yields batches of the rows of a piece, which may begin and end inside row groups."""
    spec, longest = corpus.spec, corpus.max_document_bytes
    with open_file(piece.path, piece.file_bytes, piece.etag, ahead=0) as handle:
        parquet = open_parquet(handle, piece.path)
        id_column = spec.id or ("id" if "id" in parquet.schema_arrow.names else "")
        columns = list({spec.column: None, **({id_column: None} if id_column else {})})
        stop = piece.stop or 0
        following = 0
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            row, following = following, following + group.num_rows
            if not group.num_rows or following <= piece.start or row >= stop:
                continue
            # As many rows as make a batch, if they are alike: Arrow makes all of them at once.
            average = column_bytes(group, spec.column) / group.num_rows
            rows = int(min(count, max(1, _BATCH_BYTES / max(average, 1))))
            for batch in parquet.iter_batches(rows, [index], columns, use_threads=False):
                first, last = max(piece.start - row, 0), min(stop - row, batch.num_rows)
                if first < last:
                    ours = batch.slice(first, last - first)
                    ids = _parquet_ids(ours, id_column, piece.file, row + first)
                    yield from _parquet_batches(ids, ours.column(spec.column), count, longest)
                row += batch.num_rows
                if row >= stop:
                    break


def _parquet_ids(batch: "pa.RecordBatch", column: str, file: str, row: int) -> "pa.StringArray":
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    given = batch.column(column) if column else pa.nulls(batch.num_rows, pa.string())
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    kind = given.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        named = given.cast(pa.large_binary())
        try:
            named = named.cast(pa.large_string())  # checks that it is UTF-8
        except pa.ArrowInvalid:
            values = [value and value.decode(errors="replace") for value in named.to_pylist()]
            named = pa.array(values, pa.string())
        named = named.cast(pa.string())
    elif pa.types.is_integer(kind) or pa.types.is_null(kind):
        named = given.cast(pa.string())
    else:
        values = given.to_pylist()
        named = pa.array([None if value is None else str(value) for value in values], pa.string())
    if not named.null_count:
        return named
    return pc.coalesce(named, _names(file, np.arange(row, row + batch.num_rows)))


def _parquet_batches(ids: "pa.Array", texts: "pa.Array", count: int, longest: int) -> Batches:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts, problems = _as_text(texts.cast(pa.large_binary()))
    batch = _batch(ids, texts, problems)
    long = pc.fill_null(pc.greater(pc.binary_length(texts), longest), False)
    _, offsets, data = texts.buffers()  # where a value lies: texts[row] would copy it
    begin = 0
    for row in [*np.flatnonzero(long.to_numpy(zero_copy_only=False)).tolist(), len(texts)]:
        yield from _bounded(batch.slice(begin, row - begin), count)
        if row < len(texts):
            first, last = np.frombuffer(offsets, np.int64)[texts.offset + row :][:2]
            parts = _parts(ids[row].as_py(), _slices(memoryview(data)[first:last]), longest)
            yield from collect(parts, count, longest)
        begin = row + 1


def _as_text(raw: "pa.LargeBinaryArray") -> tuple["pa.LargeStringArray", "pa.StringArray"]:
    """Returns texts, null where they are missing or not UTF-8, and what is wrong with each."""
    import pyarrow as pa
    import pyarrow.compute as pc

    nothing = pa.scalar(None, pa.string())
    problems = pc.if_else(pc.is_null(raw), "null", nothing)
    try:
        return raw.cast(pa.large_string()), problems  # checks that it is UTF-8
    except pa.ArrowInvalid:
        valid = pa.array(
            [not value.is_valid or long_json.is_utf8(value.as_buffer()) for value in raw]
        )
        texts = pc.if_else(valid, raw, pa.scalar(None, pa.large_binary()))
        return texts.cast(pa.large_string()), pc.if_else(valid, problems, "invalid UTF-8")
