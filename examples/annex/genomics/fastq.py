"""FASTQ: records of four lines, "@id", a sequence, "+", and a quality for each letter."""

from collections.abc import Iterable, Iterator

from tasks.reading import batches, opening
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.reading.long_documents import Document


class Fastq:
    """The format: a file is one range, and its documents have no columns."""

    options = ()
    ranges_are_rows = False

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        with opening.open_file(file) as handle:
            if handle.read(1) not in (b"@", b""):
                raise ValueError("a FASTQ file begins with @")
        return [FileRange(0, None, file.bytes)] if file.bytes else []

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        with opening.open_file(part.file) as handle:
            records = _records(handle, part.file.name)
            yield from batches.collect(records, batch_documents, corpus.max_document_bytes)


def _records(lines: Iterable[bytes], file: str) -> Iterator[Document]:
    name = ""
    for number, line in enumerate(lines):
        if number % 4 == 0:
            name = line[1:].strip().decode()
        elif number % 4 == 1:
            yield name, line.strip(), None, 0, f"{file}:{number + 1}"


FASTQ = Fastq()
