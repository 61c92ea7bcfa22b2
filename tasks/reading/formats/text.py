"""Plain text: one document a line; blank lines are skipped."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tasks.reading import batches, long_documents
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.formats import lines
from tasks.reading.long_documents import Document

if TYPE_CHECKING:
    import pyarrow as pa


class Text:
    """The format `text`; a document's id is the offset of its first byte."""

    has_columns = False
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        return lines.ranges(file)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        longest = corpus.max_document_bytes
        with lines.open_part(part) as found:
            for offset, data in found:
                if isinstance(data, bytes):
                    yield from _batches(data, offset, part.file.name, batch_documents, longest)
                else:
                    chunks = _without_return(data)
                    parts = _parts(f"{part.file.name}:{offset}", chunks, longest)
                    yield from batches.collect(parts, batch_documents, longest)


def _without_return(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Drops a carriage return from the end of a line that comes in chunks."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        held = b"\r" if chunk.endswith(b"\r") else b""
        yield chunk.removesuffix(b"\r")


def _batches(data: bytes, offset: int, file: str, count: int, longest: int) -> Batches:
    """Yields the documents of whole lines, the first of which begins at `offset` of the file."""
    import numpy as np

    data = data if data.endswith(b"\n") else data + b"\n"
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    begin = 0
    for row in [*np.flatnonzero(ends - starts > longest).tolist(), len(starts)]:
        if begin < row:
            first, last = int(starts[begin]), int(ends[row - 1])
            some = data[first : last + 1]
            yield from batches.bounded(_short_lines(some, offset + first, file), count)
        if row < len(starts):
            line = data[starts[row] : ends[row]].removesuffix(b"\r")
            chunks = long_documents.chunked(line)
            parts = _parts(f"{file}:{offset + starts[row]}", chunks, longest)
            yield from batches.collect(parts, count, longest)
        begin = row + 1


def _parts(name: str, chunks: Iterable[bytes], longest: int) -> Iterator[Document]:
    """Yields the parts of a document as `long_documents.parts` does, without blank ones."""
    for document in long_documents.parts(name, chunks, longest, name):
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
    texts, problems = batches.as_text(texts.view(pa.large_binary()))
    ids = batches.places(file, offset + starts)
    return batches.batch(ids, texts, problems, ids).filter(pc.invert(blank))
