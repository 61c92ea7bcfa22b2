"""Double-array trie of byte strings, built by compiled code.

A node is one int64: bits 32-62 hold the offset of its children, bits 8-31 its value plus one (0 for
none), bits 0-7 the byte leading to it. The child for byte b is at index offset ^ b if the node
there carries b; one load suffices to check, because offsets are unique. A leaf has offset 0, so
byte 0 leads to the root, which carries 0xFF. Source: the layout of Darts-clone
(https://github.com/s-yata/darts-clone), with 64-bit nodes.
"""

from collections.abc import Iterable

import numpy as np

from tasks.numba_cache import compiled

_BLOCK = 256
_NO_BYTE = 0xFF  # never occurs in UTF-8


def build(keys: Iterable[tuple[bytes, int]]) -> np.ndarray:
    """Returns int64[nodes] for distinct non-empty keys without NUL bytes, values below 2**24."""
    pairs = sorted(keys)
    data = np.frombuffer(b"".join(key for key, _ in pairs) or b"\0", np.uint8)
    ends = np.cumsum([0, *(len(key) for key, _ in pairs)], dtype=np.int64)
    values = np.array([value for _, value in pairs], np.int64)
    return _build(data, ends, values)


@compiled
def _whole_blocks(units: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns `units` up to the last used block, so that offset ^ byte never leaves the array."""
    last = len(units) - 1
    while not used[last]:
        last -= 1
    out = units[: (last // _BLOCK + 1) * _BLOCK].copy()
    for node in range(len(out)):
        if not used[node]:
            out[node] = -1  # carries _NO_BYTE
    return out


@compiled
def _build(data: np.ndarray, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
    # Breadth first over ranges of sorted keys: [low, high) share their first `depth` bytes.
    size = 2 * _BLOCK
    units = np.zeros(size, np.int64)
    units[0] = _NO_BYTE
    used = np.zeros(size, np.bool_)  # a node is stored or reserved here
    taken = np.zeros(size, np.bool_)  # some node has this offset
    used[0] = True
    taken[0] = True
    capacity = 1024
    queue = np.zeros((capacity, 4), np.int64)
    queue[0, 1] = len(values)
    head, tail = 0, 1
    first_free = front = 1
    labels = np.zeros(256, np.int64)
    begins = np.zeros(257, np.int64)
    while head < tail:
        low, high, depth, node = queue[head]
        head += 1
        if low < high and ends[low + 1] - ends[low] == depth:
            units[node] |= (values[low] + 1) << 8
            low += 1
        count = 0
        for key in range(low, high):
            label = np.int64(data[ends[key] + depth])
            if count == 0 or labels[count - 1] != label:
                labels[count] = label
                begins[count] = key
                count += 1
        if count == 0:
            continue
        begins[count] = high
        while first_free < size and used[first_free]:
            first_free += 1
        # A single child fits anywhere and fills gaps; several start where all of them fit.
        place = start = first_free if count == 1 else max(first_free, front)
        offset = np.int64(0)
        while True:
            while len(used) <= (place | 0xFF) + _BLOCK:
                units = np.concatenate((units, np.zeros_like(units)))
                used = np.concatenate((used, np.zeros_like(used)))
                taken = np.concatenate((taken, np.zeros_like(taken)))
                size = len(used)
            offset = place ^ labels[0]
            free = not used[place] and not taken[offset]
            if free:
                for child in range(1, count):
                    if used[offset ^ labels[child]]:
                        free = False
                        break
            if free:
                break
            place += 1
        # Gaps that did not fit rarely fit others, so skip half of them from now on.
        if count > 1:
            front = max(front, (start + place) // 2)
        elif place - start > 16:
            first_free = (start + place) // 2
        taken[offset] = True
        units[node] |= offset << 32
        if tail + count > capacity:
            capacity = 2 * (capacity + count)
            longer = np.zeros((capacity, 4), np.int64)
            longer[:tail] = queue[:tail]
            queue = longer
        for child in range(count):
            at = offset ^ labels[child]
            used[at] = True
            units[at] |= labels[child]
            queue[tail, 0], queue[tail, 1] = begins[child], begins[child + 1]
            queue[tail, 2], queue[tail, 3] = depth + 1, at
            tail += 1
    return _whole_blocks(units, used)
