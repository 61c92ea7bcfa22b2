"""The built-in corpus python_docs: listing it and reading its documents."""

from tasks.reading import batches, cutting, splits, stdlib_docs
from tasks.reading.batches import Batches
from tasks.reading.corpus import PYTHON_DOCS, TRAIN, VALIDATION, Corpus, CorpusSpec, Piece
from tasks.terminal.command_line import UserError


def resolve(spec: CorpusSpec, piece_bytes: int, max_document_bytes: int) -> Corpus:
    """Groups the documents of the running Python's library into pieces.

    Raises:
      UserError: the spec names a split that the corpus does not have.
    """
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


def read(corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
    """Yields the documents of a piece; see `sources.read`.

    Raises:
      UserError: the running Python's library is not the one that was listed.
    """
    if corpus.record["sha256"] != stdlib_docs.sha256():
        raise UserError(
            f"the corpus {PYTHON_DOCS} was listed with Python {corpus.record['python']}, but this "
            f"is Python {stdlib_docs.python_version()}, or another build of it"
        )
    texts = stdlib_docs.documents()
    documents = ((name, texts[name], None, 0, f"{PYTHON_DOCS}:{name}") for name in piece.members)
    yield from batches.collect(documents, batch_documents, corpus.max_document_bytes)
