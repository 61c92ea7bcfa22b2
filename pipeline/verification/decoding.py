"""Compiled decoding of a shard's R rows for verification, a megabyte of records at a time.

Records are decoded, re-encoded and compared byte by byte, which checks lengths, checksums and form
together. Where bytes differ, records are read one at a time to find the fault; there is none if a
different writer merely encoded them in its own form.
"""

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator

import numpy as np

from pipeline.building.rows import framed, text_tokens
from tasks.cache import records
from tasks.cache.manifest import Plan

_BLOCK_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_BEFORE = 12  # bytes of framing before the data: its length and that length's checksum
_AFTER = records.FRAMING_BYTES - _BEFORE


@dataclasses.dataclass
class Rows:
    """Contents of some or all records of a shard; arrays are int64."""

    offsets: np.ndarray  # [R], offset of each record's framing in the file
    lengths: np.ndarray  # [R], number of tokens
    starts: np.ndarray  # [R], number of documents that begin in the row
    positions: np.ndarray  # [sum of starts], positions in their rows at which documents begin
    text: np.ndarray  # [R], number of tokens without separators
    ends: np.ndarray  # [separators], positions of EOS tokens in the stream of all rows of text
    least: int  # lowest id
    most: int  # highest id
    inputs: np.ndarray  # [R], number of input tokens; 0 for texts
    inputs_text: int  # number of tokens of all inputs, without EOS
    unknown: int  # number of unknown tokens


def joined(parts: list[Rows]) -> Rows:
    begins = np.cumsum([0, *(int(part.lengths.sum()) for part in parts)])
    ends = [part.ends + begin for part, begin in zip(parts, begins, strict=False)]

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in parts)])

    return Rows(
        all_of("offsets"), all_of("lengths"), all_of("starts"), all_of("positions"),
        all_of("text"), np.concatenate([np.zeros(0, np.int64), *ends]),
        min((part.least for part in parts), default=np.iinfo(np.int32).max),
        max((part.most for part in parts), default=0),
        all_of("inputs"), sum(part.inputs_text for part in parts),
        sum(part.unknown for part in parts),
    )  # fmt: skip


def blocks(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes, np.ndarray]]:
    """Yields (offset in the file, bytes of whole records, record bounds).

    In a file that ends within a record or has a damaged length, the last record is the remainder.
    `read` returns as many bytes as asked for; fewer only at the end.
    """
    data, offset = b"", 0
    while more := read(max(_BLOCK_BYTES, len(data))):
        data += more
        bounds = _bounds(data)
        if len(bounds) > 1:
            yield offset, data[: bounds[-1]], np.array(bounds, np.int64)
            offset, data = offset + bounds[-1], data[bounds[-1] :]
    if data:
        yield offset, data, np.array([0, len(data)], np.int64)


def _bounds(data: bytes) -> list[int]:
    bounds, place = [0], 0
    while place + _LENGTH.size <= len(data):
        place += _LENGTH.unpack_from(data, place)[0] + records.FRAMING_BYTES
        if place > len(data):
            break
        bounds.append(place)
    return bounds


def decoded(data: bytes, bounds: np.ndarray, plan: Plan) -> Rows:
    """Returns the rows of a shard's records; CorruptRecord names the first bad one."""
    found = _as_we_write(data, bounds, plan) or _one_by_one(data, bounds, plan)
    targets, lengths, others, counts = found
    eos = plan.vocabulary.special_ids.eos
    text = text_tokens(targets, lengths, -1, eos)
    inputs, inputs_text, starts, positions = np.zeros_like(lengths), 0, counts, others
    both = [targets]
    if plan.pairs:
        of_inputs = text_tokens(others, counts, -1, eos)
        inputs, inputs_text = counts, int(of_inputs.sum())
        lengths, text = lengths + counts, text + of_inputs
        starts, positions = np.ones_like(lengths), np.zeros_like(lengths)
        both = [targets, others]
    sizes = [each for each in both if len(each)]
    unknown = plan.vocabulary.special_ids.of_unknown_text
    return Rows(
        bounds[:-1], lengths, starts, positions.astype(np.int64), text,
        np.flatnonzero(targets == eos),
        min((int(size.min()) for size in sizes), default=np.iinfo(np.int32).max),
        max((int(size.max()) for size in sizes), default=0),
        inputs, inputs_text,
        sum(int(np.count_nonzero(each == unknown)) for each in both),
    )  # fmt: skip


# Target ids, number of targets per row, ids of the other feature, number of these per row.
_Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _as_we_write(data: bytes, bounds: np.ndarray, plan: Plan) -> _Lists | None:
    """Returns the lists of both features; None if any byte differs from the build's own form."""
    raw = np.frombuffer(data + bytes(3), np.uint8)  # the loop reads up to three bytes ahead
    begins, ends = bounds[:-1] + _BEFORE, bounds[1:] - _AFTER
    name = "inputs" if plan.pairs else "document_starts"
    lists = []
    try:
        for feature in (b"targets", name.encode()):
            found, places, _, counts = records.find_lists(raw, begins, ends, feature)
            values = records.loops().decoded(found, places, np.zeros_like(counts), counts)
            lists += [values, counts]
    except records.CorruptRecord:
        return None
    targets, lengths, others, counts = lists
    written, _ = framed(targets, lengths, others, counts, name)
    return (targets, lengths, others, counts) if written.tobytes() == data else None


def _one_by_one(data: bytes, bounds: np.ndarray, plan: Plan) -> _Lists:
    targets, others = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    view = memoryview(data)
    for record, (begin, end) in enumerate(itertools.pairwise(bounds)):
        try:
            row = records.decode_row(records.unframe(view[begin:end]))
        except records.CorruptRecord as error:
            raise records.CorruptRecord(str(error), record) from error
        if (row.inputs is None) == (plan.pairs is not None):
            kinds = ("text", "a pair")
            found, wanted = kinds if plan.pairs else reversed(kinds)
            raise records.CorruptRecord(f"it is {found}, but the plan has {wanted}", record)
        targets.append(row.targets)
        others.append(row.document_starts if row.inputs is None else row.inputs)
    lengths, counts = (
        np.array([len(each) for each in of[1:]], np.int64) for of in (targets, others)
    )
    return np.concatenate(targets), lengths, np.concatenate(others), counts
