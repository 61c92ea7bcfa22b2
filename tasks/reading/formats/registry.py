"""File formats by the kind in a SPEC; Hub data sets use the name of their `datasets` builder."""

import importlib

from tasks.annexes import Registry
from tasks.reading.formats.format import Format
from tasks.reading.formats.json_lines import JsonLines
from tasks.reading.formats.parquet import Parquet
from tasks.reading.formats.text import Text
from tasks.terminal.command_line import UserError

__all__ = ["register_format"]

FORMATS: Registry[Format] = Registry(
    "formats", {"parquet": Parquet(), "json": JsonLines(), "text": Text()}
)


def register_format(kind: str, form: Format) -> None:
    """Makes `KIND:GLOB` a corpus with files of this format; each kind has one class.

    Call it when the module that defines the format is imported: workers import that module.
    """
    known = FORMATS.get(kind)
    if known is not None and type(known).__qualname__ != type(form).__qualname__:
        raise ValueError(f"the kind {kind} is taken by {type(known).__name__}")
    FORMATS.own[kind] = form


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
