"""Reading documents out of files: lines (text, JSON) and Parquet, in batches of bounded size.

Readers never fail for one bad document; a batch says what is wrong with it (see `sources.read`).
"""

import bz2
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from tasks import files
from tasks.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.sources import CorpusSpec, Piece

Batches = Generator["pa.RecordBatch", None, None]
Document = tuple[str, str | None, str | None]  # id, text, problem

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

_BATCH_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20


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


def collect(documents: Iterable[Document], count: int) -> Batches:
    """Yields batches of at most `count` documents."""
    rows: list[Document] = []
    size = 0
    for document in documents:
        rows.append(document)
        size += len(document[1] or "")
        if len(rows) >= count or size >= _BATCH_BYTES:
            yield _batch(*zip(*rows, strict=True))
            rows, size = [], 0
    if rows:
        yield _batch(*zip(*rows, strict=True))


def _batch(ids: Any, texts: Any, problems: Any) -> "pa.RecordBatch":
    import pyarrow as pa

    if not isinstance(texts, pa.Array):
        texts = pa.array(texts, pa.large_string())
    arrays = [pa.array(ids, pa.string()), texts, pa.array(problems, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, ["id", "text", "problem"])


def read_lines(spec: "CorpusSpec", piece: "Piece") -> Iterator[Document]:
    """Yields the documents of a piece of a file of text or JSON lines."""
    with files.open_read(piece.path) as handle, decompress(handle, piece.path) as file:
        for offset, line in lines(file, piece.start, piece.stop):
            line = line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line
            if not line.strip():
                continue
            where = f"{piece.file}:{offset}"
            try:
                decoded = line.removesuffix(b"\r").decode()
            except UnicodeDecodeError:
                yield where, None, "invalid UTF-8"
                continue
            if piece.format == "json":
                yield _json_document(spec, decoded, where)
            else:
                yield where, decoded, None


def _json_document(spec: "CorpusSpec", line: str, where: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return where, None, "invalid JSON"
    if not isinstance(value, dict):
        return where, None, "missing column"
    given = value.get(spec.id or "id")
    name = where if given is None else str(given).encode(errors="replace").decode()
    if spec.column not in value:
        return name, None, "missing column"
    text = value[spec.column]
    if text is None:
        return name, None, "null"
    if not isinstance(text, str):
        return name, None, "not a string"
    try:
        text.encode()  # JSON can write half a surrogate pair, which is no character
    except UnicodeEncodeError:
        return name, None, "invalid UTF-8"
    return name, text, None


def lines(file: IO[bytes], start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line without its newline) of the lines that begin in [start, stop)."""
    position = start
    skipping = start > 0
    if skipping:  # from one byte earlier: the line that begins at `start` itself is ours
        position = start - 1
        file.seek(position)
    pending: list[bytes] = []
    while block := file.read(_BLOCK_BYTES):
        pending.append(block)
        if b"\n" not in block:
            continue
        *complete, rest = b"".join(pending).split(b"\n")
        pending = [rest]
        for line in complete:
            if stop is not None and position >= stop:
                return
            if not skipping:
                yield position, line
            skipping = False
            position += len(line) + 1
    last = b"".join(pending)
    if last and not skipping and (stop is None or position < stop):
        yield position, last


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


def open_parquet(handle: IO[bytes]) -> Any:
    """Returns the pyarrow.parquet.ParquetFile."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(handle)


def read_parquet(spec: "CorpusSpec", piece: "Piece", count: int) -> Batches:
    """Yields batches of at most `count` rows of a piece's row groups."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with files.open_read(piece.path) as handle:
        parquet = open_parquet(handle)
        id_column = spec.id or ("id" if "id" in parquet.schema_arrow.names else "")
        columns = list({spec.column: None, **({id_column: None} if id_column else {})})
        row = piece.first_row
        for group in range(piece.start, piece.stop or 0):
            for batch in parquet.iter_batches(count, [group], columns, use_threads=False):
                where = [f"{piece.file}:{row + i}" for i in range(batch.num_rows)]
                row += batch.num_rows
                ids = where
                if id_column:
                    given = batch.column(id_column).to_pylist()
                    ids = [w if g is None else str(g) for w, g in zip(where, given, strict=True)]
                texts = batch.column(spec.column)
                if pa.types.is_dictionary(texts.type):
                    texts = texts.dictionary_decode()
                texts = texts.cast(pa.large_binary())
                problems = pc.if_else(pc.is_null(texts), "null", pa.scalar(None, pa.string()))
                try:
                    texts = texts.cast(pa.large_string())  # checks that it is UTF-8
                except pa.ArrowInvalid:
                    texts, problems = _only_valid(texts.to_pylist())
                yield from _bounded(_batch(ids, texts, problems))


def _only_valid(raw: list[bytes | None]) -> tuple[Any, list[str | None]]:
    texts: list[str | None] = []
    problems: list[str | None] = []
    for value in raw:
        text = problem = None
        if value is None:
            problem = "null"
        else:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                problem = "invalid UTF-8"
        texts.append(text)
        problems.append(problem)
    return texts, problems


def _bounded(batch: "pa.RecordBatch") -> Iterator["pa.RecordBatch"]:
    """Halves a batch until its parts are small enough."""
    if batch.nbytes <= _BATCH_BYTES or batch.num_rows == 1:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from _bounded(batch.slice(0, half))
        yield from _bounded(batch.slice(half))
