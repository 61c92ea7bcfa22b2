"""Files of named arrays; ranges are read by memory map or remote requests."""

import json
import math
import mmap
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.storage.store import Store

_LENGTH = 8  # bytes that hold the header's length, at the start of the file
_ALIGNMENT = 64


def write(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays atomically as one file; equal arrays give equal bytes."""
    places: dict[str, tuple[str, list[int], int]] = {}
    at = 0
    for name, array in arrays.items():
        places[name] = (array.dtype.str, list(array.shape), at)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    head = json.dumps({"arrays": places, "bytes": at}).encode()
    head += b" " * (-(len(head) + _LENGTH) % _ALIGNMENT)
    with files.atomic_write(path) as file:
        file.write(len(head).to_bytes(_LENGTH, "little") + head)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data.cast("B") if array.nbytes else b"")
            file.write(b"\0" * (-array.nbytes % _ALIGNMENT))


class Arrays:
    """The arrays of a file written by `write`; raises a ValueError if it is not a sound one."""

    def __init__(self, path: str):
        self._path, size = path, files.size(path)
        if size < _LENGTH:
            raise ValueError(f"{path} is truncated")
        self._data: mmap.mmap | None = None
        if not files.is_remote(path):
            with open(files.local_path(path), "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        length = int.from_bytes(self._bytes(0, _LENGTH), "little")
        value = json.loads(self._bytes(_LENGTH, length))
        self._begin = _LENGTH + length
        if size != self._begin + value["bytes"]:
            raise ValueError(f"{path} is truncated")
        self._places: dict[str, Any] = value["arrays"]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name][1])

    def read(self, name: str, row: int | None = None) -> np.ndarray:
        """Returns an array, or row `row` of a two-dimensional one."""
        if row is None:
            shape = self.shape(name)
            return self._read(name, 0, math.prod(shape)).reshape(shape)
        width = self.shape(name)[1]
        return self._read(name, row * width, (row + 1) * width)

    def part(self, name: str, begin: int, end: int, row: int = 0) -> np.ndarray:
        """Returns elements [begin, end) of an array, or of row `row` of a two-dimensional one."""
        shape = self.shape(name)
        before = row * shape[1] if len(shape) == 2 else 0
        return self._read(name, before + begin, before + end)

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        kind, _, offset = self._places[name]
        dtype = np.dtype(kind)
        start = self._begin + offset + begin * dtype.itemsize
        if self._data is not None:
            return np.frombuffer(self._data, dtype, end - begin, start)
        return np.frombuffer(self._bytes(start, (end - begin) * dtype.itemsize), dtype)

    def _bytes(self, start: int, count: int) -> bytes:
        if self._data is not None or not count:
            return self._data[start : start + count] if self._data else b""
        return Store(self._path).ask(
            lambda fs, inside: fs.cat_file(inside, start=start, end=start + count)
        )


def is_complete(path: str) -> bool:
    """Returns whether a local or remote file of arrays exists and is not truncated."""
    try:
        Arrays(path)
    except (FileNotFoundError, ValueError):
        return False
    return True
