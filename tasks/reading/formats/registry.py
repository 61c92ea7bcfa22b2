"""File formats by the kind in a SPEC; Hub data sets use the name of their `datasets` builder."""

import importlib
from collections.abc import Iterator, Mapping

from tasks import annexes
from tasks.reading.formats.format import Format
from tasks.reading.formats.json_lines import JsonLines
from tasks.reading.formats.parquet import Parquet
from tasks.reading.formats.text import Text
from tasks.terminal.command_line import UserError

__all__ = ["register_format"]


class _Formats(Mapping[str, Format]):
    """The formats of the core, registered ones, and those of annexes, imported when used."""

    def __init__(self) -> None:
        parquet, json, text = Parquet(), JsonLines(), Text()
        self.known: dict[str, Format] = {"parquet": parquet, "json": json, "text": text}

    def __getitem__(self, kind: str) -> Format:
        if kind not in self.known:
            form = annexes.get("formats", kind)
            if form is None:
                raise KeyError(kind)
            self.known[kind] = form
        return self.known[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self.known or kind in annexes.entries("formats")

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self.known, *annexes.entries("formats")))

    def __len__(self) -> int:
        return len(list(iter(self)))


FORMATS = _Formats()


def register_format(kind: str, form: Format) -> None:
    """Makes `KIND:GLOB` a corpus with files of this format; each kind has one class.

    Call it when the module that defines the format is imported: workers import that module.
    """
    known = FORMATS.get(kind)
    if known is not None and type(known).__qualname__ != type(form).__qualname__:
        raise ValueError(f"the kind {kind} is taken by {type(known).__name__}")
    FORMATS.known[kind] = form


def format_of(kind: str, module: str = "") -> Format:
    """Returns a format, importing `module` to register it if needed."""
    if kind not in FORMATS and module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"{module}, which registers the format {kind}, cannot be imported: {error}"
            ) from error
    return FORMATS[kind]
