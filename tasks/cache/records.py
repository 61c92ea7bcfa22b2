"""Decodes the records of a cache's shards: tf.train.Example protos in TFRecord framing.

TensorFlow is not used: importing it takes 7 seconds and 730 MB.

Source: TensorFlow's `core/lib/io/record_writer.h` (framing, masked CRC) and
`core/example/{example,feature}.proto`.

A row has two int64 list features. A row of text has
  document_starts  positions in `targets` at which a document begins (empty inside a long document)
  targets          token ids, at most `row_tokens`
and a row of pairs has, without EOS,
  inputs           token ids of the inputs
  targets          token ids of the targets
"""

import dataclasses
import functools
import importlib
import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from tasks.storage import protobuf
from tasks.vocabulary import EOS_ID

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
FRAMING_BYTES = _HEADER.size + _FOOTER.size
_CRC_MASK_DELTA = 0xA282EAD8


class CorruptRecord(Exception):
    """A record's checksum or structure is wrong; `record` is its index within the call."""

    def __init__(self, reason: str, record: int = 0):
        super().__init__(reason)
        self.record = record


@dataclasses.dataclass(frozen=True)
class Row:
    """One record: `targets` int32[<= row_tokens], `document_starts` int32[number of starts].

    A pair also has `inputs`, int32, and one document, which begins at 0.
    """

    targets: np.ndarray
    document_starts: np.ndarray
    inputs: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """All ids of the row: `inputs`, if any, then `targets`."""
        return self.targets if self.inputs is None else np.append(self.inputs, self.targets)


def masked_crc(data: bytes | memoryview) -> int:
    """Returns the CRC-32C of `data`, rotated and offset as TFRecord stores it.

    Source: TensorFlow `core/lib/hash/crc32c.h`, Mask.
    """
    crc = google_crc32c.value(bytes(data))
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK_DELTA) & 0xFFFFFFFF


@functools.lru_cache(maxsize=4096)  # rows have a few hundred different lengths
def length_crc(length: int) -> int:
    """Returns the masked CRC-32C of a record's length in bytes."""
    return masked_crc(struct.pack("<Q", length))


def unframe(record: bytes | memoryview) -> memoryview:
    """Returns the data of one TFRecord record; raises CorruptRecord if a length or CRC is wrong."""
    view = memoryview(record)
    if len(view) < FRAMING_BYTES:
        raise CorruptRecord("the record is cut short")
    length, crc = _HEADER.unpack_from(view)
    if crc != masked_crc(view[:8]):
        raise CorruptRecord("the checksum of the record's length does not match")
    if length + FRAMING_BYTES != len(view):
        there = len(view) - FRAMING_BYTES
        raise CorruptRecord(f"the record says {length} bytes, but there are {there}")
    data = view[_HEADER.size : _HEADER.size + length]
    if _FOOTER.unpack_from(view, _HEADER.size + length)[0] != masked_crc(data):
        raise CorruptRecord("the checksum of the record's data does not match")
    return data


def decode_varints(data: bytes | memoryview) -> np.ndarray:
    """Decodes protocol-buffer varints: int32 [number of values]."""
    # The loop reads up to three bytes after a number.
    raw = np.frombuffer(bytes(data) + bytes(3), np.uint8)
    size = len(raw) - 3
    if size and raw[size - 1] >= 0x80:
        raise CorruptRecord("a number is cut short")
    none = np.zeros(1, np.int64)
    return loops().decoded(raw, none, none, none + np.count_nonzero(raw[:size] < 0x80))


def _fields(
    message: memoryview, kinds: tuple[int, ...] = (protobuf.BYTES,)
) -> Iterator[tuple[int, memoryview]]:
    try:
        for number, kind, payload in protobuf.fields(message):
            if kind not in kinds:
                raise CorruptRecord("not a row of this format")
            yield number, payload
    except protobuf.Malformed as error:
        raise CorruptRecord(f"not a row of this format: {error}") from error


def _int64_lists(data: bytes | memoryview) -> dict[bytes, bytes]:
    """Returns the varints of each feature of a tf.train.Example, none for other kinds of features.

    Lists may come in pieces, and unpacked: each value is then a field of its own.
    """
    found: dict[bytes, bytes] = {}
    for _, features in _fields(memoryview(data)):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            lists = [ids for kind, ids in _fields(parts.get(2, memoryview(b""))) if kind == 3]
            found[bytes(parts.get(1, b""))] = b"".join(
                bytes(varints)
                for ids in lists
                for _, varints in _fields(ids, (protobuf.BYTES, protobuf.VARINT))
            )
    return found


def decode_row(data: bytes | memoryview) -> Row:
    """Parses one row, written by pipeline.build or by another program as a tf.train.Example.

    Raises CorruptRecord for any other bytes.
    """
    found = {name: decode_varints(varints) for name, varints in _int64_lists(data).items()}
    if b"targets" not in found:
        raise CorruptRecord("the record has no feature 'targets'")
    if b"inputs" in found:
        return Row(found[b"targets"], np.zeros(1, np.int32), found[b"inputs"])
    return Row(found[b"targets"], found.get(b"document_starts", np.zeros(0, np.int32)))


def check_framing(data: bytes, bounds: np.ndarray) -> None:
    """Verifies lengths and checksums of concatenated TFRecord records; raises CorruptRecord.

    `bounds`, int64 [records + 1], holds each record's start in `data`, then the end of the last.
    """
    raw, begins, ends, sizes = (
        np.frombuffer(data, np.uint8),
        bounds[:-1],
        bounds[1:],
        np.diff(bounds),
    )
    if len(sizes) and sizes.min() < FRAMING_BYTES:
        raise CorruptRecord("the record is cut short", int(sizes.argmin()))
    heads = raw[begins[:, None] + np.arange(_HEADER.size)]
    lengths = heads[:, :8].copy().view("<u8")[:, 0].astype(np.int64)
    length_crcs = heads[:, 8:].copy().view("<u4")[:, 0]
    feet = raw[(ends - _FOOTER.size)[:, None] + np.arange(_FOOTER.size)]
    data_crcs = feet.view("<u4")[:, 0]
    expected = [length_crc(size) for size in (sizes - FRAMING_BYTES).tolist()]
    value = google_crc32c.value
    places = zip((begins + _HEADER.size).tolist(), (ends - _FOOTER.size).tolist(), strict=True)
    crcs = np.array([value(data[begin:end]) for begin, end in places], np.uint32)
    crcs = ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_CRC_MASK_DELTA)
    wrong = lengths != sizes - FRAMING_BYTES
    wrong |= (length_crcs != np.array(expected, np.uint32)) | (data_crcs != crcs)
    for record in np.flatnonzero(wrong).tolist():
        try:  # `unframe` finds which of the three is wrong
            unframe(data[begins[record] : ends[record]])
        except CorruptRecord as error:
            raise CorruptRecord(str(error), record) from error


def find_lists(
    raw: np.ndarray, begins: np.ndarray, ends: np.ndarray, name: bytes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Finds the ids of feature `name` in tf.train.Examples, each raw[begin:end].

    Returns (uint8 bytes, and in these the lists' begins, ends and numbers of ids, each int64
    [records]). The bytes are `raw`, followed by the lists that are not packed in one piece. Raises
    CorruptRecord, which names the record, if one is not an Example or lacks such a list.
    """
    found = loops().lists_of(raw, begins, ends, np.frombuffer(name, np.uint8))
    joined, size = [raw], len(raw)
    for record in np.flatnonzero(found[0] < 0).tolist():
        code = int(found[0][record])
        if code == loops().IN_PIECES:
            varints = _in_pieces(raw[begins[record] : ends[record]], name, record)
            joined.append(varints)
            found[0][record], found[1][record] = size, size + len(varints)
            found[2][record] = np.count_nonzero(varints < 0x80)
            size += len(varints)
            continue
        what = {
            -1: f"the record has no feature {name.decode()!r}",
            -2: f"its feature {name.decode()!r} does not hold integers",
        }
        raise CorruptRecord(what.get(code, "not a row of this format"), record)
    if len(joined) > 1:
        raw = np.concatenate([*joined, np.zeros(3, np.uint8)])  # `decoded` reads ahead
    return raw, *found


def _in_pieces(example: np.ndarray, name: bytes, record: int) -> np.ndarray:
    try:
        varints = np.frombuffer(_int64_lists(example.tobytes())[name], np.uint8)
    except CorruptRecord as error:
        raise CorruptRecord(str(error), record) from error
    if len(varints) and varints[-1] >= 0x80:
        raise CorruptRecord("a number is cut short", record)
    return varints


class BareRows:
    """Rows of tokens of type `kind`, without framing or checksums, as Megatron writes them.

    `data` are the concatenated rows; `bounds`, int64 [rows + 1], their starts and the end of
    the last; `tokens`, int64 [rows], their token counts. Raises CorruptRecord if a count is wrong.
    """

    def __init__(self, data: bytes, bounds: np.ndarray, tokens: np.ndarray, kind: np.dtype):
        for row in np.flatnonzero(np.diff(bounds) != tokens * kind.itemsize).tolist():
            size = int(bounds[row + 1] - bounds[row])
            raise CorruptRecord(f"it has {size:,} bytes for {tokens[row]:,} tokens", row)
        self._values, self._begins = np.frombuffer(data, kind), bounds[:-1] // kind.itemsize

    def tokens(self, records: np.ndarray, skips: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns tokens [skip, skip + count) of each record's `targets`, concatenated, int32."""
        shifts = self._begins[records] + skips - (np.cumsum(counts) - counts)
        return self._values[np.arange(counts.sum()) + np.repeat(shifts, counts)].astype(np.int32)


class Records:
    """Whole records read at once; verifies every checksum and decodes requested tokens.

    Python verifies one checksum per record; compiled loops do the rest. A row written by
    pipeline.build ends with its tokens, so their number, known from the index, gives their start.
    Other rows are decoded one at a time by `decode_row`.

    Arguments are as in `BareRows`. Raises CorruptRecord, which names the record, if a checksum, a
    length or a number of tokens is wrong.
    """

    _leaves_eos_out = False

    def __init__(self, data: bytes, bounds: np.ndarray, tokens: np.ndarray):
        check_framing(data, bounds)
        self._raw = np.frombuffer(data, np.uint8)
        self._begins, self._ends = bounds[:-1] + _HEADER.size, bounds[1:] - _FOOTER.size
        self._targets = self._feature(b"targets", self._ends, tokens)

    def tokens(self, records: np.ndarray, skips: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self._targets.tokens(records, skips, counts)

    def document_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (concatenated document starts, int32; their number per record, int64)."""
        found = find_lists(self._raw, self._begins, self._ends, b"document_starts")
        raw, begins, _, counts = found
        return loops().decoded(raw, begins, np.zeros_like(counts), counts), counts

    def _feature(self, name: bytes, ends: np.ndarray | None, counts: np.ndarray) -> "_Feature":
        if ends is not None:  # ours: each record ends, at `ends`, with its `counts` ids
            begins = loops().begins_of(self._raw, ends, counts)
            if not len(begins) or begins.min() >= 0:
                heads = [_head(name, size) for size in (ends - begins).tolist()]
                lengths = np.array([len(head) for head in heads], np.int64)
                joined = np.frombuffer(b"".join(heads), np.uint8)
                if loops().preceded(self._raw, begins, joined, lengths):
                    return _Feature(self._raw, begins, begins - lengths)
        raw, begins, ends, there = find_lists(self._raw, self._begins, self._ends, name)
        if self._leaves_eos_out:
            last = loops().ending_in(raw, begins, ends, EOS_ID)
            there = there - (last & (there == counts + 1))
        for record in np.flatnonzero(there != counts).tolist():
            raise CorruptRecord(
                f"it has {there[record]} tokens, but should have {counts[record]}", record
            )
        return _Feature(raw, begins, None)


class PairRecords(Records):
    """Whole records of pairs read at once; see `Records`.

    `inputs` and `targets`, int64 [records], count the ids per side. An EOS at the end of a side,
    which other programs may write, is not counted.
    """

    _leaves_eos_out = True

    def __init__(self, data: bytes, bounds: np.ndarray, inputs: np.ndarray, targets: np.ndarray):
        super().__init__(data, bounds, targets)
        self._inputs = self._feature(b"inputs", self._targets.heads, inputs)

    def inputs(self, records: np.ndarray, skips: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self._inputs.tokens(records, skips, counts)


@dataclasses.dataclass(frozen=True)
class _Feature:
    """A list of ids in each record."""

    raw: np.ndarray  # uint8, the records, perhaps followed by lists
    begins: np.ndarray  # int64 [records], where the list begins in `raw`
    # int64 [records], where the feature's map entry begins in `raw`; None if unknown.
    heads: np.ndarray | None

    def tokens(self, records: np.ndarray, skips: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return loops().decoded(self.raw, self.begins[records], skips, counts)


@functools.cache
def loops() -> Any:
    """Imports the compiled loops on first use; importing takes a second."""
    return importlib.import_module("tasks.cache.loops")


@functools.lru_cache(maxsize=4096)
def _head(name: bytes, size: int) -> bytes:
    """Returns the bytes from the start of feature `name`'s map entry to its `size` value bytes."""
    head = b""
    for number in (1, 3, 2):
        head = protobuf.tag(number) + protobuf.varint(len(head) + size) + head
    head = protobuf.field(1, name) + head
    return protobuf.tag(1) + protobuf.varint(len(head) + size) + head
