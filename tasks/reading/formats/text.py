"""Plain text: a document is a line, a file, or a block of lines between blank lines."""

import collections
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from tasks.reading import batches, long_documents
from tasks.reading.batches import Batches
from tasks.reading.corpus import (
    BLOCK,
    FILE,
    LINE,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    SourceFile,
)
from tasks.reading.formats import lines
from tasks.reading.long_documents import Document

if TYPE_CHECKING:
    import pyarrow as pa


class Text:
    """The format `text`; a document's id is the offset of its first byte.

    Lines and blocks that are blank are skipped; a blank file is an empty document.
    """

    options = ("document",)
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        return lines.ranges(file, whole=spec.document == FILE)

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        longest, document = corpus.max_document_bytes, corpus.spec.document
        # A block that begins before the end of a part may continue after that end.
        with lines.open_part(part, to_the_end=document == BLOCK) as found:
            if document != LINE:
                texts = _blocks(found, part) if document == BLOCK else [(0, _chunks(found))]
                documents = (
                    each
                    for offset, chunks in texts
                    for each in _parts(f"{part.file.name}:{offset}", chunks, longest, document)
                )
                yield from batches.collect(documents, batch_documents, longest)
                return
            for offset, data in found:
                if isinstance(data, bytes):
                    yield from _batches(data, offset, part.file.name, batch_documents, longest)
                else:
                    chunks = _without_end(data, lambda chunk: chunk.removesuffix(b"\r"))
                    parts = _parts(f"{part.file.name}:{offset}", chunks, longest)
                    yield from batches.collect(parts, batch_documents, longest)


def _batches(data: bytes, offset: int, file: str, count: int, longest: int) -> Batches:
    """Yields the documents in whole lines; the first line begins at `offset` in the file."""
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


def _parts(
    name: str, chunks: Iterable[bytes], longest: int, document: str = LINE
) -> Iterator[Document]:
    """Yields the non-blank parts of a document, as `long_documents.parts` does.

    A blank file counts as an empty document.
    """
    for part in long_documents.parts(name, chunks, longest, name):
        blank = isinstance(part[1], bytes) and not part[1].strip()
        if not blank or (document == FILE and not part[3]):
            yield part


def _chunks(found: lines.Lines) -> Iterator[bytes]:
    for _, data in found:
        if isinstance(data, bytes):
            yield data
        else:
            yield from data
            if data.ended:
                yield b"\n"


def _without_end(chunks: Iterable[bytes], strip: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """Yields the joined chunks without the trailing bytes that `strip` removes."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        kept = strip(chunk)
        held = chunk[len(kept) :]
        yield kept


def _single_lines(found: lines.Lines) -> Iterator[tuple[bool, int, Iterable[bytes]]]:
    """Yields (True if blank, offset, chunks with the newline) for each line."""
    for offset, data in found:
        if isinstance(data, bytes):
            for line in io.BytesIO(data):
                yield not line.strip(), offset, [line]
                offset += len(line)
        else:
            yield False, offset, _chunks([(offset, data)])


def _blocks(found: lines.Lines, part: FilePart) -> Iterator[tuple[int, Iterable[bytes]]]:
    """Yields (offset, chunks) for each block of a part; read each one before the next.

    A block belongs to the part that contains the start of the last blank line before it.
    """
    inside = part.start == 0
    for blank, group in itertools.groupby(_single_lines(found), lambda line: line[0]):
        if blank:
            last = max(offset for _, offset, _ in group)
            if part.stop is not None and last >= part.stop:
                return
            inside = True
        else:
            _, offset, first = next(group)
            rest = itertools.chain.from_iterable(chunks for _, _, chunks in group)
            block = _without_end(itertools.chain(first, rest), lambda chunk: chunk.rstrip(b"\r\n"))
            if inside:
                yield offset, block
            else:  # a long line must be read before the next one
                collections.deque(block, maxlen=0)


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
    return batches.batch(ids, [texts], problems, ids).filter(pc.invert(blank))
