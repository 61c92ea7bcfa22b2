"""Rows of tokens: sums over them, and their TFRecords in the format of tasks/cache/records.py."""

import ctypes

import numpy as np

from pipeline.native.library import library, pointer
from tasks.cache.records import FRAMING_BYTES

# Maximum bytes of a row beside its ids: framing, the two features' names, and lengths as 10-byte
# varints.
_OVERHEAD = FRAMING_BYTES + 100
_SURPLUS = 8  # the encoder writes up to 7 bytes too many


def sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns int64 [groups], sums of consecutive groups of values; `lengths` may be 0."""
    until = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.cumsum(lengths)
    return until[ends] - until[ends - lengths]


def framed(
    targets: np.ndarray,
    lengths: np.ndarray,
    others: np.ndarray,
    counts: np.ndarray,
    name: str = "document_starts",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8 bytes of TFRecords, int64[rows + 1] bounds of records).

    `targets`: the ids of all rows, concatenated; `lengths`: ids per row; `others`, `counts`: the
    same for the other feature, whose `name` sorts before "targets". Ids are below 2**31.
    """
    room = _OVERHEAD * len(lengths) + 5 * (len(targets) + len(others)) + _SURPLUS
    out = np.empty(room, np.uint8)
    bounds = np.zeros(len(lengths) + 1, np.int64)
    label = np.frombuffer(name.encode(), np.uint8)
    arrays = _ids(targets), _counts(lengths), _ids(others), _counts(counts), label
    sizes = map(ctypes.c_int64, (len(label), len(lengths)))
    library().rows_put(*map(pointer, arrays), *sizes, pointer(out), pointer(bounds[1:]))
    return out[: bounds[-1]], bounds


def text_tokens(targets: np.ndarray, lengths: np.ndarray, pad: int, eos: int) -> np.ndarray:
    """Returns int64[rows], ids per row other than `pad` (-1 if none) and EOS, as seqio counts."""
    texts = np.empty(len(lengths), np.int64)
    ids, sizes, rows = _ids(targets), _counts(lengths), ctypes.c_int64(len(lengths))
    library().rows_text(pointer(ids), pointer(sizes), rows, pad, eos, pointer(texts))
    return texts


def _ids(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)


def _counts(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int64)
