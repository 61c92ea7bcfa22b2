"""Arrow arrays from NumPy's and back, without copies.

Arrow's own conversions import pandas, where it is installed, which takes a quarter of a second.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def of_numbers(values: np.ndarray) -> "pa.Array":
    import pyarrow as pa

    kind, values = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def of_mask(mask: np.ndarray) -> "pa.BooleanArray":
    import pyarrow as pa

    bits = np.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(bits)])


def of_texts(texts: Sequence[str | bytes | None]) -> "pa.LargeStringArray":
    """Returns an array of valid UTF-8, without the spare capacity of Arrow's own builder."""
    import pyarrow as pa

    data = [text.encode() if isinstance(text, str) else text or b"" for text in texts]
    found = np.cumsum([0, *map(len, data)], dtype=np.int64)
    valid = None
    if None in texts:
        present = np.array([text is not None for text in texts])
        valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    joined = data[0] if len(data) == 1 else b"".join(data)
    buffers = [valid, pa.py_buffer(found), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers)


def of_names(texts: Sequence[str | None]) -> "pa.StringArray":
    return of_texts(texts).cast("string")


def repeated(text: str, count: int) -> "pa.StringArray":
    import pyarrow as pa

    data = text.encode()
    found = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    buffers = [None, pa.py_buffer(found), pa.py_buffer(data * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def numbers(array: "pa.Array") -> np.ndarray:
    """Returns the values of an array of integers without nulls."""
    values = np.frombuffer(array.buffers()[1], str(array.type))
    return values[array.offset : array.offset + len(array)]


def sizes(texts: "pa.Array") -> np.ndarray:
    """Returns int64 [texts], the bytes of each text, 0 if it is null."""
    found = np.diff(bounds(texts))
    return np.where(_valid(texts), found, 0) if texts.null_count else found


def _valid(array: "pa.Array") -> np.ndarray:
    packed = np.frombuffer(array.buffers()[0], np.uint8)
    bits = np.unpackbits(packed, count=array.offset + len(array), bitorder="little")
    return bits[array.offset :].astype(bool)


def bounds(texts: "pa.Array") -> np.ndarray:
    """Returns int64 [texts + 1], where texts begin, and the last one ends, in their buffer."""
    import pyarrow as pa

    large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    offsets = texts.buffers()[1]
    if offsets is None:
        return np.zeros(len(texts) + 1, np.int64)
    found = np.frombuffer(offsets, np.int64 if large else np.int32)
    return found[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
