"""The encoder of cache records in plain Python, one record at a time.

pipeline/building/rows.py writes the same bytes, many records at a time, in compiled code.
"""

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
