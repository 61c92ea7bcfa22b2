"""A corpus as plain data: its SPEC, its files, and the pieces that workers read."""

import dataclasses
import urllib.parse
from typing import Any

TRAIN = "train"
VALIDATION = "validation"
# The kind of the built-in corpus; see `builtin`.
PYTHON_DOCS = "python_docs"
# The options that may follow the "?" of a SPEC.
OPTIONS = ("column", "split", "id", "validation")


@dataclasses.dataclass(frozen=True)
class CorpusSpec:
    """A parsed SPEC; `str()` returns a SPEC that parses to an equal value."""

    kind: str
    location: str = ""
    config: str = ""
    revision: str = ""
    column: str = "text"
    split: str = TRAIN
    id: str = ""
    validation: float = 0.01

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
        return f"{head}?{urllib.parse.urlencode(options)}" if options else head


def default_spec(kind: str) -> CorpusSpec:
    """Returns a spec of this kind with default options.

    The built-in corpus is small, so a larger share of it is held out for validation.
    """
    return CorpusSpec(kind, validation=0.1 if kind == PYTHON_DOCS else 0.01)


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    `path` opens it and `name` is its name inside the corpus. `state` identifies its content (an
    etag or a checksum, if the store reports one); `written` is when a local file was last written.
    """

    path: str
    name: str
    split: str
    bytes: int
    state: dict[str, str]
    written: str = ""

    @property
    def etag(self) -> str:
        """The etag that a remote store reports, or the time a local file was written."""
        return "".join(self.state.values()) or self.written


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A range of a file that can be read by itself.

    `start` and `stop` count what the format counts (bytes of a file of lines, rows of Parquet);
    `stop` is None for a file that can only be read from start to end. `bytes` is the range's size.
    """

    start: int
    stop: int | None
    bytes: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """The unit of work: a range of rows or bytes, or some documents of the built-in corpus.

    `name` is unique in its corpus; `splits` are those it may have documents of; `held_out` says
    that a hash of a document's id decides its split. `bytes` is the piece's size (Parquet: of the
    text column, uncompressed). A line belongs to the piece that it begins in. `file_bytes` and
    `etag` are the file's at the time the corpus was listed.
    """

    name: str
    splits: tuple[str, ...]
    bytes: int
    held_out: bool
    format: str
    path: str = ""
    file: str = ""
    start: int = 0
    stop: int | None = None
    file_bytes: int = 0
    etag: str = ""
    members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus as it was listed: plain data without secrets, safe to send to any worker.

    `record` is what a manifest keeps, as JSON: equal content gives equal records, wherever the
    files lie.
    """

    spec: CorpusSpec
    record: dict[str, Any]
    pieces: tuple[Piece, ...]

    @property
    def max_document_bytes(self) -> int:
        """UTF-8 bytes of the longest document; longer ones are read in parts."""
        return self.record["max_document_bytes"]
