"""Corpora: from a SPEC on the command line to batches of documents that any worker can read.

    python_docs                               documentation of Python's standard library
    parquet:GLOB                              one document per row
    json:GLOB                                 JSON lines, arrays, or objects over several lines
    csv:GLOB                                  one document per row; the header names the columns
    tsv:GLOB                                  the same, separated by tabs and without quotes
    wet:GLOB, warc:GLOB                       the text records of a crawl
    arrow:GLOB                                one document per row of Arrow IPC files or streams
    arrow:FOLDER                              a data set saved by `save_to_disk` of `datasets`
    text:GLOB                                 one document per non-blank line, or per file
                                              (?document=file) or block of lines (?document=block)
    hf:OWNER/NAME[:CONFIG][@REVISION]         a Hugging Face data set of such files, streamed

GLOB is a local path or any fsspec URL, with *, **, [..] and {A,B}. A "?" begins the options, as in
a URL: `?column=text&split=train&id=id&validation=0.01`. All but Parquet and Arrow files may be
compressed (`compression`) or in tar or zip archives (`archives`), each read by one worker. CSV and
TSV take `columns=A,B,…` for files without a header, `delimiter=;` (CSV only) and `quote`, a
character or "none".

Splits. A corpus has `train` and `validation`. All files that a pattern matches are read, and a hash
of document ids holds out the share `validation` of documents. With `split=NAME`, words in a path
name a file's split: validation (valid, val, dev), test (testing, eval, evaluation), else train. The
files of NAME become train, and validation files, if any, replace the documents held out;
`split=validation` reads validation alone, in either case. Hugging Face data sets name their own
splits; the default is `split=train`.

With `?inputs=TEMPLATE&targets=TEMPLATE` a document is a pair of texts, made from columns of any
format except plain text. A document's id is its column `id` (or the one named by `id=`), else
"file:row" (Parquet and Arrow) or "file:byte" (all others), however the corpus is cut into pieces.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tasks.reading import listers, splits
from tasks.reading.corpus import (
    RULES_DECODED,
    TRAIN,
    VALIDATION,
    Corpus,
    CorpusSpec,
    Piece,
)
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.reading.spec import forms, parse
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "TRAIN",
    "VALIDATION",
    "Corpus",
    "CorpusSpec",
    "Piece",
    "check_record",
    "documents",
    "forms",
    "parse",
    "read",
    "resolve",
]

_LEAST_DOCUMENT_BYTES = 4  # the longest character


def check_record(folder: str, record: dict[str, Any]) -> None:
    """Raises UserError if an existing cache was built before version 0.2.0, whose rules differ."""
    if "files" in record and "rules" not in record:
        raise UserError(f"{folder} was built before version 0.2.0: build it in another folder")


def resolve(
    spec: CorpusSpec,
    piece_bytes: int = 64 << 20,
    max_document_bytes: int = LONGEST_DOCUMENT_BYTES,
    earlier: Sequence[Sequence[str]] = (),
    rules: int = RULES_DECODED,
) -> Corpus:
    """Lists a corpus's files once, pins their state, and cuts them into pieces.

    The pieces depend only on the files and `piece_bytes`, never on the machine.

    Documents with more than `max_document_bytes` of UTF-8 will be split. `earlier` has the names of
    a cache's existing files, by generation: they are cut as before and come first; new files form
    the last generation. `rules` is the version of the rules by which it was built. Raises UserError
    if nothing matches, a file cannot be read, or a column or split is missing.
    """
    if max_document_bytes < _LEAST_DOCUMENT_BYTES:
        raise UserError(
            f"max_document_bytes must be at least {_LEAST_DOCUMENT_BYTES}, the bytes of the "
            f"longest character, not {max_document_bytes}"
        )
    lister = listers.of_kind(spec.kind)
    return lister.resolve(spec, piece_bytes, max_document_bytes, earlier, rules)


def read(
    corpus: Corpus, piece: Piece, batch_documents: int = 1 << 14
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Yields (split, batch) until the piece is read.

    Columns of a batch: `id` string, `text` string or large_string (pairs have `inputs` and
    `targets`), `problem` string, `part` int32, `place` string: where the document begins, as
    "file:row" or "file:byte". An unusable document has a null text and a problem, such as "invalid
    UTF-8". Batches have at most `batch_documents` documents and about 4 MB, unless one document is
    larger.

    A text longer than the corpus's `max_document_bytes` becomes several documents of one split, cut
    at white space (see `long_documents`). `part` counts them from 1, and is 0 for whole documents.
    The first keeps the id; the others are "ID#part2" and so on. In a line of text, only parts that
    are not UTF-8 are left out; a JSON or Parquet value is left out whole. A line of text is never
    held whole, and a line of JSON only up to 64 MiB; a Parquet value is one Arrow buffer.

    Raises UserError if the file cannot be read to its end (gone, changed, truncated or corrupt).
    """
    for batch in listers.of_kind(corpus.spec.kind).read(corpus, piece, batch_documents):
        yield from splits.divide(piece, corpus.spec.validation, batch)


def documents(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (split, columns) of each usable document of a corpus, in its order; see `read`."""
    corpus = resolve(parse(spec))
    for piece in corpus.pieces:
        for split, batch in read(corpus, piece):
            yield from ((split, row) for row in batch.to_pylist() if not row["problem"])
