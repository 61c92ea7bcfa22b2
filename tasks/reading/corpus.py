"""A corpus as plain data: its SPEC, its files, and the pieces that workers read."""

import dataclasses
import itertools
import re
import urllib.parse
from collections.abc import Collection
from typing import Any

from tasks.document_kind import DocumentKind
from tasks.storage.paths import is_remote

TRAIN = "train"
VALIDATION = "validation"
PYTHON_DOCS = "python_docs"  # the built-in corpus
HUB = "hf"  # data sets of the Hugging Face Hub
CSV, TSV = "csv", "tsv"
NO_QUOTE = "none"
# Options that may follow the "?" of a SPEC.
COLUMN_OPTIONS = ("column", "inputs", "targets", "id")
DIALECT_OPTIONS = ("columns", "delimiter", "quote")
FORMAT_OPTIONS = (*COLUMN_OPTIONS, "document", *DIALECT_OPTIONS)
OPTIONS = (*COLUMN_OPTIONS[:3], "split", "id", "validation", "document", *DIALECT_OPTIONS)
# Kind -> (delimiter, quote). TSV has no quotes, like T5's `parse_tsv`.
_DIALECTS = {CSV: (",", '"'), TSV: ("\t", NO_QUOTE)}
# Template characters that a SPEC does not escape.
_READABLE = " {}<>/:,.?!'\"()[]|"
# Bytes of letters outside ASCII, as `urlencode` writes them.
_NOT_ASCII = re.compile("(?:%[89A-F][0-9A-F])+")
# Versions of the rules for splits, pieces and ids, which cache records store: the second reads ids
# of a column of bytes as text, "x1" instead of "b'x1'", and serves corpora that have such a column.
RULES, RULES_DECODED = 2, 3
IN_ARCHIVE = "::"  # between the name of an archive and that of a file in it
# A document of plain text: a line, a file, or a block of lines between blank lines.
LINE, FILE, BLOCK = "line", "file", "block"
DOCUMENTS = (LINE, FILE, BLOCK)


def file_of(path: str, files: Collection[str]) -> str:
    """Returns the one of the files that a path names, or that holds the member it names; or ""."""
    if path in files or IN_ARCHIVE not in path:
        return path if path in files else ""
    names = itertools.accumulate(path.split(IN_ARCHIVE), lambda *both: IN_ARCHIVE.join(both))
    return next((name for name in names if name in files), "")


def is_place(name: str, files: Collection[str]) -> bool:
    """Returns whether an id is a place "file:row" in one of the files."""
    return bool(file_of(name.rpartition(":")[0], files))


@dataclasses.dataclass(frozen=True)
class CorpusSpec:
    """A parsed SPEC; `str()` returns a SPEC that parses to an equal value.

    An empty `split` reads every file. Only plain text uses `document`. `inputs` and `targets` are
    the templates for pairs (`tasks.reading.columns`), both "" for single texts. Only CSV and TSV
    use `columns` (comma-separated names for files without a header), `delimiter`, and `quote` (a
    character or "none").
    """

    kind: str
    location: str = ""
    config: str = ""
    revision: str = ""
    column: str = "text"
    inputs: str = ""
    targets: str = ""
    split: str = ""
    id: str = ""
    validation: float = 0.01
    document: str = LINE
    columns: str = ""
    delimiter: str = ""
    quote: str = ""

    def __str__(self) -> str:
        head = f"{self.kind}:{self.location}" if self.location else self.kind
        head += f":{self.config}" if self.config else ""
        head += f"@{self.revision}" if self.revision else ""
        default = default_spec(self.kind)
        values = {name: getattr(self, name) for name in OPTIONS}
        options = {name: value for name, value in values.items() if value != getattr(default, name)}
        if not options:
            return head
        if self.unit is DocumentKind.TEXT:
            return f"{head}?{urllib.parse.urlencode(options)}"
        # Keep templates readable: they contain spaces and braces.
        quote = urllib.parse.quote
        return f"{head}?{urllib.parse.urlencode(options, safe=_READABLE, quote_via=quote)}"

    @property
    def unit(self) -> DocumentKind:
        return DocumentKind.PAIR if self.inputs else DocumentKind.TEXT


def readable(spec: str) -> str:
    """Returns the text of a SPEC with its letters outside ASCII decoded; it parses as before."""
    return _NOT_ASCII.sub(lambda found: urllib.parse.unquote(found[0]), spec)


def default_spec(kind: str) -> CorpusSpec:
    """Returns a spec of `kind` with default options."""
    if kind == PYTHON_DOCS:  # small, so it holds out a larger share for validation
        return CorpusSpec(kind, split=TRAIN, validation=0.1)
    if kind in _DIALECTS:
        delimiter, quote = _DIALECTS[kind]
        return CorpusSpec(kind, delimiter=delimiter, quote=quote)
    return CorpusSpec(kind, split=TRAIN if kind == HUB else "")


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus.

    Its path is `folder` + `name`; all files of a corpus, perhaps a million, share one `folder`
    string. `state` identifies its content (an etag or a checksum, if the store reports one).
    `written` is a local file's `opening.written`, and `sha256` its checksum, once it is known.
    """

    folder: str
    name: str
    split: str
    bytes: int
    state: dict[str, str]
    written: str = ""
    sha256: str = ""

    @property
    def path(self) -> str:
        return self.folder + self.name

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    @property
    def etag(self) -> str:
        """The remote store's etag, if it reports one."""
        return "".join(self.state.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Member(SourceFile):
    """A file in an archive; `copy` is the descriptor of a temporary file with its content."""

    copy: int = -1

    @property
    def is_remote(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file that can be read on its own.

    `start` and `stop` are in the format's unit (bytes of a text file, rows of Parquet); `stop` is
    None for a file that must be read from start to end. `bytes` is the range's size. `cuts` lists
    the only places where it can be cut, beginning with `start`, each with the number of rows before
    it in the file; () allows a cut anywhere. `raw_ids` is True if a column of bytes holds the ids.
    """

    start: int
    stop: int | None
    bytes: int
    cuts: tuple[tuple[int, int], ...] = ()
    raw_ids: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or a range of it, as one part of a piece; see FileRange.

    A line belongs to the part in which it begins. `file` describes the file when it was listed.
    """

    file: SourceFile
    start: int
    stop: int | None
    bytes: int
    cuts: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """The unit of work: parts of one or more files, or some documents of the built-in corpus.

    `name` is unique in the corpus. Documents may belong to any of `splits`; with `held_out`, a hash
    of the document id decides. `bytes` is the piece's size (Parquet: the uncompressed text column).
    """

    name: str
    splits: tuple[str, ...]
    bytes: int
    held_out: bool
    format: str
    parts: tuple[FilePart, ...] = dataclasses.field(default=(), hash=False)
    members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A listed corpus: plain data without secrets, safe to send to any worker.

    `record` is the manifest's JSON: equal content gives equal records, wherever the files are.
    `notes` are lines to print: unread files, or files read as validation. `module` registers the
    file format; workers import it.
    """

    spec: CorpusSpec
    record: dict[str, Any]
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...] = ()
    module: str = ""

    @property
    def max_document_bytes(self) -> int:
        """UTF-8 bytes of the longest document; longer ones are split."""
        return self.record["max_document_bytes"]
