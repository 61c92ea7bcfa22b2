"""Pairs: documents with two sides, inputs and targets, made from columns by templates.

A template is the name of a column, or text with columns in braces: `{premise} </s> {hypothesis}`.
`{{` and `}}` stand for braces. A column of a template holds text, whole numbers or true and false,
which are written as `true` and `false`.

Columns of a batch of pairs: `id` string, `inputs` and `targets` large_string, `problem` string,
`part` int32 (always 0), `place` string; otherwise as `sources.read` describes.
"""

import dataclasses
import functools
import string
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tasks.unit import Unit

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.reading.batches import Batches
    from tasks.reading.corpus import CorpusSpec

    Sides = tuple[pa.Array, pa.Array, pa.Array]

# (id, inputs, targets, problem, place); both sides are None if there is a problem.
Pair = tuple[str, bytes | None, bytes | None, str | None, str]
# Problems of a row that its columns cause.
MISSING, NULL, NOT_TEXT, INVALID = "missing column", "null", "not a string", "invalid UTF-8"


@dataclasses.dataclass(frozen=True)
class Template:
    """A parsed template: `parts` are (text before the column, column or "") in order."""

    parts: tuple[tuple[str, str], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column))

    def render(self, row: Mapping[str, Any]) -> tuple[bytes | None, str | None]:
        """Returns (UTF-8, None) for a row of values, or (None, its problem)."""
        out = []
        for before, column in self.parts:
            out.append(before)
            if not column:
                continue
            if column not in row:
                return None, MISSING
            value = row[column]
            if value is None:
                return None, NULL
            if isinstance(value, bool):
                value = "true" if value else "false"
            elif isinstance(value, int):
                value = str(value)
            elif not isinstance(value, str):
                return None, NOT_TEXT
            out.append(value)
        try:
            return "".join(out).encode(), None
        except UnicodeEncodeError:  # JSON can hold half a surrogate pair
            return None, INVALID


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Template:
    """Parses a template.

    Raises:
      ValueError: its braces do not match, or it names no column.
    """
    if "{" not in text and "}" not in text:
        return Template((("", text),))
    parts = []
    for before, column, form, conversion in string.Formatter().parse(text):
        if column == "":
            raise ValueError("{} names no column: write {COLUMN}")
        if form or conversion:
            raise ValueError(f"{{{column}}} is followed by a format, which templates do not have")
        parts.append((before, column or ""))
    template = Template(tuple(parts))
    if not template.columns:
        raise ValueError("a template needs a {column}")
    return template


def columns(spec: "CorpusSpec") -> tuple[str, ...]:
    """Returns the columns that hold the text of a corpus's documents, each once."""
    if spec.unit is Unit.TEXT:
        return (spec.column,)
    both = (*parse(spec.inputs).columns, *parse(spec.targets).columns)
    return tuple(dict.fromkeys(both))


def render(
    spec: "CorpusSpec", row: Mapping[str, Any]
) -> tuple[bytes | None, bytes | None, str | None]:
    """Returns (inputs, targets, problem) of a row of values."""
    inputs, problem = parse(spec.inputs).render(row)
    if problem is None:
        targets, problem = parse(spec.targets).render(row)
        if problem is None:
            return inputs, targets, None
    return None, None, problem


def batch_of(ids: "pa.Array", sides: "Sides", places: "pa.Array") -> "pa.RecordBatch":
    """Returns a batch of pairs; `sides` are inputs, targets and problems."""
    import numpy as np
    import pyarrow as pa

    inputs, targets, problems = sides
    return pa.RecordBatch.from_pydict(
        {
            "id": ids,
            "inputs": inputs,
            "targets": targets,
            "problem": problems,
            "part": pa.array(np.zeros(len(ids), np.int32)),
            "place": places,
        }
    )


def collect(found: Iterable[Pair], count: int) -> "Batches":
    """Yields batches of at most `count` pairs and `batches.BATCH_BYTES`, unless a pair has more."""
    from tasks.reading.batches import BATCH_BYTES

    rows: list[Pair] = []
    size = 0
    for pair in found:
        length = len(pair[1] or b"") + len(pair[2] or b"")
        if rows and (len(rows) >= count or size + length > BATCH_BYTES):
            yield _batch(rows)
            rows, size = [], 0
        rows.append(pair)
        size += length
    if rows:
        yield _batch(rows)


def _batch(rows: list[Pair]) -> "pa.RecordBatch":
    import pyarrow as pa

    from tasks.reading.batches import text_array

    ids, inputs, targets, problems, places = map(list, zip(*rows, strict=True))
    return batch_of(
        pa.array(ids, pa.string()),
        (text_array(inputs), text_array(targets), pa.array(problems, pa.string())),
        pa.array(places, pa.string()),
    )


def rendered(spec: "CorpusSpec", columns: Mapping[str, "pa.Array"]) -> "Sides":
    """Returns (inputs, targets, problems) of whole columns, as `render` does row by row.

    The columns hold text, whole numbers or booleans.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    strings, problems = {}, None
    for name, values in columns.items():
        strings[name], of_column = _strings(values)
        problems = of_column if problems is None else pc.coalesce(problems, of_column)
    nothing = pa.scalar(None, pa.large_string())
    valid = pc.is_null(problems)
    sides = []
    for side in (parse(spec.inputs), parse(spec.targets)):
        pieces: list[Any] = []
        for before, column in side.parts:
            if before:
                pieces.append(pa.scalar(before, pa.large_string()))
            if column:
                pieces.append(strings[column])
        joined = pc.binary_join_element_wise(*pieces, pa.scalar("", pa.large_string()))
        sides.append(pc.if_else(valid, joined, nothing))
    inputs, targets = sides
    return inputs, targets, problems


def _strings(values: "pa.Array") -> tuple["pa.Array", "pa.Array"]:
    """Returns (large_string texts, problems) of a column."""
    import pyarrow as pa

    from tasks.reading import batches

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        values = values.cast(pa.string())
    return batches.as_text(values.cast(pa.large_binary()))
