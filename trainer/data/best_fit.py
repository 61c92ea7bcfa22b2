"""Compiled best-fit packing of pairs in two dimensions; the import takes a second."""

import numpy as np

from tasks.numba_cache import compiled


@compiled(nogil=True)
def best_fit(inputs_P: np.ndarray, targets_P: np.ndarray, inputs: int, targets: int) -> np.ndarray:
    """Returns the row of each pair, int64 [P], given the lengths of its sides, int64 [P].

    In order, each pair goes into the row that it leaves with the least room, the oldest such
    row, or into a new row. Room is an integer: (share of `inputs` + share of `targets`) times
    both lengths. `targets` is 0 if there is one side.
    """
    row_P = np.empty(len(inputs_P), np.int64)
    left = np.empty((len(inputs_P), 2), np.int64)
    scale = max(targets, 1)
    used = 0
    for pair in range(len(inputs_P)):
        best, least = -1, np.int64(1) << 62
        for row in range(used):
            inputs_left = left[row, 0] - inputs_P[pair]
            targets_left = left[row, 1] - targets_P[pair]
            if inputs_left < 0 or targets_left < 0:
                continue
            room = inputs_left * scale + targets_left * inputs
            if room < least:
                best, least = row, room
        if best < 0:
            best = used
            left[best, 0], left[best, 1] = inputs, targets
            used += 1
        left[best, 0] -= inputs_P[pair]
        left[best, 1] -= targets_P[pair]
        row_P[pair] = best
    return row_P
