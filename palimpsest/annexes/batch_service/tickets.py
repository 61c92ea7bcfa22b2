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


def record_of(batch: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Returns a batch as one column per feature, without copies.

    A feature of shape [rows, length] is a column of lists of this length.
    """
    columns = [_column(np.ascontiguousarray(array)) for array in batch.values()]
    return pa.RecordBatch.from_arrays(columns, names=list(batch))


def schema_of(spec: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> pa.Schema:
    """Returns the schema of the records of batches with these shapes and types."""
    empty = {name: np.zeros((0, *shape[1:]), kind) for name, (shape, kind) in spec.items()}
    return record_of(empty).schema


def _column(array: np.ndarray) -> pa.Array:
    column = pa.array(array.reshape(-1))
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def batch_of(record: pa.RecordBatch) -> dict[str, np.ndarray]:
    """Returns the batch of a record, as arrays of its own, which may be written to."""
    return {name: _array(record.column(name)) for name in record.schema.names}


def _array(column: pa.Array) -> np.ndarray:
    shape = [len(column)]
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
    return column.to_numpy(zero_copy_only=True).reshape(shape).copy()
