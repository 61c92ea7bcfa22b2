"""Compiled best-fit packing of pairs in two dimensions. Importing this module takes a second."""

import numpy as np

from tasks.compiled import compiled


@compiled(nogil=True)
def best_fit(inputs_P, targets_P, inputs, targets, open_rows):
    """Returns the row of each pair, int64 [P].

    A pair goes into the open row that it leaves with the least room, the oldest among equals, or
    into a new one. If more than `open_rows` are open, the fullest is closed. Room is counted in
    whole numbers: its share of `inputs` plus its share of `targets`, times both.

    Args:
      inputs_P, targets_P: int64 [P], lengths of the sides.
      inputs, targets: lengths of a row; `targets` is 0 if there is one side.
      open_rows: most rows that are open at a time.
    """
    row_P = np.empty(len(inputs_P), np.int64)
    number = np.zeros(open_rows + 1, np.int64)
    left = np.zeros((open_rows + 1, 2), np.int64)
    scale = max(targets, 1)
    opened = used = 0
    for pair in range(len(inputs_P)):
        best, least = -1, np.int64(1) << 62
        for slot in range(used):
            inputs_left = left[slot, 0] - inputs_P[pair]
            targets_left = left[slot, 1] - targets_P[pair]
            if inputs_left < 0 or targets_left < 0:
                continue
            room = inputs_left * scale + targets_left * inputs
            if room < least or (room == least and number[slot] < number[best]):
                best, least = slot, room
        if best < 0:
            best = used
            number[best], left[best, 0], left[best, 1] = opened, inputs, targets
            opened += 1
            used += 1
        left[best, 0] -= inputs_P[pair]
        left[best, 1] -= targets_P[pair]
        row_P[pair] = number[best]
        if used > open_rows:
            fullest, least = 0, np.int64(1) << 62
            for slot in range(used):
                room = left[slot, 0] * scale + left[slot, 1] * inputs
                if room < least or (room == least and number[slot] < number[fullest]):
                    fullest, least = slot, room
            used -= 1
            number[fullest] = number[used]
            left[fullest, 0], left[fullest, 1] = left[used, 0], left[used, 1]
    return row_P
