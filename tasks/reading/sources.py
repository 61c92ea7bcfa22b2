"""Corpora: from a SPEC on the command line to batches of documents that any worker can read.

    python_docs                               documentation of Python's standard library
    parquet:GLOB                              one document a row
    json:GLOB                                 JSON lines
    csv:GLOB                                  one document a row, by the header's columns
    tsv:GLOB                                  the same, between tabs and without quotes
    wet:GLOB, warc:GLOB                       the text records of a crawl
    arrow:GLOB                                one document a row of Arrow IPC files or streams
    arrow:FOLDER                              a data set saved by `save_to_disk` of `datasets`
    text:GLOB                                 one document a line; blank lines are skipped;
                                              ?document=file: a file, block: a block of lines
    hf:OWNER/NAME[:CONFIG][@REVISION]         a Hugging Face data set of such files, streamed

GLOB is a local path or any fsspec URL, with *, ** and [..]. A "?" begins the options, as in a URL:
`?column=text&split=train&id=id&validation=0.01`. All but Parquet and Arrow may be compressed (.gz,
.bz2, .xz, .zst); a compressed file is read by one worker. CSV and TSV have `columns=A,B,…` for
files without a header, `delimiter=;` (CSV only) and `quote`, a character or "none".

Splits. A corpus has `train` and `validation`. All files that a pattern matches are read, and the
share `validation` of their documents is held out, chosen by a hash of their ids. With `split=NAME`,
the words of a path name the split of a file: validation (valid, val, dev), test (testing, eval,
evaluation), else train. The files of NAME become train, and the files of validation, if there are
any, replace the documents held out; `split=validation` reads validation alone, either kind. Hugging
Face data sets name their splits themselves, and are read as with `split=train`.

Pairs. With `?inputs=TEMPLATE&targets=TEMPLATE` a document is a pair of two texts, made from columns
of any format but plain text.

Ids. A document's id is its column `id` (or the one that `id=` names), else "file:row" (Parquet and
Arrow) or "file:byte" (all others). It does not depend on how the corpus is cut into pieces.

The modules, in the order in which a corpus passes through them:

    spec        parses a SPEC
    listing     lists local and remote files; `hub` lists and fetches those of a data set of the
                Hub, `saved` lists those of a saved one
    splits      chooses files and divides documents between train and validation
    formats     one class per file format; `registry` lists them
    cutting     cuts large files into pieces, and joins small ones
    opening     opens a file of a piece
    batches     collects documents; `long_documents` splits those that are too long
    pairs       makes the inputs and targets of pairs from columns, by templates
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tasks.reading import builtin, cutting, listing, opening, saved, splits
from tasks.reading.corpus import (
    ARROW,
    BLOCK,
    FILE,
    HUB,
    LINE,
    PYTHON_DOCS,
    TEXT,
    TRAIN,
    VALIDATION,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    Piece,
    SourceFile,
)
from tasks.reading.formats.registry import FORMATS
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.reading.spec import FORMS, parse
from tasks.reading.splits import ChosenFile
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.unit import SIDES, Unit

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

_CHUNK = 64  # files that a thread inspects at a time

# What is a document of plain text, for the user.
_DOCUMENTS = {
    LINE: "every line is a document; ?document=file makes every file one, ?document=block every "
    "block of lines between blank ones",
    FILE: "every file is a document",
    BLOCK: "every block of lines between blank ones is a document",
}

# The rules by which files belong to splits and are cut into pieces. In rules 1, words in paths
# always named splits and every file had pieces of its own; the records of caches do not name them.
RULES = 2


def rules_of(record: dict[str, Any]) -> int:
    """Returns the rules by which the corpus of an existing cache was resolved."""
    return RULES if "rules" in record else 1


def resolve(
    spec: CorpusSpec,
    piece_bytes: int = 64 << 20,
    max_document_bytes: int = LONGEST_DOCUMENT_BYTES,
    earlier: Sequence[Sequence[str]] = (),
    rules: int = RULES,
) -> Corpus:
    """Lists a corpus's files once, pins their state, and cuts them into pieces.

    The pieces depend only on the files and `piece_bytes`, never on the machine.

    Args:
      spec: a parsed SPEC.
      piece_bytes: the largest size of a piece.
      max_document_bytes: documents with more bytes of UTF-8 will be read in parts.
      earlier: names of the files that a cache already has, by generation. They are cut as they
        were then, and come first; new files are the last generation.
      rules: `rules_of` an existing cache.

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
    if rules == 1 and spec.kind != HUB:  # a split that was not asked for was train
        spec = dataclasses.replace(spec, split="" if spec.split == TRAIN else spec.split)
    by_words = bool(spec.split) or rules == 1
    pinned, form, found, notes = _list_files(spec, by_words)
    dialect = {name: getattr(pinned, name) for name in ("columns", "delimiter", "quote")}
    spec = dataclasses.replace(spec, **dialect)  # a data set of the Hub has its own
    by_words = by_words or any(file.split != TRAIN for file in found)
    generations = splits.generations(spec, found, earlier)
    chosen = [each for generation in generations for each in generation]
    inspected = _inspected(spec, form, [each.file for each in chosen])
    if not any(part.bytes for ranges, _ in inspected for part in ranges):
        raise UserError(f"corpus {spec} is empty: its {len(chosen)} files hold no documents")
    sides = {side: getattr(spec, side) for side in SIDES}
    record = {
        "spec": str(pinned),
        "revision": pinned.revision,
        **(sides if spec.unit is Unit.PAIR else {"column": spec.column}),
        "id": spec.id,
        "validation": spec.validation,
        "piece_bytes": piece_bytes,
        "max_document_bytes": max_document_bytes,
        "files": [entry for _, entry in inspected],
    }
    if len(generations) > 1:
        record["generations"] = list(map(len, generations))
    if rules > 1:
        record["rules"] = rules
        record["left_out"] = {
            split: {"files": count, "bytes": size}
            for split, (count, size) in splits.left_out(found, chosen).items()
        }
    remaining = iter(inspected)
    pieces = [
        piece
        for generation in generations
        for piece in _pieces(
            form,
            [(each, ranges) for each, (ranges, _) in zip(generation, remaining, strict=False)],
            piece_bytes,
            rules,
        )
    ]
    notes += splits.notes(found, chosen, by_words)
    if form == TEXT:
        notes.append(f"{len(chosen):,} files, {_DOCUMENTS[spec.document]}")
    return Corpus(spec, record, tuple(pieces), tuple(f"{spec}: {note}" for note in notes))


def _list_files(
    spec: CorpusSpec, by_words: bool
) -> tuple[CorpusSpec, str, list[SourceFile], list[str]]:
    """Returns the spec pinned to what it names now, the files' format, the files, and notes."""
    if spec.kind == HUB:
        from tasks.reading import hub

        return *hub.list_files(spec, FORMATS), []
    saved_data_set = saved.list_files(spec) if spec.kind == ARROW else None
    pinned, found, notes = saved_data_set or listing.list_files(spec, by_words)
    return pinned, spec.kind, found, notes


Inspected = tuple[list[FileRange], dict[str, Any]]


def _inspected(spec: CorpusSpec, form: str, chosen: list[SourceFile]) -> list[Inspected]:
    """Returns the ranges and the record of every file."""

    def inspect(file: SourceFile) -> Inspected:
        with opening.user_errors(file.path):
            ranges = FORMATS[form].ranges(spec, file)
        state = listing.pinned_state(file)
        return ranges, {"name": file.name, "split": file.split, "bytes": file.bytes, **state}

    chunks = [chosen[begin : begin + _CHUNK] for begin in range(0, len(chosen), _CHUNK)]
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        found = pool.map(lambda chunk: list(map(inspect, chunk)), chunks)
        return list(itertools.chain.from_iterable(found))


def _pieces(
    form: str,
    generation: list[tuple[ChosenFile, list[FileRange]]],
    piece_bytes: int,
    rules: int,
) -> Iterator[Piece]:
    """Yields the pieces of one generation of files, given the ranges of each.

    A piece holds documents of one set of splits; no piece has files of two generations, so that an
    extension leaves the old pieces as they are.
    """
    total = sum(part.bytes for _, ranges in generation for part in ranges)
    target = cutting.target_bytes(total, piece_bytes)
    for (of_piece, held_out), members in itertools.groupby(
        generation, key=lambda member: (member[0].splits, member[0].held_out)
    ):
        parts = (
            FilePart(each.file, part.start, part.stop, part.bytes, part.cuts)
            for each, ranges in members
            for part in cutting.cut(ranges, target)
        )
        if rules == 1:
            joined: Iterator[tuple[FilePart, ...]] = ((part,) for part in parts)
        else:
            joined = cutting.join(parts, lambda part: part.bytes, target)
        for of_files in joined:
            first = of_files[0]
            more = f" and {len(of_files) - 1:,} more" if len(of_files) > 1 else ""
            yield Piece(
                name=f"{first.file.name}:{first.start}-{first.stop or ''}{more}",
                splits=of_piece,
                bytes=sum(part.bytes for part in of_files),
                held_out=held_out,
                format=form,
                parts=of_files,
            )


def read(
    corpus: Corpus, piece: Piece, batch_documents: int = 1024
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Yields (split, batch) until the piece is read.

    Columns of a batch: `id` string, `text` string or large_string, `problem` string, `part` int32,
    `place` string: where the document begins, as "file:row" or "file:byte". A document that cannot
    be used has a null text and a problem: "null", "not a string", "invalid UTF-8", "invalid JSON",
    "missing column", "longer than 1 GiB" (a line of JSON), or one of those in `formats.delimited`
    and `formats.warc`. Batches have at most
    `batch_documents` documents and about 4 MB, unless one document is larger.

    A document longer than the corpus's `max_document_bytes` comes as several, all of one split, cut
    at white space (`long_documents` has the rule): `part` counts them from 1, and is 0 for whole
    documents. The first keeps the id, others have "ID#part2" and so on. If a part of a line of text
    is not UTF-8, only that part is left out; a value of JSON or Parquet is left out whole.

    Pairs have columns `inputs` and `targets` in place of `text`, and are never split; a problem of
    either side is the pair's (`pairs` has the columns).

    Memory is bounded whatever the input. A line of text is never held whole. A line of JSON is held
    as bytes only, up to 1 GiB; a value of Parquet is one buffer of Arrow.

    Raises:
      UserError: the file cannot be read to its end (it is gone, changed, truncated or corrupt).
    """
    if piece.format == PYTHON_DOCS:
        batches = builtin.read(corpus, piece, batch_documents)
        for batch in batches:
            yield from splits.divide(piece, corpus.spec.validation, batch)
        return
    for part in piece.parts:
        with (
            opening.user_errors(part.file.path),
            contextlib.closing(FORMATS[piece.format].read(corpus, part, batch_documents)) as found,
        ):
            for batch in found:
                yield from splits.divide(piece, corpus.spec.validation, batch)
            # A file cut short while it was open only seems to end: the shard must not be finished.
            if not files.is_remote(part.file.path):
                opening.check_unchanged(part.file)
