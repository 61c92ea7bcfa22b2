"""Compiled code for the fast tokenizer: normalises and encodes documents.

Results equal SentencePiece's bit for bit (see fast_tokenizer.py). In normalised text, byte 0x20
represents the space symbol U+2581, because real spaces cannot occur there. Everything is in one
file, because Numba's cache checks only a function's own. `_exact_path` and `_certain_path` walk the
trie alike but stay separate: each branch costs speed.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tasks.numba_cache import compiled

# Reasons why `encode` stops.
DONE = 0
GROW_TEXT = 1  # the normalised document exceeds `Work.text`
GROW_SEGMENT = 2  # a segment exceeds its arrays
GROW_TOKENS = 3  # `out` may be too short for the document's ids
GIVE_UP = 4  # SentencePiece must encode the document

UNIGRAM = 0
BPE = 1

# Longest segment, in characters, for the quadratic BPE code below.
BPE_CHARACTERS = 512
# Longest memoised segment, in bytes.
MEMO_BYTES = 64

_NO_RULE = -2  # in Normaliser.ascii: search the rules
_REMOVED = -1  # in Normaliser.ascii: remove the byte
_SPACE = np.frombuffer("\u2581".encode(), np.uint8)


class Normaliser(NamedTuple):
    """A model's normalisation."""

    # uint32[units] Darts-clone double array of the rules' left sides; [0] if none.
    rules: np.ndarray
    right_sides: np.ndarray  # uint8[bytes] right sides, zero-terminated
    # int16[128] replacement of an ASCII byte before another, or _REMOVED or _NO_RULE.
    ascii: np.ndarray
    # bool[256] ASCII bytes that stay unchanged before another, except the space and first bytes of
    # symbols.
    letters: np.ndarray
    plain: np.ndarray  # bool[65536] characters that begin no rule
    symbols: np.ndarray  # int64[nodes] trie of user-defined symbols as spelt in raw text
    begins_symbol: np.ndarray  # bool[256] their first bytes
    longest: int  # longest right side, in bytes
    remove_extra: bool  # whether to remove leading, trailing and repeated spaces
    # prefix, suffix: whether to add a space at the start or at the end, respectively.
    prefix: bool
    suffix: bool


class Pieces(NamedTuple):
    """A model's pieces."""

    kind: int  # UNIGRAM or BPE
    trie: np.ndarray  # int64[nodes] piece -> id
    # int64[nodes] user-defined symbols -> id; BPE neither splits nor merges them.
    frozen: np.ndarray
    scores: np.ndarray  # float64[ids] score of a piece in a path
    unknown_id: int  # id of a character without a piece; `scores` holds its score
    singles: np.ndarray  # int32[128] ids of ASCII characters, or -1
    # int32[256] ids of single bytes; they replace the unknown id if `has_bytes`.
    byte_ids: np.ndarray
    has_bytes: bool
    cost: float  # largest absolute score
    ascii_pairs: np.ndarray  # bool[128 * 128] adjacent ASCII characters within some piece
    pairs: np.ndarray  # uint64[words] hashed set of other such pairs; its length is a power of two


class Work(NamedTuple):
    """Buffers. `text`, `cuts` and a segment's arrays grow; the others have a fixed size."""

    text: np.ndarray  # uint8[n] normalised text of a document
    cuts: np.ndarray  # int32[n] ends of its segments
    # best, rival: float64[MEMO_BYTES + 1] best and second-best path score at each position of a
    # segment short enough for the memo.
    best: np.ndarray
    rival: np.ndarray
    # narrow, ids, starts: float32, int32 and int32 [n + 1], at each position the best score
    # (rounded as in SentencePiece), the last piece, and that piece's start.
    narrow: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    table: np.ndarray  # int64[entries, 3] the memo, see `_remember`
    store: np.ndarray  # int64[words] entries that do not fit into the table
    fill: np.ndarray  # int64[2] used entries of `table` and used words of `store`


@intrinsic
def _word(context, array, index):
    """Returns array[index : index + 8], uint8, as a little-endian uint64."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(
            builder.gep(view.data, [arguments[1]]), ir.IntType(64).as_pointer()
        )
        return builder.load(pointer, align=1)

    return types.uint64(array, types.int64), generate


@compiled(inline="always")
def _low_bytes(word, count):
    return word & ~(np.uint64(0xFFFFFFFFFFFFFF00) << np.uint64(8 * count - 8))


@compiled(inline="always")
def _character_bytes(byte):
    """Returns the length of the UTF-8 character with first byte `byte`. Source: RFC 3629."""
    if byte < 0xC0:
        return 1
    if byte < 0xE0:
        return 2
    if byte < 0xF0:
        return 3
    return 4


@compiled(inline="always")
def _code_point(text, at, size):
    if size == 1:
        return np.int64(text[at])
    if size == 2:
        return (np.int64(text[at]) & 0x1F) << 6 | (np.int64(text[at + 1]) & 0x3F)
    if size == 3:
        return (
            (np.int64(text[at]) & 0x0F) << 12
            | (np.int64(text[at + 1]) & 0x3F) << 6
            | (np.int64(text[at + 2]) & 0x3F)
        )
    return (
        (np.int64(text[at]) & 0x07) << 18
        | (np.int64(text[at + 1]) & 0x3F) << 12
        | (np.int64(text[at + 2]) & 0x3F) << 6
        | (np.int64(text[at + 3]) & 0x3F)
    )


@compiled
def longest_key(trie, text, at, end):
    """Returns (bytes, value) of the longest key of `trie` at `at`, or (0, -1)."""
    node = trie[0]
    length, value = 0, -1
    position = at
    while position < end:
        byte = np.int64(text[position])
        node = trie[(node >> 32) ^ byte]
        if node & 0xFF != byte:
            break
        position += 1
        found = (node >> 8) & 0xFFFFFF
        if found:
            length, value = position - at, found - 1
    return length, value


@compiled
def longest_rule(rules, text, at, end):
    """Returns (bytes, index of the right side) of the longest rule at `at`, or (0, 0).

    Source: darts.h of Darts-clone, DoubleArrayUnit and commonPrefixSearch.
    """
    length, value = 0, 0
    unit = np.int64(rules[0])
    node = (unit >> 10) << ((unit & 512) >> 6)
    for position in range(at, end):
        byte = np.int64(text[position])
        node ^= byte
        if node >= len(rules):
            break
        unit = np.int64(rules[node])
        if unit & 0x800000FF != byte:
            break
        node ^= (unit >> 10) << ((unit & 512) >> 6)
        if unit & 256:
            length = position - at + 1
            value = np.int64(rules[node]) & 0x7FFFFFFF
    return length, value


@compiled
def reached(rules, text, at, end):
    """Returns the length of the longest prefix of text[at:end] that begins some rule."""
    unit = np.int64(rules[0])
    node = (unit >> 10) << ((unit & 512) >> 6)
    for position in range(at, end):
        byte = np.int64(text[position])
        node ^= byte
        if node >= len(rules):
            return position - at
        unit = np.int64(rules[node])
        if unit & 0x800000FF != byte:
            return position - at
        node ^= (unit >> 10) << ((unit & 512) >> 6)
    return end - at


@compiled
def _normalise(normaliser, data, at, end, out):
    """Writes the normalised data[at:end] to `out`; returns its length, -1 if `out` is too short.

    Source: SentencePiece `normalizer.cc`, Normalizer::Normalize and NormalizePrefix.
    """
    remove = normaliser.remove_extra
    rules, sides = normaliser.rules, normaliser.right_sides
    size = 0
    room = len(out) - normaliser.longest - 24  # `_key` reads beyond the end
    if room < 0:
        return -1
    # Add the leading space only once other text follows the leading spaces.
    begun = False
    after_space = remove
    while at < end:
        if size >= room:
            return -1
        byte = data[at]
        if begun and normaliser.letters[byte]:
            # A run of unchanged bytes; a non-ASCII character may combine with the last.
            stop = at + 1
            while stop < end and normaliser.letters[data[stop]]:
                stop += 1
            if stop < end and data[stop] >= 0x80:
                stop -= 1
            if stop > at:
                if size + (stop - at) >= room:
                    return -1
                after_space = False
                while at < stop:
                    out[size] = data[at]
                    size += 1
                    at += 1
                continue
        alone = at + 1 == end or data[at + 1] < 0x80
        if byte < 0x80 and alone and not normaliser.begins_symbol[byte]:
            mapped = normaliser.ascii[byte]
            if mapped >= 0:
                at += 1
                if not begun:
                    if remove and mapped == 0x20:
                        continue
                    begun = True
                    if normaliser.prefix:
                        out[size] = 0x20
                        size += 1
                if mapped == 0x20:
                    if not after_space:
                        out[size] = 0x20
                        size += 1
                    after_space = remove
                else:
                    out[size] = mapped
                    size += 1
                    after_space = False
                continue
            if mapped == _REMOVED and begun:
                at += 1
                continue
        # The replacement: data[begin:stop] itself, or a right side.
        source, begin, stop = data, at, at
        length = 0
        if normaliser.begins_symbol[byte]:
            length, _ = longest_key(normaliser.symbols, data, at, end)
            stop = at + length
        if length == 0:
            width = min(_character_bytes(byte), end - at)
            if width > 1 and width < 4 and normaliser.plain[_code_point(data, at, width)]:
                length = width
                stop = at + length
            else:
                length, place = longest_rule(rules, data, at, end)
                if length == 0:
                    length = width
                    stop = at + length
                else:
                    source, begin, stop = sides, place, place
                    while sides[stop] != 0:
                        stop += 1
        at += length
        if not begun:
            if remove and stop - begin == 1 and source[begin] == 0x20:
                continue
            begun = True
            if normaliser.prefix:
                out[size] = 0x20
                size += 1
        while after_space and begin < stop and source[begin] == 0x20:
            begin += 1
        if begin < stop:
            if size + (stop - begin) >= room:
                return -1
            after_space = remove and source[stop - 1] == 0x20
            while begin < stop:
                if (
                    source[begin] == 0xE2
                    and begin + 2 < stop
                    and source[begin + 1] == 0x96
                    and source[begin + 2] == 0x81
                ):
                    out[size] = 0x20
                    begin += 3
                else:
                    out[size] = source[begin]
                    begin += 1
                size += 1
    if not begun:
        return 0
    if remove:
        while size and out[size - 1] == 0x20:
            size -= 1
    if normaliser.suffix:
        out[size] = 0x20
        size += 1
    return size


@compiled(inline="always")
def pair_bit(left, right, words):
    """Returns (word, bit) of a character pair in a hashed set of `words` words."""
    mixed = np.uint64(left) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(right)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed >>= np.uint64(20)
    return np.int64((mixed >> np.uint64(6)) & np.uint64(words - 1)), mixed & np.uint64(63)


@compiled
def pair_sets(left, right):
    """Returns Pieces.ascii_pairs and Pieces.pairs for adjacent int64 code points."""
    ascii_pairs = np.zeros(128 * 128, np.bool_)
    # With 16 bits per pair, one in 16 borders is missed, which only costs time.
    words = 1024
    while words * 4 < len(left):
        words *= 2
    pairs = np.zeros(words, np.uint64)
    for index in range(len(left)):
        if left[index] < 128 and right[index] < 128:
            ascii_pairs[left[index] * 128 + right[index]] = True
        else:
            word, bit = pair_bit(left[index], right[index], words)
            pairs[word] |= np.uint64(1) << bit
    return ascii_pairs, pairs


@compiled
def ascii_table(rules, right_sides):
    """Returns Normaliser.ascii."""
    table = np.empty(128, np.int16)
    text = np.zeros(2, np.uint8)
    for byte in range(128):
        text[0] = byte
        length, place = longest_rule(rules, text, 0, 1)
        if length == 0:
            table[byte] = byte
        elif right_sides[place] == 0:
            table[byte] = _REMOVED
        elif right_sides[place + 1] == 0 and right_sides[place] < 0x80:
            table[byte] = right_sides[place]
        else:
            table[byte] = _NO_RULE
        # A rule that begins with this byte and another ASCII byte.
        for after in range(128):
            text[1] = after
            if reached(rules, text, 0, 2) == 2:
                table[byte] = _NO_RULE
    return table


@compiled
def plain_characters(rules):
    """Returns Normaliser.plain."""
    plain = np.zeros(65536, np.bool_)
    text = np.zeros(3, np.uint8)
    for point in range(0x80, 0x10000):
        if point < 0x800:
            size = 2
            text[0] = 0xC0 | point >> 6
            text[1] = 0x80 | point & 0x3F
        else:
            size = 3
            text[0] = 0xE0 | point >> 12
            text[1] = 0x80 | point >> 6 & 0x3F
            text[2] = 0x80 | point & 0x3F
        plain[point] = reached(rules, text, 0, size) < size and point != 0x2581
    return plain


@compiled
def _cut(pieces, text, size, cuts):
    """Writes the ends of segments to `cuts`; returns their number.

    Segments end between characters that no piece contains side by side, and at the end of text.
    """
    count = 0
    if size:
        width = _character_bytes(text[0])
        left = _code_point(text, 0, width)
        at = np.int64(width)
        while at < size:
            byte = np.int64(text[at])
            cuts[count] = at  # kept if `count` grows, which avoids a branch
            if byte < 0x80 and left < 0x80:
                count += not pieces.ascii_pairs[left << 7 | byte]
                left = byte
                at += 1
            else:
                width = _character_bytes(byte)
                right = _code_point(text, at, width)
                word, bit = pair_bit(left, right, len(pieces.pairs))
                count += not (pieces.pairs[word] >> bit) & np.uint64(1)
                left = right
                at += width
        cuts[count] = size
        count += 1
    return count


@compiled(inline="always")
def _key(text, at, length):
    """Returns (low, high), the key of a segment.

    For up to 15 bytes, the bytes and their number; for more, a hash in the low word and 0xFF as the
    number. Reads up to 16 bytes from `at`.
    """
    low = _word(text, at)
    if length <= 8:
        return _low_bytes(low, length), np.uint64(length) << np.uint64(56)
    high = _word(text, at + 8)
    if length < 16:
        return low, _low_bytes(high, length - 8) | np.uint64(length) << np.uint64(56)
    for index in range(8, length, 8):
        word = _low_bytes(_word(text, at + index), min(8, length - index))
        low = (low ^ word) * np.uint64(0x9E3779B97F4A7C15)
        low ^= low >> np.uint64(29)
    return low, np.uint64(0xFF) << np.uint64(56) | np.uint64(length)


@compiled
def _exact_path(pieces, text, at, end, score, work):
    """Finds SentencePiece's best path through a segment after a path of `score`.

    Fills work.ids and work.starts. Compares candidates in double precision with a best score
    rounded to float32. Source: SentencePiece `unigram_model.cc`, Model::EncodeOptimized.
    """
    trie, scores = pieces.trie, pieces.scores
    narrow, ids, starts = work.narrow, work.ids, work.starts
    size = end - at
    for position in range(1, size + 1):
        starts[position] = -1
    narrow[0] = score
    begin = 0
    while begin < size:
        width = _character_bytes(text[at + begin])
        before = np.float64(narrow[begin])
        single = False
        node = trie[0]
        position = begin
        while position < size:
            byte = np.int64(text[at + position])
            node = trie[(node >> 32) ^ byte]
            if node & 0xFF != byte:
                break
            position += 1
            found = (node >> 8) & 0xFFFFFF
            if found:
                candidate = scores[found - 1] + before
                if starts[position] < 0 or candidate > np.float64(narrow[position]):
                    narrow[position] = candidate
                    ids[position] = found - 1
                    starts[position] = begin
                if position - begin == width:
                    single = True
        if not single:
            position = begin + width
            candidate = np.float64(np.float32(pieces.scores[pieces.unknown_id] + before))
            if starts[position] < 0 or candidate > np.float64(narrow[position]):
                narrow[position] = candidate
                ids[position] = pieces.unknown_id
                starts[position] = begin
        begin += width


@compiled
def _certain_path(pieces, text, at, end, work):
    """Finds the best path through a segment without rounding to float32.

    Fills work.ids and work.starts. Returns the largest preceding score for which the float32 path
    is provably the same, negative if there is none.

    With n characters, scores of at most C and M = |score before| + n C, each rounding errs by at
    most u = M 2^-24. So SentencePiece's best scores and candidates differ from the true ones by at
    most n u, and the stored best by another u. If the two best candidates are more than (2 n + 2) u
    apart, SentencePiece chooses the same one.
    """
    trie, scores = pieces.trie, pieces.scores
    best, rival, ids, starts = work.best, work.rival, work.ids, work.starts
    size = end - at
    for position in range(1, size + 1):
        starts[position] = -1
        rival[position] = -np.inf
    best[0] = 0.0
    begin = 0
    characters = 0
    while begin < size:
        width = _character_bytes(text[at + begin])
        before = best[begin]
        single = False
        node = trie[0]
        position = begin
        while position < size:
            byte = np.int64(text[at + position])
            node = trie[(node >> 32) ^ byte]
            if node & 0xFF != byte:
                break
            position += 1
            found = (node >> 8) & 0xFFFFFF
            if found:
                candidate = scores[found - 1] + before
                if starts[position] < 0 or candidate > best[position]:
                    if starts[position] >= 0:
                        rival[position] = best[position]
                    best[position] = candidate
                    ids[position] = found - 1
                    starts[position] = begin
                elif candidate > rival[position]:
                    rival[position] = candidate
                if position - begin == width:
                    single = True
        if not single:
            position = begin + width
            candidate = pieces.scores[pieces.unknown_id] + before
            if starts[position] < 0 or candidate > best[position]:
                if starts[position] >= 0:
                    rival[position] = best[position]
                best[position] = candidate
                ids[position] = pieces.unknown_id
                starts[position] = begin
            elif candidate > rival[position]:
                rival[position] = candidate
        begin += width
        characters += 1
    margin = np.inf
    position = size
    while position > 0:
        margin = min(margin, best[position] - rival[position])
        position = starts[position]
    if margin == np.inf:
        return np.inf
    # 1% and 1e-9 cover this computation's own rounding, about 1e-16 of the scores.
    most = (margin - 1e-9) * 0.99 * 2.0**24 / (2 * characters + 2)
    return most - characters * pieces.cost


@compiled
def _merged_path(pieces, text, at, end, work):
    """Merges the characters of a segment by BPE; fills work.ids and work.starts.

    Merges the adjacent pair whose piece scores best, leftmost first, until no pair is a piece.
    Returns False if the segment has too many characters.
    Source: SentencePiece `bpe_model.cc`, Model::SampleEncode with alpha 0.
    """
    trie = pieces.trie
    begins = np.empty(BPE_CHARACTERS + 1, np.int64)
    following = np.empty(BPE_CHARACTERS + 1, np.int64)
    symbol = np.empty(BPE_CHARACTERS + 1, np.int64)  # id of each symbol, -1 if not a piece
    merged = np.empty(BPE_CHARACTERS + 1, np.int64)  # id after merging with the next symbol, or -1
    whole = np.empty(BPE_CHARACTERS + 1, np.bool_)  # whether it is a user-defined symbol
    count = 0
    position = at
    while position < end:
        if count == BPE_CHARACTERS:
            return False
        length, _ = longest_key(pieces.frozen, text, position, end)
        whole[count] = length > 0
        if length == 0:
            length = _character_bytes(text[position])
        begins[count] = position
        following[count] = count + 1
        symbol[count] = _find(trie, text, position, position + length)
        position += length
        count += 1
    begins[count] = end
    for index in range(count):
        merged[index] = -1
        if index + 1 < count and not whole[index] and not whole[index + 1]:
            merged[index] = _find(trie, text, begins[index], begins[index + 2])
    while True:
        top = -1
        index, before, before_top = 0, -1, -1
        while index < count:
            if merged[index] >= 0 and (
                top < 0 or pieces.scores[merged[index]] > pieces.scores[merged[top]]
            ):
                top, before_top = index, before
            before, index = index, following[index]
        if top < 0:
            break
        symbol[top] = merged[top]
        after = following[following[top]]
        following[top] = after
        merged[top] = -1
        if after < count and not whole[after]:
            merged[top] = _find(trie, text, begins[top], begins[following[after]])
        if before_top >= 0 and not whole[before_top]:
            merged[before_top] = _find(trie, text, begins[before_top], begins[after])
    index = 0
    while index < count:
        after = following[index]
        work.ids[begins[after] - at] = symbol[index] if symbol[index] >= 0 else pieces.unknown_id
        work.starts[begins[after] - at] = begins[index] - at
        index = after
    return True


@compiled
def _find(trie, text, at, end):
    node = trie[0]
    for position in range(at, end):
        byte = np.int64(text[position])
        node = trie[(node >> 32) ^ byte]
        if node & 0xFF != byte:
            return -1
    return ((node >> 8) & 0xFFFFFF) - 1


@compiled
def _reverse(work, size):
    """Reverses a path: starts[p] becomes the end of the piece starting at p."""
    starts = work.starts
    position, following = size, size
    while position > 0:
        before = starts[position]
        starts[position] = following
        following = position
        position = before
    starts[0] = following


@compiled
def _path_length(pieces, text, at, size, work):
    """Returns the number of ids in a reversed path, counting unknown characters as bytes."""
    count = 0
    position = 0
    while position < size:
        end = work.starts[position]
        if pieces.has_bytes and work.ids[end] == pieces.unknown_id:
            count += 3 if text[at + position] == 0x20 else end - position
        else:
            count += 1
        position = end
    return count


@compiled(inline="always")
def _slot(low, high, table):
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(mixed >> np.uint64(20)) & (len(table) - 1)


@compiled
def _remember(pieces, text, at, end, work, slot, low, high, limit):
    """Stores a segment and its path in the memo, emptying a full memo first.

    A table entry is two words of key and a third: the limit as float32 in the upper half; in the
    lower, 2 id for one known piece of up to 15 bytes, else 2 i + 1: from i on, `store` then holds
    the segment's length, number of ids, bytes if more than 15, and ids and scores.
    """
    table, store, fill = work.table, work.store, work.fill
    length = end - at
    count = _path_length(pieces, text, at, length, work)
    spelt = length if length > 15 else 0
    if 2 * fill[0] >= len(table) or fill[1] + 3 + spelt + 2 * count > len(store):
        table[:] = 0
        fill[:] = 0
        slot = _slot(low, high, table)
    table[slot, 0], table[slot, 1] = np.int64(low), np.int64(high)
    halves = table.view(np.int32)
    if spelt == 0 and count == 1 and work.ids[length] != pieces.unknown_id:
        halves[slot, 4] = 2 * work.ids[length]
    else:
        place = fill[1]
        halves[slot, 4] = 2 * place + 1
        store[place], store[place + 1] = length, count
        place += 2
        letters = store.view(np.uint8)
        for index in range(spelt):
            letters[8 * place + index] = text[at + index]
        place += (spelt + 7) // 8
        scores = store.view(np.float64)
        position = 0
        while position < length:
            ending = work.starts[position]
            token = work.ids[ending]
            if pieces.has_bytes and token == pieces.unknown_id:
                # The character's first byte carries its score.
                score = pieces.scores[token]
                for index in range(3 if text[at + position] == 0x20 else ending - position):
                    byte = (
                        _SPACE[index]
                        if text[at + position] == 0x20
                        else text[at + position + index]
                    )
                    store[place] = pieces.byte_ids[byte]
                    scores[place + 1] = score
                    place += 2
                    score = 0.0
            else:
                store[place] = token
                scores[place + 1] = pieces.scores[token]
                place += 2
            position = ending
        fill[1] = place
    # Round towards zero: the stored limit must not exceed the true one.
    table.view(np.float32)[slot, 5] = np.float32(limit * (1 - 1e-6)) if limit > 0 else -1.0
    fill[0] += 1


@compiled(nogil=True)
def encode(normaliser, pieces, work, data, offsets, first, out, used, lengths):
    """Encodes documents data[offsets[i] : offsets[i + 1]] from `first` on.

    Returns (DONE or the reason for stopping, next document, new `used`, required buffer length).
    `data`: uint8[bytes] UTF-8; `offsets`: int64[documents + 1]; `out`: int32[n], receives ids from
    out[used]; `lengths`: int64[documents], receives the ids per document.
    """
    text, table, store = work.text, work.table, work.store
    halves, limits = table.view(np.int32), table.view(np.float32)
    letters = store.view(np.uint8)
    store_scores = store.view(np.float64)
    unigram = pieces.kind == UNIGRAM
    unknown = pieces.unknown_id
    for document in range(first, len(offsets) - 1):
        size = _normalise(normaliser, data, offsets[document], offsets[document + 1], text)
        if size < 0:
            return GROW_TEXT, document, used, 2 * len(text)
        most = 3 * size if pieces.has_bytes else size
        if used + most > len(out):
            return GROW_TOKENS, document, used, used + most
        begin_used = used
        score = np.float32(0.0)
        after_unknown = False
        at = np.int64(0)
        for cut in range(_cut(pieces, text, size, work.cuts)):
            end = np.int64(work.cuts[cut])
            length = end - at
            low, high = np.uint64(0), np.uint64(0)
            token = np.int32(-1)
            found = False
            slot = np.int64(0)
            place = np.int64(-1)
            if length == 1:
                token = pieces.singles[text[at]]
            if token < 0 and length <= MEMO_BYTES:
                low, high = _key(text, at, length)
                slot = _slot(low, high, table)
                while table[slot, 1] != 0:
                    if table[slot, 0] == np.int64(low) and table[slot, 1] == np.int64(high):
                        place = np.int64(halves[slot, 4])
                        found = True
                        if length > 15:
                            spelt = 8 * ((place >> 1) + 2)
                            for index in range(length):
                                if letters[spelt + index] != text[at + index]:
                                    found = False
                                    break
                        if found:
                            break
                    slot = (slot + 1) & (len(table) - 1)
                if found and np.float64(abs(score)) <= limits[slot, 5]:
                    if place & 1 == 0:
                        token = np.int32(place >> 1)
                else:
                    place = -1
            if token >= 0:
                score = np.float32(pieces.scores[token] + np.float64(score))
                out[used] = token
                used += 1
                after_unknown = token == unknown
                at = end
                continue
            if place >= 0:
                place >>= 1
                count = store[place + 1]
                place += 2 + ((length + 7) // 8 if length > 15 else 0)
                for index in range(place, place + 2 * count, 2):
                    token = np.int32(store[index])
                    score = np.float32(store_scores[index + 1] + np.float64(score))
                    if not (token == unknown and after_unknown) or pieces.has_bytes:
                        out[used] = token
                        used += 1
                    after_unknown = token == unknown
                at = end
                continue
            if length >= len(work.narrow):
                return GROW_SEGMENT, document, begin_used, length + 1
            if not unigram:
                if not _merged_path(pieces, text, at, end, work):
                    return GIVE_UP, document, begin_used, 0
                _reverse(work, length)
                if length <= MEMO_BYTES:
                    _remember(pieces, text, at, end, work, slot, low, high, np.inf)
            elif found or length > MEMO_BYTES:
                _exact_path(pieces, text, at, end, score, work)
                _reverse(work, length)
            else:
                limit = _certain_path(pieces, text, at, end, work)
                _reverse(work, length)
                _remember(pieces, text, at, end, work, slot, low, high, limit)
                if np.float64(abs(score)) > limit:
                    _exact_path(pieces, text, at, end, score, work)
                    _reverse(work, length)
            position = np.int64(0)
            while position < length:
                ending = np.int64(work.starts[position])
                token = work.ids[ending]
                score = np.float32(pieces.scores[token] + np.float64(score))
                if token != unknown:
                    out[used] = token
                    used += 1
                elif not pieces.has_bytes:
                    if not after_unknown:
                        out[used] = token
                        used += 1
                elif text[at + position] == 0x20:
                    for byte in _SPACE:
                        out[used] = pieces.byte_ids[byte]
                        used += 1
                else:
                    for byte in text[at + position : at + ending]:
                        out[used] = pieces.byte_ids[byte]
                        used += 1
                after_unknown = token == unknown
                position = ending
            at = end
        lengths[document] = used - begin_used
    return DONE, len(lengths), used, 0
