"""Double-array tries of byte strings, built and read by compiled code (pipeline/native/trie.h)."""

import ctypes
from collections.abc import Iterable

import numpy as np

from pipeline.native.library import library, pointer


def build(keys: Iterable[tuple[bytes, int]]) -> np.ndarray:
    """Returns int64[nodes] for distinct non-empty keys without NUL bytes, values below 2**24."""
    pairs = sorted(keys)
    data = np.frombuffer(b"".join(key for key, _ in pairs) or b"\0", np.uint8)
    ends = np.cumsum([0, *(len(key) for key, _ in pairs)], dtype=np.int64)
    values = np.array([value for _, value in pairs], np.int64)
    size = ctypes.c_int64()
    make = library().trie_build
    make.restype = ctypes.POINTER(ctypes.c_int64)
    arrays = pointer(data), pointer(ends), pointer(values)
    units = make(*arrays, ctypes.c_int64(len(pairs)), ctypes.byref(size))
    if not units:
        raise MemoryError("no memory for a tokenizer's trie")
    try:
        return np.ctypeslib.as_array(units, (size.value,)).copy()
    finally:
        library().trie_free(units)
