"""Reads TensorFlow checkpoints, PREFIX.index and PREFIX.data-00000-of-0000N, without TensorFlow.

The index is a sorted table in LevelDB's format: blocks of entries whose keys share prefixes, an
index of the blocks, and a footer. An entry locates a variable's bytes.

Source: tensorflow, `core/util/tensor_bundle/tensor_bundle.cc`, `core/protobuf/tensor_bundle.proto`
and `core/lib/io/table_format.txt`.
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tasks.cache.records import masked_crc
from tasks.storage import files, protobuf
from tasks.terminal.command_line import UserError
from trainer.checkpoints.tensors import Index, Tensor

SUFFIX = ".index"
_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
# After a block: its compression and its checksum.
_TRAILER = struct.Struct("<BI")
_UNCOMPRESSED, _BIG_ENDIAN = 0, 1
# DataType of types.proto.
_DTYPES = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}


class _Entry(NamedTuple):
    """The location of a variable's bytes; `dtype` is None for types that models do not use."""

    dtype: np.dtype | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    divided: bool


def load(prefix: str) -> dict[str, Tensor]:
    """Returns a checkpoint's numeric variables by name, read lazily."""
    path = prefix + SUFFIX
    try:
        table = dict(_table(files.read_bytes(path)))
        header = _numbers(table.pop(b""))
        entries = {key.decode(): _entry(value) for key, value in table.items()}
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise UserError(f"{path} is not the index of a TensorFlow checkpoint: {error}") from error
    if header.get(2, 0) == _BIG_ENDIAN:
        raise UserError(f"{path}: big-endian checkpoints are not supported")
    shards = header.get(1, 1)
    found = {}
    for name, entry in entries.items():
        if entry.divided:
            raise UserError(
                f"{path}: {name} is divided into slices; restore it in TensorFlow and save it whole"
            )
        if entry.dtype is not None:
            data = f"{prefix}.data-{entry.shard:05d}-of-{shards:05d}"
            found[name] = _tensor(name, entry, entry.dtype, data)
    return found


def _tensor(name: str, entry: _Entry, dtype: np.dtype, path: str) -> Tensor:
    def read(index: Index) -> np.ndarray:
        try:
            with files.open_read(path) as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise UserError(f"{name} in {path} cannot be read: {error}") from error
        expected = math.prod(entry.shape) * dtype.itemsize
        if len(data) != expected or masked_crc(data) != entry.crc:
            raise UserError(f"{name} in {path} is damaged: its size or checksum does not match")
        return np.frombuffer(data, dtype).reshape(entry.shape)[index]

    return Tensor(entry.shape, dtype, read)


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("its footer is missing")
    _, position = _handle(data, len(data) - _FOOTER_BYTES)
    (offset, size), _ = _handle(data, position)
    for _, handle in _block(data, offset, size):
        yield from _block(data, *_handle(handle, 0)[0])


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Returns a block's (offset, size), and the position after the handle."""
    offset, position = protobuf.read_varint(data, position)
    size, position = protobuf.read_varint(data, position)
    return (offset, size), position


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    compression, crc = _TRAILER.unpack_from(data, offset + size)
    if masked_crc(data[offset : offset + size + 1]) != crc:
        raise ValueError("the checksum of a block does not match")
    if compression != _UNCOMPRESSED:
        raise ValueError("it is compressed, as in files written by TensorFlow 1.0")
    block = data[offset : offset + size]
    (restarts,) = struct.unpack("<I", block[-4:])
    end = size - 4 * (restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = protobuf.read_varint(block, position)
        rest, position = protobuf.read_varint(block, position)
        length, position = protobuf.read_varint(block, position)
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _entry(message: bytes) -> _Entry:
    numbers = _numbers(message)
    shape: tuple[int, ...] = ()
    crc, divided = 0, False
    for number, _, payload in protobuf.fields(memoryview(message)):
        if number == 2:
            shape = tuple(
                _numbers(dimension).get(1, 0)
                for field, _, dimension in protobuf.fields(payload)
                if field == 2
            )
        elif number == 6:
            (crc,) = struct.unpack("<I", payload)
        elif number == 7:
            divided = True
    dtype = _DTYPES.get(numbers.get(1, 0))
    shard, offset, size = (numbers.get(number, 0) for number in (3, 4, 5))
    return _Entry(dtype, shape, shard, offset, size, crc, divided)


def _numbers(message: bytes | memoryview) -> dict[int, int]:
    """Returns a message's integer fields by number."""
    return {
        number: protobuf.read_varint(payload, 0)[0]
        for number, kind, payload in protobuf.fields(memoryview(message))
        if kind == protobuf.VARINT
    }
