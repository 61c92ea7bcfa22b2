"""The compiled inner loops of `records.Records`; importing takes a second."""

import numpy as np

from tasks.numba_cache import compiled


@compiled(nogil=True)
def begins_of(raw: np.ndarray, ends_R: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
    """Returns the start of the last `tokens_R` varints before `ends_R`, int64 [R]; -1: missing."""
    begins_R = np.full(len(ends_R), -1, np.int64)
    for row in range(len(ends_R)):
        place, left = ends_R[row], tokens_R[row] + 1
        if place == 0 or raw[place - 1] >= 0x80:
            continue
        # Without a branch per byte, which could not be predicted.
        while left > 0 and place > 0:
            place -= 1
            left -= raw[place] < 0x80
        if left == 0:
            begins_R[row] = place + 1
    return begins_R


@compiled(nogil=True)
def preceded(raw: np.ndarray, begins_R: np.ndarray, heads: np.ndarray, sizes_R: np.ndarray) -> bool:
    """Returns whether each begin follows the next `sizes_R` bytes of `heads`."""
    first = 0
    for row in range(len(begins_R)):
        size = sizes_R[row]
        if begins_R[row] < size:
            return False
        for byte in range(size):
            if raw[begins_R[row] - size + byte] != heads[first + byte]:
                return False
        first += size
    return True


@compiled(nogil=True)
def decoded(
    raw: np.ndarray, begins_P: np.ndarray, skips_P: np.ndarray, counts_P: np.ndarray
) -> np.ndarray:
    """Decodes `counts_P` varints, after the first `skips_P` from `begins_P`, as int32.

    At least three bytes must follow the last varint.
    """
    out = np.empty(counts_P.sum(), np.int32)
    ends = np.empty(counts_P.max() if len(counts_P) else 0, np.int64)
    written = 0
    for part in range(len(begins_P)):
        place, left, count = begins_P[part], skips_P[part], counts_P[part]
        while left > 0:
            left -= raw[place] < 0x80
            place += 1
        # First the ends of numbers, then their values: no step waits for the one before.
        begin, found = place, 0
        while found < count:
            ends[found] = place
            found += raw[place] < 0x80
            place += 1
        for number in range(count):
            end = ends[number]
            bits = 7 * (end - begin + 1)
            if bits <= 28:
                value = np.int64(raw[begin] & 0x7F)
                value |= np.int64(raw[begin + 1] & 0x7F) << 7
                value |= np.int64(raw[begin + 2] & 0x7F) << 14
                value |= np.int64(raw[begin + 3] & 0x7F) << 21
                value &= (np.int64(1) << bits) - 1
            else:
                value = np.int64(0)
                for byte in range(min(end - begin + 1, 9)):
                    value |= np.int64(raw[begin + byte] & 0x7F) << 7 * byte
            out[written + number] = value
            begin = end + 1
        written += count
    return out
