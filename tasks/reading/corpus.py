"""A corpus as plain data: its SPEC, its files, and the pieces that workers read."""

import dataclasses
import urllib.parse
from typing import Any

from tasks.unit import Unit

TRAIN = "train"
VALIDATION = "validation"
PYTHON_DOCS = "python_docs"  # the built-in corpus
HUB = "hf"  # data sets of the Hugging Face Hub
CSV, TSV = "csv", "tsv"
NO_QUOTE = "none"
# The options that may follow the "?" of a SPEC.
COLUMN_OPTIONS = ("column", "inputs", "targets", "id")
FORMAT_OPTIONS = (*COLUMN_OPTIONS, "document", "columns", "delimiter", "quote")
OPTIONS = (
    *("column", "inputs", "targets", "split", "id", "validation", "document"),
    *("columns", "delimiter", "quote"),
)
# Kind -> (delimiter, quote). TSV has no quotes, as in text/tab-separated-values and
# T5's `parse_tsv`.
_DIALECTS = {CSV: (",", '"'), TSV: ("\t", NO_QUOTE)}
# Characters of a template that a SPEC holds as they are.
_READABLE = " {}<>/:,.?!'\"()[]|"
# What is a document of plain text: a line, a file, or the lines between blank ones.
LINE, FILE, BLOCK = "line", "file", "block"
DOCUMENTS = (LINE, FILE, BLOCK)


@dataclasses.dataclass(frozen=True)
class CorpusSpec:
    """A parsed SPEC; `str()` returns a SPEC that parses to an equal value.

    `split` is "" if none was asked for, so that every file of a pattern is read. Only plain text
    uses `document`. `inputs` and `targets` are the templates of pairs (`tasks.reading.columns`),
    both "" if documents are texts. Only CSV and TSV use `columns` (comma-separated names for files
    without a header), `delimiter`, and `quote` (a character or "none").
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
        options = {
            name: value
            for name in OPTIONS
            if (value := getattr(self, name)) != getattr(default, name)
        }
        if not options:
            return head
        if self.unit is Unit.PAIR:  # templates are kept readable: they hold spaces and braces
            query = urllib.parse.urlencode(options, safe=_READABLE, quote_via=urllib.parse.quote)
        else:
            query = urllib.parse.urlencode(options)
        return f"{head}?{query}"

    @property
    def unit(self) -> Unit:
        """What one document is."""
        return Unit.PAIR if self.inputs else Unit.TEXT


def default_spec(kind: str) -> CorpusSpec:
    """Returns a spec of this kind with default options.

    The built-in corpus is small, so a larger share of it is held out for validation.
    """
    if kind == PYTHON_DOCS:
        return CorpusSpec(kind, split=TRAIN, validation=0.1)
    if kind in _DIALECTS:
        delimiter, quote = _DIALECTS[kind]
        return CorpusSpec(kind, delimiter=delimiter, quote=quote)
    return CorpusSpec(kind, split=TRAIN if kind == HUB else "")


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus.

    `name` is its name inside the corpus, and follows `folder` in its path. All files of a corpus,
    perhaps a million, share one `folder` string. `state` identifies its
    content (an etag or a checksum, if the store reports one); `written` is when a local file was
    last written.
    """

    folder: str
    name: str
    split: str
    bytes: int
    state: dict[str, str]
    written: str = ""

    @property
    def path(self) -> str:
        """The path or URL that opens the file."""
        return self.folder + self.name

    @property
    def etag(self) -> str:
        """The etag that a remote store reports, or the time a local file was written."""
        return "".join(self.state.values()) or self.written


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file that can be read by itself.

    `start` and `stop` count what the format counts (bytes of a file of lines, rows of Parquet);
    `stop` is None for a file that can only be read from start to end. `bytes` is the range's size.
    `cuts` are the only places where it can be cut, beginning with `start`, each with the number of
    rows before it in the file; () if it can be cut anywhere.
    """

    start: int
    stop: int | None
    bytes: int
    cuts: tuple[tuple[int, int], ...] = ()


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

    `name` is unique in its corpus. `splits` are the splits to which its documents may belong; with
    `held_out`, a hash of a document's id decides. `bytes` is the piece's size (Parquet: of the
    text column, uncompressed).
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
    """A corpus as it was listed: plain data without secrets, safe to send to any worker.

    `record` is what a manifest keeps, as JSON: equal content gives equal records, wherever the
    files lie. `notes` are lines to print: which files are not read, or read as validation.
    `module` registers the format of the files; a worker imports it.
    """

    spec: CorpusSpec
    record: dict[str, Any]
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...] = ()
    module: str = ""

    @property
    def max_document_bytes(self) -> int:
        """UTF-8 bytes of the longest document; longer ones are read in parts."""
        return self.record["max_document_bytes"]
