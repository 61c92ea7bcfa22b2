"""The compiled loops that find and decode lists of ids in tf.train.Example protos.

Source: TensorFlow's `core/example/{example,feature}.proto`. An Example (field 1: features) holds a
map (field 1: entry) of names (1) to Features (2), and a Feature an Int64List (3) of packed varints
(1), or bytes (1), or floats (2).

Loops of training allocate their arrays outside: numba takes longer to compile an `np.zeros` than a
loop.
"""

import numpy as np

from tasks.numba_cache import compiled

# Codes returned in place of a list's start if it is missing, invalid, or not packed in one piece.
MISSING, NOT_IDS, MALFORMED, IN_PIECES = -1, -2, -3, -4

_Int = int | np.int64


@compiled(nogil=True)
def _varint(raw: np.ndarray, place: _Int, end: _Int, most: _Int) -> tuple[_Int, _Int]:
    """Returns (value, next position) of the varint at `place`.

    The position is -1 if the varint exceeds `end` or `most` bytes.
    """
    value = np.int64(0)
    for number in range(most):
        if place >= end:
            break
        byte = np.int64(raw[place])
        place += 1
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, place
    return value, -1


@compiled(nogil=True)
def _field(raw: np.ndarray, place: _Int, end: _Int) -> tuple[_Int, _Int, _Int]:
    """Returns (number, begin, end) of the length-delimited field at `place`; end is -1 on error."""
    key, place = _varint(raw, place, end, 5)
    if place < 0:
        return 0, 0, -1
    size, place = _varint(raw, place, end, 6)
    if place < 0:
        return 0, 0, -1
    if key & 7 != 2 or place + size > end:
        return 0, 0, -1
    return key >> 3, place, place + size


@compiled(nogil=True)
def _ids(raw: np.ndarray, place: _Int, end: _Int) -> tuple[_Int, _Int]:
    """Returns the bounds of the varints of the Feature at [place, end), or an error code and 0."""
    begin, stop = place, place  # a Feature without a list is an empty one
    while place < end:
        number, inside, place = _field(raw, place, end)
        if place < 0:
            return MALFORMED, 0
        if number != 3:
            return NOT_IDS, 0
        while inside < place:
            number, first, inside = _field(raw, inside, place)
            if inside < 0 or number != 1:
                return IN_PIECES, 0
            if first < inside:
                if begin < stop:
                    return IN_PIECES, 0
                begin, stop = first, inside
    return begin, stop


@compiled(nogil=True)
def _list_of(raw: np.ndarray, place: _Int, end: _Int, name: np.ndarray) -> tuple[_Int, _Int]:
    """Returns the bounds of the ids of feature `name` in one Example, or an error code and 0."""
    found: _Int = MISSING
    stop: _Int = 0
    while place < end:
        number, entry, place = _field(raw, place, end)
        if place < 0:
            return MALFORMED, 0
        if number != 1:
            continue
        while entry < place:
            number, part, entry = _field(raw, entry, place)
            if entry < 0:
                return MALFORMED, 0
            named, value, value_end = False, part, part
            while part < entry:
                number, inside, part = _field(raw, part, entry)
                if part < 0:
                    return MALFORMED, 0
                if number == 1:
                    named = part - inside == len(name)
                    for byte in range(len(name)):
                        named = named and raw[inside + byte] == name[byte]
                elif number == 2:
                    value, value_end = inside, part
            if named:
                found, stop = _ids(raw, value, value_end)
                if found < 0:
                    return found, 0
    return found, stop


@compiled(nogil=True)
def lists_of(
    raw: np.ndarray, begins_R: np.ndarray, ends_R: np.ndarray, name: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (begin, end, number) of the ids of feature `name` in each Example, each int64 [R].

    `begin` is one of the codes if there are none, or if only Python can read them.
    """
    out_begins_R = np.empty(len(begins_R), np.int64)
    out_ends_R = np.zeros(len(begins_R), np.int64)
    counts_R = np.zeros(len(begins_R), np.int64)
    for row in range(len(begins_R)):
        begin, end = _list_of(raw, begins_R[row], ends_R[row], name)
        if begin >= 0 and begin < end and raw[end - 1] >= 0x80:
            begin = MALFORMED
        out_begins_R[row], out_ends_R[row] = begin, end
        if begin >= 0:
            count = 0
            for place in range(begin, end):
                count += raw[place] < 0x80
            counts_R[row] = count
    return out_begins_R, out_ends_R, counts_R


@compiled(nogil=True)
def ending_in(raw: np.ndarray, begins_R: np.ndarray, ends_R: np.ndarray, token: _Int) -> np.ndarray:
    """Returns bool [R], True where a list's last varint is the non-negative `token`."""
    found_R = np.zeros(len(begins_R), np.bool_)
    for row in range(len(begins_R)):
        begin, last = begins_R[row], ends_R[row] - 1
        if last < begin:
            continue
        place, value = last, np.int64(raw[last])
        while place > begin and raw[place - 1] >= 0x80:
            place -= 1
            value = (value << 7) | np.int64(raw[place] & 0x7F)
        found_R[row] = value == token
    return found_R


@compiled(nogil=True)
def extremes(
    raw: np.ndarray, begins_R: np.ndarray, ends_R: np.ndarray
) -> tuple[_Int, _Int, _Int, _Int, _Int]:
    """Returns (lowest id, highest id, first row with each, number of zeros) in lists of varints.

    If there are no ids, the lowest is 0 and the highest -1.
    """
    lowest, highest, zeros = np.int64(0), np.int64(-1), 0
    low_row = high_row = 0
    for row in range(len(begins_R)):
        value, shift = np.uint64(0), np.uint64(0)
        for place in range(begins_R[row], ends_R[row]):
            byte = np.uint64(raw[place])
            value |= (byte & np.uint64(0x7F)) << shift
            shift += np.uint64(7)
            if byte < 0x80:
                token = np.int64(value)
                zeros += token == 0
                if token > highest:
                    highest, high_row = token, row
                if token < lowest:
                    lowest, low_row = token, row
                value, shift = np.uint64(0), np.uint64(0)
    return lowest, highest, low_row, high_row, zeros


@compiled(nogil=True)
def rows_at(begins_R: np.ndarray, places_P: np.ndarray) -> np.ndarray:
    """Returns the row of each position of a token stream, int64 [P].

    `begins_R` may be memory-mapped; few of its pages are read.
    """
    rows_P = np.empty(len(places_P), np.int64)
    for part in range(len(places_P)):
        low, high = 0, len(begins_R)
        while low < high:
            middle = (low + high) // 2
            if np.int64(begins_R[middle]) <= places_P[part]:
                low = middle + 1
            else:
                high = middle
        rows_P[part] = low - 1
    return rows_P


def begins_of(raw: np.ndarray, ends_R: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
    """Returns the start of the last `tokens_R` varints before `ends_R`, int64 [R]; -1: too few."""
    begins_R = np.full(len(ends_R), -1, np.int64)
    _begins_of(raw, ends_R, tokens_R, begins_R)
    return begins_R


@compiled(nogil=True)
def _begins_of(
    raw: np.ndarray, ends_R: np.ndarray, tokens_R: np.ndarray, begins_R: np.ndarray
) -> None:
    for row in range(len(ends_R)):
        place, left = ends_R[row], tokens_R[row] + 1
        if place == 0 or raw[place - 1] >= 0x80:
            continue
        # No branch per byte: it could not be predicted.
        while left > 0 and place > 0:
            place -= 1
            left -= raw[place] < 0x80
        if left == 0:
            begins_R[row] = place + 1


@compiled(nogil=True)
def preceded(raw: np.ndarray, begins_R: np.ndarray, heads: np.ndarray, sizes_R: np.ndarray) -> bool:
    """Returns whether `heads`, `sizes_R` bytes each, stand directly before the begins."""
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


def decoded(
    raw: np.ndarray, begins_P: np.ndarray, skips_P: np.ndarray, counts_P: np.ndarray
) -> np.ndarray:
    """Decodes, as int32, `counts_P` varints from `begins_P` on, after skipping `skips_P`.

    At least three bytes must follow the last varint.
    """
    out = np.empty(counts_P.sum(), np.int32)
    ends = np.empty(counts_P.max(initial=0), np.int64)
    _decode(raw, begins_P, skips_P, counts_P, ends, out)
    return out


@compiled(nogil=True)
def _decode(
    raw: np.ndarray,
    begins_P: np.ndarray,
    skips_P: np.ndarray,
    counts_P: np.ndarray,
    ends: np.ndarray,
    out: np.ndarray,
) -> None:
    """Decodes into `out`; the positions of a part's last bytes pass through `ends`."""
    written = 0
    for part in range(len(begins_P)):
        place, left, count = begins_P[part], skips_P[part], counts_P[part]
        while left > 0:
            left -= raw[place] < 0x80
            place += 1
        # First find the ends of numbers, then their values: no step waits for the previous one.
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
