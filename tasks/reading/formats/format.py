"""The interface of a file format."""

from collections.abc import Collection
from typing import Protocol

from tasks.document_kind import DocumentKind
from tasks.reading.batches import Batches
from tasks.reading.corpus import Corpus, CorpusSpec, FilePart, FileRange, SourceFile
from tasks.terminal.command_line import UserError, nearest


class Format(Protocol):
    """A file format: checks files, divides them into ranges, and reads them.

    Both methods may raise their libraries' errors for a broken file (OSError, EOFError, ValueError,
    …); the caller turns them into one line that names the file.
    """

    @property
    def options(self) -> Collection[str]:
        """SPEC options that the format reads: COLUMN_OPTIONS if documents have columns."""

    @property
    def ranges_are_rows(self) -> bool:
        """True if ranges count rows; the bytes of a part are then an estimate."""

    def ranges(self, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
        """Checks a file and returns, in order, the ranges that can be read on their own.

        Ranges are cut evenly into parts of the wanted size, and small ones are joined, so `read`
        must accept any start and stop within them. A file without documents has no ranges. Raises
        UserError if a column is missing or does not hold text.
        """

    def read(self, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
        """Yields batches of at most `batch_documents` documents; see `sources.read`.

        `batches.collect` makes batches of single documents.
        """


def missing_column(path: str, column: str, known: list[str], spec: CorpusSpec) -> UserError:
    """Returns the error for a file whose columns `known` lack `column`."""
    advice = "add ?column=NAME"
    if column == spec.id:
        advice = "give another ?id=NAME, or none"
    elif spec.unit is DocumentKind.PAIR:
        advice = "name other columns in ?inputs=…&targets=…"
    # Quotes show a space at an end.
    shown = [repr(name) if name != name.strip() else name for name in known]
    return UserError(
        f"{path} has no column {column}{nearest(column, shown)}; it has {', '.join(shown)}: "
        f"{advice}"
    )


def innermost(known: Collection[str]) -> list[str]:
    """Returns the columns that hold no other, of `known` ones that may be nested."""
    outer = {name[:place] for name in known for place, mark in enumerate(name) if mark == "."}
    return [name for name in known if name not in outer]


def not_text(path: str, column: str, kind: str, known: Collection[str]) -> UserError:
    """Returns the error for a column of another kind; `known` are all columns, also nested ones."""
    inner = [name for name in known if name.startswith(f"{column}.")]
    advice = f": name a column in it, such as {inner[0]}" if inner else ""
    return UserError(f"{path}: column {column} is {kind}, not text{advice}")
