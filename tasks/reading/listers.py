"""Lists, cuts and reads each kind of corpus that a SPEC can name."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tasks import annexes
from tasks.annexes import Registry
from tasks.document_kind import SIDES, DocumentKind
from tasks.reading import compression, cutting, hub, listing, opening, splits
from tasks.reading.batches import Batches
from tasks.reading.corpus import (
    BLOCK,
    DIALECT_OPTIONS,
    FILE,
    HUB,
    LINE,
    PYTHON_DOCS,
    RULES,
    RULES_DECODED,
    TRAIN,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    Piece,
    SourceFile,
)
from tasks.reading.formats.format import Format
from tasks.reading.formats.registry import FORMATS, format_of
from tasks.reading.splits import ChosenFile
from tasks.reading.stdlib_docs import PythonDocs
from tasks.storage import files, retries
from tasks.terminal.command_line import UserError

_INSPECTORS = 16  # files inspected concurrently: remote ones are bound by latency
_CHUNK = 64  # local files per thread at a time

# Descriptions of plain-text documents, for messages.
# With fewer documents expected in a split, there may be none: at 3, in 5 corpora of 100.
_FEW = 3
_DOCUMENTS = {
    LINE: "every line is a document; ?document=file makes every file one, ?document=block every "
    "block of lines between blank ones",
    FILE: "every file is a document",
    BLOCK: "every block of lines between blank ones is a document",
}

# The pinned spec, the files' format, the files, and lines to print.
Listed = tuple[CorpusSpec, str, list[SourceFile], list[str]]


def _few(spec: CorpusSpec, chosen: Sequence[splits.ChosenFile]) -> str:
    """Returns a warning if so few documents are held out that there may be none, or "".

    Only files that are documents are counted before they are read; a single one may be an archive.
    """
    expected = spec.validation * len(chosen)
    if spec.document != FILE or len(chosen) == 1 or not chosen[0].held_out or expected > _FEW:
        return ""
    return (
        f"; {spec.validation:.0%} of them are held out for validation, of so few perhaps none: "
        "?validation=0.1 holds out more"
    )


class Files:
    """Local and remote files; each kind has the name of its format."""

    has_paths = True  # the location is a path, whose folders may name languages
    reads_folders = False  # the location may be a folder that holds one data set

    def list_files(self, spec: CorpusSpec, by_words: bool) -> Listed:
        """Lists the files; with `by_words`, words in their paths name their splits."""
        pinned, found, notes = listing.list_files(spec, by_words)
        return pinned, spec.kind, found, notes

    def resolve(
        self,
        spec: CorpusSpec,
        piece_bytes: int,
        max_document_bytes: int,
        earlier: Sequence[Sequence[str]],
        rules: int = RULES_DECODED,
    ) -> Corpus:
        """Lists a corpus and cuts it into pieces; see `sources.resolve`."""
        by_words = bool(spec.split)
        pinned, form, found, notes = self.list_files(spec, by_words)
        dialect = {name: getattr(pinned, name) for name in DIALECT_OPTIONS}
        spec = dataclasses.replace(spec, **dialect)  # a Hub data set has its own
        generations = splits.generations(spec, found, earlier)
        chosen = list(itertools.chain.from_iterable(generations))
        inspected = _inspected(spec, form, chosen)
        if not any(part.bytes for _, ranges, _ in inspected for part in ranges):
            raise UserError(f"corpus {spec} is empty: its {len(chosen)} files hold no documents")
        remaining = iter(inspected)
        pieces: list[Piece] = []
        for generation in generations:
            members = [next(remaining)[:2] for _ in generation]
            pieces += _pieces(form, members, piece_bytes)
        record = {
            "spec": str(pinned),
            "revision": pinned.revision,
            **{
                name: getattr(spec, name)
                for name in (SIDES if spec.unit is DocumentKind.PAIR else ("column",))
            },
            "id": spec.id,
            "validation": spec.validation,
            "piece_bytes": piece_bytes,
            "max_document_bytes": max_document_bytes,
            "files": [entry for *_, entry in inspected],
            **({"generations": list(map(len, generations))} if len(generations) > 1 else {}),
            "rules": rules if any(_raw_ids(ranges) for _, ranges, _ in inspected) else RULES,
            "left_out": {
                split: {"files": count, "bytes": size}
                for split, (count, size) in splits.left_out(found, chosen).items()
            },
        }
        by_words = by_words or any(file.split != TRAIN for file in found)
        notes += splits.notes(found, chosen, by_words)
        if "document" in FORMATS[form].options:
            few = _few(spec, chosen)
            notes.append(f"{len(chosen):,} files, {_DOCUMENTS[spec.document]}{few}")
        shown = tuple(f"{spec}: {note}" for note in notes)
        return Corpus(spec, record, tuple(pieces), shown, type(FORMATS[form]).__module__)

    def read(self, corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
        """Yields a piece's documents from all its splits; see `sources.read`."""
        form = format_of(piece.format, corpus.module)
        for part in piece.parts:
            with (
                opening.user_errors(part.file.path),
                opening.unchanged(part.file),
                contextlib.closing(read(form, corpus, part, batch_documents)) as found,
            ):
                yield from found

    def check(self, spec: CorpusSpec) -> None:
        """Raises UserError if the corpus has no files or only empty ones, or lacks a column."""
        _, form, found, _ = self.list_files(spec, by_words=False)
        full = [file for file in found if file.bytes]
        if not full:
            raise UserError(f"corpus {spec} is empty: its {len(found)} files hold no documents")
        smallest = min(full, key=lambda file: file.bytes)
        with opening.user_errors(smallest.path):
            ranges(FORMATS[form], spec, smallest)


class HubFiles(Files):
    """The kind `hf`: the files of a data set of the Hugging Face Hub."""

    has_paths = False

    def list_files(self, spec: CorpusSpec, by_words: bool) -> Listed:
        return *hub.list_files(spec, FORMATS), []

    def check(self, spec: CorpusSpec) -> None:
        pass  # the Hub is asked once, when the corpus is resolved


def ranges(form: Format, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
    """Returns `form.ranges` of a file, which may be an archive."""
    try:
        return form.ranges(spec, file)
    except compression.Archive:
        found: list[FileRange] = _of_archives("ranges", file)(form, spec, file)
        return found


def read(form: Format, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
    """Yields the documents of a part, which may be an archive; see `Format.read`."""
    try:
        with contextlib.closing(form.read(corpus, part, batch_documents)) as found:
            yield from found
        return
    except compression.Archive:  # raised before the first batch
        pass
    yield from _of_archives("read", part.file)(form, corpus, part, batch_documents)


def _of_archives(name: str, file: SourceFile) -> Any:
    found = annexes.get("archives", name)
    if found is None:
        raise UserError(f"{file.path} is an archive: unpack it first")
    return found


Lister = Files | PythonDocs
_LISTERS: Registry[Lister] = Registry("listers", {PYTHON_DOCS: PythonDocs(), HUB: HubFiles()})


def of_kind(kind: str) -> Lister:
    """Returns the lister for a kind of corpus."""
    return _LISTERS.get(kind) or Files()


def _raw_ids(ranges: list[FileRange]) -> bool:
    return any(each.raw_ids for each in ranges)


# A file with its checksum, its ranges, and its entry in the record.
Inspected = tuple[ChosenFile, list[FileRange], dict[str, Any]]


def _inspected(spec: CorpusSpec, form: str, chosen: list[ChosenFile]) -> list[Inspected]:
    def look(file: SourceFile) -> tuple[list[FileRange], str]:
        found = ranges(FORMATS[form], spec, file)
        return found, "" if file.is_remote else files.sha256(file.path)

    def inspect(each: ChosenFile) -> Inspected:
        file = each.file
        with opening.user_errors(file.path):
            found, sha256 = look(file)
            if sha256 and opening.changed(file):
                with opening.unchanged(file):
                    found, sha256 = look(file)
        state = {"sha256": sha256} if sha256 else file.state
        entry = {"name": file.name, "split": file.split, "bytes": file.bytes, **state}
        known = SourceFile(
            file.folder, file.name, file.split, file.bytes, file.state, file.written, sha256
        )
        return ChosenFile(known, each.splits, each.held_out), found, entry

    failed = threading.Event()

    def inspect_all(chunk: list[ChosenFile]) -> list[Inspected]:
        with retries.stopped_by(failed):
            return list(map(inspect, chunk))

    count = 1 if chosen and chosen[0].file.is_remote else _CHUNK
    chunks = [chosen[begin : begin + count] for begin in range(0, len(chosen), count)]
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        try:
            return list(itertools.chain.from_iterable(pool.map(inspect_all, chunks)))
        except BaseException:
            failed.set()
            raise


def _pieces(
    form: str, generation: list[tuple[ChosenFile, list[FileRange]]], piece_bytes: int
) -> Iterator[Piece]:
    """Yields the pieces of one generation of files.

    The files of a piece share the same splits. No piece spans two generations, so an extension
    leaves the old pieces as they are.
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
        for joined in cutting.join(parts, lambda part: part.bytes, target):
            first = joined[0]
            more = f" and {len(joined) - 1:,} more" if len(joined) > 1 else ""
            yield Piece(
                name=f"{first.file.name}:{first.start}-{first.stop or ''}{more}",
                splits=of_piece,
                bytes=sum(part.bytes for part in joined),
                held_out=held_out,
                format=form,
                parts=joined,
            )
