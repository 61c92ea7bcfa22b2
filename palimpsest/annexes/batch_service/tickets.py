"""Tickets and the records that answer them, as servers and clients read them.

docs/batch_service.md describes the protocol.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from tasks.terminal.command_line import UserError

# A ticket is a configuration and a few numbers; the longest schedules fit.
TICKET_BYTES = 1 << 16
# Of batches and of their parts: a run's length, which `TrainingBatches` bounds likewise.
MOST = 1 << 40
_KEYS = ("config", "first", "count", "part", "record")


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Rows of `count` batches from `first` on: part `index` of `parts` equal parts of each batch.

    `config` determines the batches, with the fingerprints of their caches. `record` is a digest of
    a server's examples (`opening.Opened`), which another server's must equal; "" accepts any.
    """

    config: Mapping[str, Any]
    first: int
    count: int = 1
    index: int = 0
    parts: int = 1
    record: str = ""

    def values(self) -> dict[str, Any]:
        """Returns the ticket as JSON values."""
        return {
            "config": dict(self.config),
            "first": self.first,
            "count": self.count,
            "part": [self.index, self.parts],
            "record": self.record,
        }

    def content(self) -> bytes:
        """Returns the ticket as `parse` reads it."""
        return json.dumps(self.values()).encode()

    @classmethod
    def parse(cls, content: bytes) -> "Ticket":
        """Reads a ticket of anybody; raises UserError if a value has another type or size."""
        value = json_object(content, "the ticket")
        if unknown := sorted(value.keys() - _KEYS):
            raise UserError(f"the ticket has {unknown[0]!a:.60}: it may have {', '.join(_KEYS)}")
        part, record = value.get("part", [0, 1]), value.get("record", "")
        if not (isinstance(part, list) and len(part) == 2):
            raise UserError("part must be a list [INDEX, COUNT]")
        if not isinstance(record, str):
            raise UserError("record must be a text")
        parts = _count(part[1], "the count of part", 1)
        return cls(
            config_of(value),
            number_of(value, "first"),
            _count(value.get("count", 1), "count", 1),
            _count(part[0], "the index of part", 0, parts - 1),
            parts,
            record,
        )


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Returns the JSON object in `content`; raises UserError if there is none, or a long one."""
    if len(content) > TICKET_BYTES:
        raise UserError(f"{name} has {len(content):,} bytes, more than {TICKET_BYTES:,}")
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a JSON object")
    return value


def config_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of "config"; raises UserError unless it is an object."""
    found = value.get("config")
    if not isinstance(found, dict):
        raise UserError("config must be an object, as palimpsest.batches(…).config")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def number_of(value: Mapping[str, Any], name: str) -> int:
    """Returns the number under a name; raises UserError unless it is one of 0 or more."""
    return _count(value.get(name), name, 0)


def _count(value: Any, name: str, least: int, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{name} must be a whole number from {least} to {most}")
    return value


def is_narrow(batch: Mapping[str, np.ndarray]) -> bool:
    """Returns whether all values are int32 from 0 to 65,535."""
    return all(
        array.dtype == np.int32 and not np.bitwise_or.reduce(array, axis=None) >> 16
        for array in batch.values()
    )


def record_of(batch: Mapping[str, np.ndarray], narrow: bool) -> pa.RecordBatch:
    """Returns a batch as one column per feature, of uint16 if `narrow`, else without copies.

    A feature of shape [rows, length] is a column of lists of this length.
    """
    made = ((array.astype(np.uint16) if narrow else array) for array in batch.values())
    columns = [_column(np.ascontiguousarray(array)) for array in made]
    return pa.RecordBatch.from_arrays(columns, names=list(batch))


def _column(array: np.ndarray) -> pa.Array:
    column = pa.array(array.reshape(-1))
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def batch_of(record: pa.RecordBatch) -> dict[str, np.ndarray]:
    """Returns the batch of a record, as arrays of its own, which may be written to.

    Columns of uint16 become int32.
    """
    columns = zip(record.schema.names, record.columns, strict=True)
    return {name: _array(column) for name, column in columns}


def _array(column: pa.Array) -> np.ndarray:
    shape = [len(column)]
    while isinstance(column, pa.FixedSizeListArray):
        shape.append(column.type.list_size)
        column = column.values
    values = column.to_numpy(zero_copy_only=True).reshape(shape)
    return values.astype(np.int32 if values.dtype == np.uint16 else values.dtype)
