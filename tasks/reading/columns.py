"""Makes the text of a document, or the two sides of a pair, from a row's values.

A template makes one side of a pair. It is a column name, or text with columns in braces, such as
`{premise} </s> {hypothesis}`; `{{` and `}}` stand for braces. Columns may hold text, whole numbers,
or booleans (written `true` and `false`).
"""

import dataclasses
import functools
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.reading import batches
from tasks.reading.long_documents import Content
from tasks.unit import Unit

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.reading.corpus import CorpusSpec

# Problems that a row's columns can have.
MISSING, NULL, NOT_TEXT, INVALID = "missing column", "null", "not a string", "invalid UTF-8"


class _Unusable(Exception):
    """A value cannot be used; the message names its problem."""


@dataclasses.dataclass(frozen=True)
class Template:
    """A parsed template; `parts` lists (text before the column, column or "") in order.

    With `only_text`, numbers and booleans count as problems.
    """

    parts: tuple[tuple[str, str], ...]
    only_text: bool = False

    @property
    def columns(self) -> list[str]:
        return [column for _, column in self.parts if column]

    def render(self, row: Mapping[str, Any]) -> bytes:
        """Fills in a row's values and returns UTF-8; raises _Unusable if a value has a problem."""
        out = []
        for before, column in self.parts:
            out.append(before)
            if not column:
                continue
            if column not in row:
                raise _Unusable(MISSING)
            value = row[column]
            if not isinstance(value, str):
                if value is None:
                    raise _Unusable(NULL)
                if self.only_text or not isinstance(value, int):
                    raise _Unusable(NOT_TEXT)
                value = str(value).lower() if isinstance(value, bool) else str(value)
            out.append(value)
        return "".join(out).encode()


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Template:
    """Parses a template; raises ValueError if braces are unmatched or no column is named."""
    if "{" not in text and "}" not in text:
        return Template((("", text),))
    parts = []
    for before, column, form, conversion in string.Formatter().parse(text):
        if column == "":
            raise ValueError("{} names no column: write {COLUMN}")
        if form or conversion:
            raise ValueError(f"{{{column}}} is followed by a format, which templates cannot have")
        parts.append((before, column or ""))
    template = Template(tuple(parts))
    if not template.columns:
        raise ValueError("a template must name a {column}")
    return template


class Columns:
    """The columns that a corpus reads for texts and ids."""

    def __init__(self, spec: "CorpusSpec"):
        self.unit = spec.unit
        self._templates = [Template((("", spec.column),), only_text=True)]
        if self.unit is Unit.PAIR:
            self._templates = [parse(spec.inputs), parse(spec.targets)]
        self.names = tuple(dict.fromkeys(name for each in self._templates for name in each.columns))
        # Columns that a file must have.
        self.checked = (*self.names, spec.id) if spec.id else self.names

    def content(self, row: Mapping[str, Any]) -> tuple[Content, str | None]:
        """Returns (content, None) for a row of values, or (None, problem)."""
        try:
            sides = [template.render(row) for template in self._templates]
        except _Unusable as error:
            return None, str(error)
        except UnicodeEncodeError:  # JSON can hold half a surrogate pair, which is not a character
            return None, INVALID
        return (sides[0] if self.unit is Unit.TEXT else tuple(sides)), None

    def contents(self, rows: "pa.RecordBatch") -> tuple[list["pa.Array"], "pa.Array"]:
        """Returns (one array of texts per column of `Unit.columns`, problems) for many rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        strings, problems = {}, None
        for name in self.names:
            strings[name], of_column = _strings(rows.column(name))
            problems = of_column if problems is None else pc.coalesce(problems, of_column)
        if self.unit is Unit.TEXT:
            return [strings[self.names[0]]], problems
        valid, nothing = pc.is_null(problems), pa.scalar(None, pa.large_string())
        sides = []
        for template in self._templates:
            pieces: list[Any] = []
            for before, column in template.parts:
                pieces += [pa.scalar(before, pa.large_string())] if before else []
                pieces += [strings[column]] if column else []
            joined = pc.binary_join_element_wise(*pieces, pa.scalar("", pa.large_string()))
            sides.append(pc.if_else(valid, joined, nothing))
        return sides, problems


def _strings(values: "pa.Array") -> tuple["pa.Array", "pa.Array"]:
    """Returns (large_string texts, problems) for a column."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        values = values.cast(pa.string())
    return batches.as_text(values.cast(pa.large_binary()))
