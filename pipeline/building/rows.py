"""Compiled encoder of rows as TFRecords, in the format of tasks/cache/records.py."""

import itertools
import struct

import numpy as np

from tasks.cache.records import FRAMING_BYTES, length_crc, masked_crc
from tasks.numba_cache import compiled

_BEFORE = 12  # bytes of framing before the data: its length and that length's checksum
# Maximum constant bytes of a row: framing, the two feature names, and lengths as 10-byte varints.
_OVERHEAD = FRAMING_BYTES + 100


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
    room = _OVERHEAD * len(lengths) + 5 * (len(targets) + len(others))
    out = np.empty(room, np.uint8)
    bounds = np.zeros(len(lengths) + 1, np.int64)
    size = _encode(
        targets.astype(np.int32, copy=False), lengths.astype(np.int64, copy=False),
        others.astype(np.int32, copy=False), counts.astype(np.int64, copy=False),
        np.frombuffer(name.encode(), np.uint8), out, bounds,
    )  # fmt: skip
    view = memoryview(out.data)
    for begin, end in itertools.pairwise(bounds.tolist()):
        struct.pack_into("<I", view, begin + 8, length_crc(end - begin - FRAMING_BYTES))
        struct.pack_into("<I", view, end - 4, masked_crc(view[begin + _BEFORE : end - 4]))
    return out[:size], bounds


@compiled
def text_tokens(targets: np.ndarray, lengths: np.ndarray, pad: int, eos: int) -> np.ndarray:
    """Returns int64[rows], ids per row other than `pad` (-1 if none) and EOS, as seqio counts."""
    counts = np.zeros(len(lengths), np.int64)
    token = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            counts[row] += targets[token] != pad and targets[token] != eos
            token += 1
    return counts


@compiled(inline="always")
def _put(out: np.ndarray, at: int, value: int) -> int:
    while value >= 0x80:
        out[at] = value & 0x7F | 0x80
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@compiled(inline="always")
def _width(value: int) -> int:
    width = 1
    while value >= 0x80:
        value >>= 7
        width += 1
    return width


@compiled
def _packed(values: np.ndarray, begin: int, end: int) -> int:
    size = 0
    for index in range(begin, end):
        value = values[index]
        size += 1 + (value >= 1 << 7) + (value >= 1 << 14) + (value >= 1 << 21) + (value >= 1 << 28)
    return size


@compiled
def _feature_size(packed: int, name: int) -> tuple[int, int, int]:
    values = 1 + _width(packed) + packed if packed else 0
    feature = 1 + _width(values) + values
    return values, feature, 2 + name + 1 + _width(feature) + feature


@compiled
def _put_feature(
    out: np.ndarray,
    at: int,
    name: np.ndarray,
    values: np.ndarray,
    begin: int,
    end: int,
    packed: int,
) -> int:
    """Writes a map entry of Features: name and Int64List."""
    int64_list, feature, entry = _feature_size(packed, len(name))
    out[at] = 0x0A
    at = _put(out, at + 1, entry)
    out[at], out[at + 1] = 0x0A, len(name)
    at += 2
    for letter in name:
        out[at] = letter
        at += 1
    out[at] = 0x12
    at = _put(out, at + 1, feature)
    out[at] = 0x1A
    at = _put(out, at + 1, int64_list)
    if packed:
        out[at] = 0x0A
        at = _put(out, at + 1, packed)
        for index in range(begin, end):
            value = values[index]
            if value >= 1 << 21:
                at = _put(out, at, value)
            else:
                # Always write three bytes: the next value overwrites surplus ones, and a branch on
                # the length would be mispredicted.
                out[at] = value & 0x7F | (value >= 1 << 7) << 7
                out[at + 1] = value >> 7 & 0x7F | (value >= 1 << 14) << 7
                out[at + 2] = value >> 14
                at += 1 + (value >= 1 << 7) + (value >= 1 << 14)
    return at


_TARGETS = np.frombuffer(b"targets", np.uint8)


@compiled
def _encode(
    targets: np.ndarray,
    lengths: np.ndarray,
    others: np.ndarray,
    counts: np.ndarray,
    name: np.ndarray,
    out: np.ndarray,
    bounds: np.ndarray,
) -> int:
    """Writes the rows, leaving room for checksums; returns the number of bytes."""
    at = token = other = 0
    for row in range(len(lengths)):
        token_end, other_end = token + lengths[row], other + counts[row]
        packed_others = _packed(others, other, other_end)
        packed_targets = _packed(targets, token, token_end)
        features = 0
        for packed, size in ((packed_others, len(name)), (packed_targets, len(_TARGETS))):
            entry = _feature_size(packed, size)[2]
            features += 1 + _width(entry) + entry
        length = 1 + _width(features) + features
        for byte in range(8):
            out[at + byte] = length >> 8 * byte & 0xFF
        at += _BEFORE
        out[at] = 0x0A
        at = _put(out, at + 1, features)
        at = _put_feature(out, at, name, others, other, other_end, packed_others)
        at = _put_feature(out, at, _TARGETS, targets, token, token_end, packed_targets)
        at += 4
        bounds[row + 1] = at
        token, other = token_end, other_end
    return at
