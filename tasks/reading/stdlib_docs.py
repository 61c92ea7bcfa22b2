"""The built-in corpus: documentation of Python's standard library, which comes with the package.

It is real English prose, the same on every machine. A document is the docstring of a module, of a
function, or of a class with its methods, or a topic of `help()`. `files/README.md` says where it
comes from.
"""

import functools
import gzip
import hashlib
import json
import pathlib
from collections.abc import Sequence

from tasks.reading import batches, cutting, splits
from tasks.reading.batches import Batches
from tasks.reading.corpus import PYTHON_DOCS, TRAIN, VALIDATION, Corpus, CorpusSpec, Piece
from tasks.terminal.command_line import UserError

# JSON lines of "id" and "text", sorted by id; written by scripts/make_python_docs.py.
FILE = pathlib.Path(__file__).parent / "files" / "python_docs.jsonl.gz"
# The release that is documented. Caches name it.
PYTHON = "3.11.7"


@functools.cache
def documents() -> dict[str, str]:
    """Returns {id: text}, sorted by id, which is a dotted name or "topic:NAME"."""
    with gzip.open(FILE, "rt", encoding="utf-8", newline="\n") as lines:
        return {each["id"]: each["text"] for each in map(json.loads, lines)}


@functools.cache
def sha256() -> str:
    """Returns the hex SHA-256 of all ids and texts."""
    return hashlib.sha256(json.dumps(documents(), sort_keys=True).encode()).hexdigest()


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
        rules: int,
    ) -> Corpus:
        if spec.split not in (TRAIN, VALIDATION):
            raise UserError(f"corpus {spec}: no split {spec.split}; it has train, validation")
        sizes = {name: len(text.encode()) for name, text in documents().items()}
        of_piece, held_out = splits.held_out_splits(spec)
        pieces: list[Piece] = []
        target = cutting.target_bytes(sum(sizes.values()), piece_bytes)
        for members in cutting.join(sizes, sizes.__getitem__, target):
            name = f"{PYTHON_DOCS}:{len(pieces)}"
            size = sum(map(sizes.__getitem__, members))
            pieces.append(Piece(name, of_piece, size, held_out, PYTHON_DOCS, members=members))
        record = {
            "spec": str(spec),
            "python": PYTHON,
            "validation": spec.validation,
            "piece_bytes": piece_bytes,
            "max_document_bytes": max_document_bytes,
            "documents": len(sizes),
            "bytes": sum(sizes.values()),
            "sha256": sha256(),
        }
        return Corpus(spec, record, tuple(pieces))

    def read(self, corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
        if corpus.record["sha256"] != sha256():
            raise UserError(
                f"the corpus {PYTHON_DOCS} was listed with the documentation of Python "
                f"{corpus.record['python']}, but the one here is of Python {PYTHON}: build the "
                "cache in another folder"
            )
        texts = documents()
        found = ((name, texts[name], None, 0, f"{PYTHON_DOCS}:{name}") for name in piece.members)
        yield from batches.collect(found, batch_documents, corpus.max_document_bytes)

    def check(self, spec: CorpusSpec) -> None:
        pass
