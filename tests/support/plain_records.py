"""The encoder of cache records in plain Python, one record at a time.

pipeline/building/rows.py writes the same bytes, many records at a time, in compiled code.
"""

import json
import struct

import numpy as np

from tasks.cache import records
from tasks.storage import protobuf


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    length_crc, data_crc = (struct.pack("<I", records.masked_crc(part)) for part in (length, data))
    return b"".join((length, length_crc, data, data_crc))


def encode_varints(values: np.ndarray) -> bytes:
    """Encodes integers of 0 or more, one after the other."""
    return b"".join(map(protobuf.varint, np.asarray(values).tolist()))


def encode_row(targets: np.ndarray, document_starts: np.ndarray) -> bytes:
    """Serialises one row as a tf.train.Example, its features in alphabetical order."""
    entries = []
    for name, values in ((b"document_starts", document_starts), (b"targets", targets)):
        packed = encode_varints(values)
        feature = protobuf.field(3, protobuf.field(1, packed) if packed else b"")
        entries.append(protobuf.field(1, protobuf.field(1, name) + protobuf.field(2, feature)))
    return protobuf.field(1, b"".join(entries))


def read_rows(data: bytes) -> list[dict[str, list[int]]]:
    """Returns a file's rows, each with its features by name, without a line of the project's."""
    rows, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        (features,) = _fields(data[at + 12 : at + 12 + length])[1]
        row = {}
        for entry in _fields(features)[1]:
            parts = _fields(entry)
            ((name,), (feature,)) = parts[1], parts[2]
            (values,) = _fields(feature)[3]
            row[name.decode()] = _varints(b"".join(_fields(values)[1]))
        rows.append(row)
        at += 12 + length + 4
    return rows


def without_plan(receipt: bytes) -> dict:
    """Returns a receipt without the name of its plan, which names the corpus's files."""
    return {key: value for key, value in json.loads(receipt).items() if key != "plan"}


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Returns the fields of a message that has only fields with a length."""
    found: dict[int, list[bytes]] = {1: []}
    while message:
        tag, _, rest = message[0], *_first_varint(message)
        length, rest = _first_varint(rest)
        found.setdefault(tag >> 3, []).append(rest[:length])
        message = rest[length:]
    return found


def _first_varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for at, byte in enumerate(data):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, data[at + 1 :]
    raise ValueError("a varint is cut short")


def _varints(data: bytes) -> list[int]:
    values = []
    while data:
        value, data = _first_varint(data)
        values.append(value)
    return values
