"""Makes the text of a document, or the two sides of a pair, from a row's values.

A template makes one side of a pair. It is a column name, or text with columns in braces, such as
`{premise} </s> {hypothesis}`; `{{` and `}}` stand for braces. Columns may hold text, numbers or
booleans, which are written as in JSON: 4, 3.8, 5.0, true.

A column may be nested: `translation.en` is the member `en` of the column `translation`, unless
there is a column of that whole name.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tasks.document_kind import DocumentKind
from tasks.reading import batches
from tasks.reading.long_documents import Content

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.reading.corpus import CorpusSpec

# Problems that a row's columns can have.
MISSING, NULL, NOT_TEXT, INVALID = "missing column", "null", "not a string", "invalid UTF-8"
NOT_FINITE = "not a finite number"


_ABSENT: Any = object()


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
            value = row[column] if column in row else nested(row, column, _ABSENT)
            if not isinstance(value, str):
                if value is None:
                    raise _Unusable(NULL)
                if self.only_text or not isinstance(value, int):
                    _check_float(value, self.only_text)
                value = str(value).lower() if isinstance(value, bool) else str(value)
            out.append(value)
        return "".join(out).encode()


def _check_float(value: Any, only_text: bool) -> None:
    if value is _ABSENT:
        raise _Unusable(MISSING)
    if only_text or not isinstance(value, float):
        raise _Unusable(NOT_TEXT)
    if not math.isfinite(value):
        raise _Unusable(NOT_FINITE)


def nested(row: Mapping[str, Any], column: str, absent: Any = None) -> Any:
    """Returns the value of `column`, which may be nested; None inside a null, else `absent`."""
    if column in row:
        return row[column]
    for outer, inner in _divided(column):
        if isinstance(row.get(outer), dict):
            return nested(row[outer], inner, absent)
        if outer in row and row[outer] is None:
            return None
    return absent


def _divided(name: str) -> Iterator[tuple[str, str]]:
    """Yields what is before and after each dot of a column's name."""
    for place, mark in enumerate(name):
        if mark == ".":
            yield name[:place], name[place + 1 :]


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
        if self.unit is DocumentKind.PAIR:
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
        return (sides[0] if self.unit is DocumentKind.TEXT else tuple(sides)), None

    def contents(self, rows: "pa.RecordBatch") -> tuple[list["pa.Array"], "pa.Array"]:
        """Returns (an array of texts per column of `DocumentKind.columns`, problems) for rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        strings, problems = {}, None
        for name in self.names:
            strings[name], of_column = _strings(column_of(rows, name))
            problems = of_column if problems is None else pc.coalesce(problems, of_column)
        if self.unit is DocumentKind.TEXT:
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


def column_of(rows: "pa.RecordBatch", name: str) -> "pa.Array":
    """Returns a column, which may be nested; null where an outer one is."""
    import pyarrow.compute as pc

    top, *inner = path_of(rows.schema, name)
    return pc.struct_field(rows.column(top), inner) if inner else rows.column(top)


def path_of(fields: Iterable["pa.Field"], name: str) -> list[str]:
    """Returns the names of a column and, before it, of those that it is nested in; [] if none."""
    import pyarrow as pa

    kinds = {field.name: field.type for field in fields}
    if name in kinds:
        return [name]
    for outer, inner in _divided(name):
        if outer in kinds and pa.types.is_struct(kinds[outer]):
            return [outer, *path_of(kinds[outer], inner)]
    return []


def _strings(values: "pa.Array") -> tuple["pa.Array", "pa.Array"]:
    """Returns (large_string texts, problems) for a column."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_floating(values.type):
        return _spelled_floats(values)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        values = values.cast(pa.string())
    return batches.as_text(values.cast(pa.large_binary()))


def _spelled_floats(values: "pa.Array") -> tuple["pa.Array", "pa.Array"]:
    """Returns (large_string texts, problems): the shortest that read back, as in JSON."""
    import pyarrow as pa
    import pyarrow.compute as pc

    finite = pc.is_finite(values)
    # Arrow itself writes 5 for 5.0 and 0.00001 for 1e-05.
    spelled = pa.array(values.to_numpy(zero_copy_only=False).astype(str), pa.large_string())
    texts = pc.if_else(finite, spelled, pa.scalar(None, pa.large_string()))
    problems = pc.if_else(finite, pa.scalar(None, pa.string()), NOT_FINITE)
    return texts, pc.if_else(pc.is_null(values), NULL, problems)
