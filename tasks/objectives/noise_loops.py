"""The compiled inner loops of `noise`; in numpy, each operation would pass over all tokens.

Arrays are allocated outside of them: numba takes longer to compile an `np.zeros` than a loop.
"""

import numpy as np

from tasks.numba_cache import compiled

Array = np.ndarray
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@compiled(nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled(nogil=True)
def _choose(key: np.uint64, total: int, size: int, chosen: Array) -> None:
    """Marks a uniform subset of `size` numbers below `total` in `chosen`, uint8, initially 0.

    Takes the first `size` distinct numbers of a stream of draws, or the complement for more than
    half of the numbers. So it makes about one draw per span; a shuffle needs one per token.
    """
    inverted = 2 * size > total
    left = total - size if inverted else size
    counter = np.uint64(0)
    while left > 0:
        counter += _GOLDEN
        number = np.int64(np.float64(_mix(key + counter) >> np.uint64(11)) * 2.0**-53 * total)
        if not chosen[number]:
            chosen[number] = 1
            left -= 1
    if inverted:
        for place in range(total):
            chosen[place] ^= 1


def compositions(keys_W: Array, totals_W: Array, parts_W: Array, most: int) -> Array:
    """Returns int64 [W, most]; see `noise.compositions`."""
    parts_WS = np.zeros((len(keys_W), most), np.int64)
    chosen = np.zeros(max(int(totals_W.max(initial=1)) - 1, 1), np.uint8)
    _compose(keys_W, totals_W, parts_W, chosen, parts_WS)
    return parts_WS


@compiled(nogil=True)
def _compose(
    keys_W: Array, totals_W: Array, parts_W: Array, chosen: Array, parts_WS: Array
) -> None:
    for window in range(len(keys_W)):
        cuts, parts = totals_W[window] - 1, parts_W[window]
        for cut in range(cuts):
            chosen[cut] = 0
        _choose(keys_W[window], cuts, parts - 1, chosen)
        part = begin = 0
        for cut in range(cuts):
            if chosen[cut]:
                parts_WS[window, part] = cut + 1 - begin
                begin = cut + 1
                part += 1
        parts_WS[window, part] = totals_W[window] - begin


def alternate(clean_WS: Array, noise_WS: Array, lengths_W: Array, width: int) -> Array:
    """Returns bool [W, width]; see `noise.alternate`."""
    mask_WN = np.zeros((len(lengths_W), width), np.bool_)
    _alternate(clean_WS, noise_WS, lengths_W, mask_WN)
    return mask_WN


@compiled(nogil=True)
def _alternate(clean_WS: Array, noise_WS: Array, lengths_W: Array, mask_WN: Array) -> None:
    for window in range(len(lengths_W)):
        place, length = 0, lengths_W[window]
        for span in range(clean_WS.shape[1]):
            place += clean_WS[window, span]
            end = min(place + noise_WS[window, span], length)
            while place < end:
                mask_WN[window, place] = True
                place += 1
            if place >= length:
                break


def substitute_spans(
    tokens_WN: Array, mask_WN: Array, lengths_W: Array, first_sentinel: int, step: int
) -> tuple[Array, Array]:
    """Returns (int32 [W, N], int64 [W]), padded with 0; sentinels descend by `step`."""
    out_WN, counts_W = _rows_like(tokens_WN)
    _substitute_spans(tokens_WN, mask_WN, lengths_W, first_sentinel, step, out_WN, counts_W)
    return out_WN, counts_W


@compiled(nogil=True)
def _substitute_spans(
    tokens_WN: Array,
    mask_WN: Array,
    lengths_W: Array,
    first_sentinel: int,
    step: int,
    out_WN: Array,
    counts_W: Array,
) -> None:
    windows, width = tokens_WN.shape
    for window in range(windows):
        sentinel, count, inside = first_sentinel, 0, False
        for place in range(min(lengths_W[window], width)):
            masked = mask_WN[window, place]
            if not masked:
                out_WN[window, count] = tokens_WN[window, place]
                count += 1
            elif not inside:
                out_WN[window, count] = sentinel
                sentinel -= step
                count += 1
            inside = masked
        counts_W[window] = count


def compress(tokens_WN: Array, keep_WN: Array) -> tuple[Array, Array]:
    """Returns (int32 [W, N], int64 [W]), padded with 0; see `noise.compress`."""
    out_WN, counts_W = _rows_like(tokens_WN)
    _compress(tokens_WN, keep_WN, out_WN, counts_W)
    return out_WN, counts_W


@compiled(nogil=True)
def _compress(tokens_WN: Array, keep_WN: Array, out_WN: Array, counts_W: Array) -> None:
    windows, width = tokens_WN.shape
    for window in range(windows):
        count = 0
        for place in range(width):
            if keep_WN[window, place]:
                out_WN[window, count] = tokens_WN[window, place]
                count += 1
        counts_W[window] = count


def _rows_like(tokens_WN: Array) -> tuple[Array, Array]:
    return np.zeros(tokens_WN.shape, np.int32), np.zeros(len(tokens_WN), np.int64)
