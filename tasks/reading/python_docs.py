"""Lists and reads the built-in corpus python_docs."""

from collections.abc import Sequence

from tasks.reading import batches, cutting, splits, stdlib_docs
from tasks.reading.batches import Batches
from tasks.reading.corpus import PYTHON_DOCS, TRAIN, VALIDATION, Corpus, CorpusSpec, Piece
from tasks.terminal.command_line import UserError


class PythonDocs:
    """The kind `python_docs`."""

    has_paths = False
    reads_folders = False

    def resolve(
        self,
        spec: CorpusSpec,
        piece_bytes: int,
        max_document_bytes: int,
        earlier: Sequence[Sequence[str]],
    ) -> Corpus:
        if spec.split not in (TRAIN, VALIDATION):
            raise UserError(f"corpus {spec}: no split {spec.split}; it has train, validation")
        documents = stdlib_docs.documents()
        sizes = {name: len(text.encode()) for name, text in documents.items()}
        of_piece, held_out = splits.held_out_splits(spec)
        pieces: list[Piece] = []
        target = cutting.target_bytes(sum(sizes.values()), piece_bytes)
        for members in cutting.join(sizes, sizes.__getitem__, target):
            name = f"{PYTHON_DOCS}:{len(pieces)}"
            size = sum(map(sizes.__getitem__, members))
            pieces.append(Piece(name, of_piece, size, held_out, PYTHON_DOCS, members=members))
        record = {
            "spec": str(spec),
            "python": stdlib_docs.python_version(),
            "validation": spec.validation,
            "piece_bytes": piece_bytes,
            "max_document_bytes": max_document_bytes,
            "documents": len(documents),
            "bytes": sum(sizes.values()),
            "sha256": stdlib_docs.sha256(),
        }
        return Corpus(spec, record, tuple(pieces))

    def read(self, corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
        if corpus.record["sha256"] != stdlib_docs.sha256():
            raise UserError(
                f"the corpus {PYTHON_DOCS} was listed with Python {corpus.record['python']}, but "
                f"this is Python {stdlib_docs.python_version()}, or another build of it"
            )
        texts = stdlib_docs.documents()
        found = ((name, texts[name], None, 0, f"{PYTHON_DOCS}:{name}") for name in piece.members)
        yield from batches.collect(found, batch_documents, corpus.max_document_bytes)

    def check(self, spec: CorpusSpec) -> None:
        pass
