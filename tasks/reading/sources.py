"""Corpora: from a SPEC on the command line to batches of documents that any worker can read.

    python_docs                               documentation of Python's standard library
    parquet:GLOB                              one document a row
    json:GLOB                                 JSON lines
    text:GLOB                                 one document a line; blank lines are skipped
    hf:OWNER/NAME[:CONFIG][@REVISION]         a Hugging Face data set of such files, streamed

GLOB is a local path or any fsspec URL, with *, ** and [..]. A "?" begins the options, as in a URL:
`?column=text&split=train&id=id&validation=0.01`. JSON lines and text may be compressed (.gz, .bz2,
.xz, .zst); a compressed file is read by one worker.

Splits. A corpus has `train` and `validation`. A file whose name or folder contains validation
(valid, val, dev) belongs to validation, test (eval) to test, and all others to train; Hugging Face
data sets name their splits themselves. If a corpus has no validation split of its own, the share
`validation` of its train documents is held out, chosen by a hash of their ids. `split=NAME` reads
NAME as train; `split=validation` reads validation alone, the corpus's own or the held out.

Ids. A document's id is its column `id` (or the one that `id=` names), else "file:row" (Parquet) or
"file:byte" (lines). It does not depend on how the corpus is cut into pieces.

The modules, in the order in which a corpus passes through them:

    spec        parses a SPEC
    listing     lists local and remote files; `hub` lists and fetches those of a data set
    splits      chooses files and divides documents between train and validation
    formats     one class per file format; `registry` lists them
    cutting     cuts files into pieces
    opening     opens a piece's file
    batches     collects documents; `long_documents` splits those that are too long
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.cache.manifest import LONGEST_DOCUMENT_BYTES
from tasks.reading import builtin, cutting, listing, opening, splits
from tasks.reading.batches import Batches
from tasks.reading.corpus import (
    PYTHON_DOCS,
    TRAIN,
    VALIDATION,
    Corpus,
    CorpusSpec,
    FileRange,
    Piece,
    SourceFile,
)
from tasks.reading.formats.registry import FORMATS
from tasks.reading.spec import FORMS, HUB, parse
from tasks.reading.splits import ChosenFile
from tasks.storage import files
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FORMS",
    "TRAIN",
    "VALIDATION",
    "Corpus",
    "CorpusSpec",
    "Piece",
    "parse",
    "read",
    "resolve",
]

_LEAST_DOCUMENT_BYTES = 4  # the longest character
_INSPECTORS = 16  # files inspected concurrently: bound by latency for remote ones

Result = TypeVar("Result")


def resolve(
    spec: CorpusSpec,
    piece_bytes: int = 64 << 20,
    max_document_bytes: int = LONGEST_DOCUMENT_BYTES,
    earlier: Sequence[Sequence[str]] = (),
) -> Corpus:
    """Lists a corpus's files once, pins their state, and cuts them into pieces.

    The pieces depend only on the files and `piece_bytes`, never on the machine.

    Args:
      spec: a parsed SPEC.
      piece_bytes: the largest size of a piece.
      max_document_bytes: documents with more bytes of UTF-8 will be read in parts.
      earlier: names of the files that a cache already has, by generation. They are cut as they
        were then, and come first; new files are the last generation.

    Raises:
      UserError: nothing matches, a file cannot be read, or a column or split is missing.
    """
    if max_document_bytes < _LEAST_DOCUMENT_BYTES:
        raise UserError(
            f"max_document_bytes={max_document_bytes} is too little for one character: "
            f"give at least {_LEAST_DOCUMENT_BYTES}"
        )
    if spec.kind == PYTHON_DOCS:
        return builtin.resolve(spec, piece_bytes, max_document_bytes)
    pinned, form, found = _list_files(spec)
    generations = splits.generations(spec, found, earlier)
    chosen = [each.file for generation in generations for each in generation]
    ranges = _concurrently(functools.partial(_ranges, spec, form), chosen)
    if not any(each.bytes for of_file in ranges for each in of_file):
        raise UserError(f"corpus {spec} is empty: its {len(chosen)} files hold no documents")
    record = {
        "spec": str(pinned),
        "revision": pinned.revision,
        "column": spec.column,
        "id": spec.id,
        "validation": spec.validation,
        "piece_bytes": piece_bytes,
        "max_document_bytes": max_document_bytes,
        "files": _concurrently(_file_record, chosen),
    }
    if len(generations) > 1:
        record["generations"] = list(map(len, generations))
    ranges_of = dict(zip((file.name for file in chosen), ranges, strict=True))
    pieces = [
        piece
        for generation in generations
        for piece in _pieces(form, generation, ranges_of, piece_bytes)
    ]
    return Corpus(spec, record, tuple(pieces))


def _list_files(spec: CorpusSpec) -> tuple[CorpusSpec, str, list[SourceFile]]:
    """Returns the spec pinned to what it names now, the files' format, and the files."""
    if spec.kind == HUB:
        from tasks.reading import hub

        return hub.list_files(spec, FORMATS)
    pinned, found = listing.list_files(spec)
    return pinned, spec.kind, found


def _concurrently(action: Callable[[SourceFile], Result], chosen: list[SourceFile]) -> list[Result]:
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        return list(pool.map(action, chosen))


def _ranges(spec: CorpusSpec, form: str, file: SourceFile) -> list[FileRange]:
    with opening.user_errors(file.path):
        return FORMATS[form].ranges(spec, file)


def _file_record(file: SourceFile) -> dict[str, Any]:
    state = listing.pinned_state(file)
    return {"name": file.name, "split": file.split, "bytes": file.bytes, **state}


def _pieces(
    form: str,
    generation: list[ChosenFile],
    ranges_of: dict[str, list[FileRange]],
    piece_bytes: int,
) -> Iterator[Piece]:
    """Yields the pieces of one generation of files, given each file's ranges by its name."""
    total = sum(part.bytes for each in generation for part in ranges_of[each.file.name])
    target = cutting.target_bytes(total, piece_bytes)
    for each in generation:
        file = each.file
        for part in cutting.cut(ranges_of[file.name], target):
            yield Piece(
                name=f"{file.name}:{part.start}-{part.stop or ''}",
                splits=each.splits,
                bytes=part.bytes,
                held_out=each.held_out,
                format=form,
                path=file.path,
                file=file.name,
                start=part.start,
                stop=part.stop,
                file_bytes=file.bytes,
                etag=file.etag,
            )


def read(
    corpus: Corpus, piece: Piece, batch_documents: int = 1024
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Yields (split, batch) until the piece is read.

    Columns of a batch: `id` string, `text` string or large_string, `problem` string, `part` int32.
    A document that cannot be used has a null text and a problem: "null", "not a string", "invalid
    UTF-8", "invalid JSON", "missing column" or "longer than 1 GiB" (a line of JSON). Batches have
    at most `batch_documents` documents and about 4 MB, unless one document is larger.

    A document longer than the corpus's `max_document_bytes` comes as several, all of one split, cut
    at white space (`long_documents` has the rule): `part` counts them from 1, and is 0 for whole
    documents. The first keeps the id, others have "ID#part2" and so on. If a part of a line of text
    is not UTF-8, only that part is left out; a value of JSON or Parquet is left out whole.

    Memory is bounded whatever the input. A line of text is never held whole. A line of JSON is held
    as bytes only, up to 1 GiB; a value of Parquet is one buffer of Arrow.

    Raises:
      UserError: the file cannot be read to its end (it is gone, changed, truncated or corrupt).
    """
    with (
        opening.user_errors(piece.path),
        contextlib.closing(_batches(corpus, piece, batch_documents)) as found,
    ):
        for batch in found:
            yield from splits.divide(piece, corpus.spec.validation, batch)
        # A file cut short while it was open only seems to end: the shard must not be finished.
        if piece.path and not files.is_remote(piece.path):
            opening.check_unchanged(piece.path, piece.file_bytes, piece.etag)


def _batches(corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
    if piece.format == PYTHON_DOCS:
        return builtin.read(corpus, piece, batch_documents)
    return FORMATS[piece.format].read(corpus, piece, batch_documents)
