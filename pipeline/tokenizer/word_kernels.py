"""Compiled code for byte-level BPE and WordPiece: cuts texts into words, and encodes words.

One file, as in kernels.py, because Numba's cache checks only a function's own file.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tasks.numba_cache import compiled

# Reasons why a function stops.
DONE = 0
FULL = 1  # `text` cannot hold another document
GROW = 2  # `text` is shorter than the document
NORMALISE = 3  # the normaliser may change the document
LIBRARY = 4  # an odd added token, or context-dependent normalisation

# Instead of an added token's id, for a part that is text or is left to the library.
TEXT, REFUSED = -1, -2

# Kinds of characters, for byte-level BPE.
OTHER, LETTER, NUMBER, SPACE, NEWLINE = range(5)
# Added to a kind: a normaliser may change texts with this character.
CHANGES = 0x80

# WordPiece's treatment of a character; 0 or more is the index of a replacement.
KEEP, BREAK, ALONE, REMOVE, REFUSE = -1, -2, -3, -4, -5

# Unused bytes at the end of `text`: words are read eight bytes at a time.
SLACK = 32

_LAST_POINT = 0x10FFFF
_BLANK, _APOSTROPHE, _S, _T, _M, _D, _R, _V, _E, _L = b" 'stmdrvel"
# ſ in UTF-8, which case folding maps to s. Source: Unicode's CaseFolding.txt.
_LONG_S = tuple("ſ".encode())


@compiled
def holds_token(tokens, begins_token, data, at, end):
    """Returns whether data[at:end] contains a key of a trie with first bytes `begins_token`."""
    while at < end:
        if begins_token[data[at]]:
            node = tokens[0]
            for position in range(at, end):
                byte = np.int64(data[position])
                node = tokens[(node >> 32) ^ byte]
                if node & 0xFF != byte:
                    break
                if (node >> 8) & 0xFFFFFF:
                    return True
        at += 1
    return False


@compiled
def _longest_key(trie, text, at, end):
    """Returns (bytes, value) of the longest key of `trie` at `at`, or (0, -1)."""
    node = trie[0]
    length, value = 0, np.int64(-1)
    for position in range(at, end):
        byte = np.int64(text[position])
        node = trie[(node >> 32) ^ byte]
        if node & 0xFF != byte:
            break
        found = (node >> 8) & 0xFFFFFF
        if found:
            length, value = position + 1 - at, found - 1
    return length, value


@compiled(nogil=True)
def parts(added, data, offsets, given, owners, of_ends, of_given, of_owners):
    """Cuts documents at tokens of `added`: the leftmost match, then the longest.

    Returns the number of parts, -1 if there is no room for them. `data`: uint8[bytes] UTF-8;
    `offsets`: int64[parts + 1]; `given`: int32[parts] TEXT, REFUSED or an id, where only texts are
    cut; `owners`: int64[parts] document of each part; `of_…` receive the same for the new parts.

    Source: Hugging Face's tokenizers, `AddedVocabulary::find_matches`, MatchKind::LeftmostLongest.
    """
    count = np.int64(0)
    for part in range(len(given)):
        at, end = offsets[part], offsets[part + 1]
        if count + 3 > len(of_given):
            return np.int64(-1)
        kind = given[part]
        if kind == TEXT and holds_token(added.odd, added.begins_odd, data, at, end):
            kind = np.int32(REFUSED)
        begin = at
        while kind == TEXT and at < end:
            if added.begins[data[at]]:
                length, value = _longest_key(added.tokens, data, at, end)
                if length:
                    stop = at + length
                    if count + 3 > len(of_given):
                        return np.int64(-1)
                    if at > begin:
                        of_ends[count], of_given[count], of_owners[count] = at, TEXT, owners[part]
                        count += 1
                    of_ends[count], of_given[count], of_owners[count] = stop, value, owners[part]
                    count += 1
                    begin = at = stop
                    continue
            at += 1
        if begin < end or begin == offsets[part]:
            of_ends[count], of_given[count], of_owners[count] = end, kind, owners[part]
            count += 1
    return count


@compiled
def _point(text, at):
    """Returns (code point, number of bytes) of the character at `at`. Source: RFC 3629."""
    byte = np.int64(text[at])
    if byte < 0x80:
        return byte, 1
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | (np.int64(text[at + 1]) & 0x3F), 2
    if byte < 0xF0:
        low = (np.int64(text[at + 1]) & 0x3F) << 6 | (np.int64(text[at + 2]) & 0x3F)
        return (byte & 0x0F) << 12 | low, 3
    low = (np.int64(text[at + 2]) & 0x3F) << 6 | (np.int64(text[at + 3]) & 0x3F)
    point = (byte & 0x07) << 18 | (np.int64(text[at + 1]) & 0x3F) << 12 | low
    return min(point, _LAST_POINT), 4


@compiled
def _kind(kinds, text, at):
    point, width = _point(text, at)
    return np.int64(kinds[point]) & ~CHANGES, width


@compiled
def _run(kinds, text, at, end, kind):
    while at < end:
        found, width = _kind(kinds, text, at)
        if found != kind:
            break
        at += width
    return at


@compiled
def _contraction(text, at, end, any_case):
    """Returns the length of a contraction such as 's at an apostrophe, or 0."""
    if at + 1 >= end:
        return 0
    if any_case and at + 2 < end and text[at + 1] == _LONG_S[0] and text[at + 2] == _LONG_S[1]:
        return 3
    case = np.uint8(0x20 if any_case else 0)
    first = text[at + 1] | case
    if first in (_S, _T, _M, _D):
        return 2
    if at + 2 < end:
        second = text[at + 2] | case
        if first in (_R, _V) and second == _E:
            return 3
        if first == _L and second == _L:
            return 3
    return 0


@compiled
def _white_space(words, text, at, end):
    kinds = words.kinds
    last = position = at  # `last`: the last character of the run
    after_lines = np.int64(-1)
    while position < end:
        kind, width = _kind(kinds, text, position)
        if kind != SPACE and kind != NEWLINE:
            break
        last = position
        position += width
        if kind == NEWLINE:
            after_lines = position
    if words.lines and after_lines >= 0:
        return after_lines
    if words.last_space and position < end and last > at:
        return last
    return position


@compiled
def _word(words, text, at, end):
    kinds = words.kinds
    kind, width = _kind(kinds, text, at)
    byte = text[at]
    if byte == _APOSTROPHE and words.contractions:
        length = _contraction(text, at, end, words.contractions == 2)
        if length:
            return at + length
    after = at + width
    if kind != LETTER and kind != NUMBER and after < end:
        following, width = _kind(kinds, text, after)
        space = byte == _BLANK
        if following == LETTER:
            if (space and words.before_letters) or (words.before_letters == 2 and kind != NEWLINE):
                return _run(kinds, text, after + width, end, LETTER)
        elif following == NUMBER:
            if space and words.space_before_numbers:
                return _run(kinds, text, after + width, end, NUMBER)
        elif following == OTHER and space:
            kind, after = OTHER, after + width
    if kind == LETTER:
        return _run(kinds, text, after, end, LETTER)
    if kind == NUMBER:
        if words.numbers == 0:
            return _run(kinds, text, after, end, NUMBER)
        for _ in range(1, words.numbers):
            if after == end:
                break
            kind, width = _kind(kinds, text, after)
            if kind != NUMBER:
                break
            after += width
        return after
    if kind == OTHER:
        after = _run(kinds, text, after, end, OTHER)
        return _run(kinds, text, after, end, NEWLINE) if words.lines_after_others else after
    return _white_space(words, text, at, end)


@compiled(nogil=True)
def byte_level(words, normalised, data, offsets, given, first, text, ends, counts):
    """Copies documents data[offsets[i] : offsets[i + 1]] from `first` on, cut into words.

    Returns (DONE or the reason for stopping, next document, used bytes of `text`, number of words,
    bytes that the next document needs). `words`: a `byte_level.Words`; `normalised`: whether the
    documents are; `data`: uint8[bytes] UTF-8; `offsets`: int64[documents + 1]; `given`:
    int32[documents] TEXT, REFUSED or the id of an added token; `text`, `ends`: uint8[n], int32[n],
    receive the documents and the ends of words in `text`; `counts`: int64[documents], receives the
    words per document, or -1 minus its id.
    """
    size = count = np.int64(0)
    kinds = words.kinds
    for document in range(first, len(offsets) - 1):
        at, end = offsets[document], offsets[document + 1]
        need = end - at + 1 + SLACK
        if size + need > len(text):
            return (FULL if size else GROW), document, size, count, need
        if given[document] >= 0:
            counts[document] = -1 - given[document]
            continue
        if given[document] == REFUSED or holds_token(
            words.tokens, words.begins_token, data, at, end
        ):
            return LIBRARY, document, size, count, need
        begin = size
        if words.prefix and at < end and data[at] != _BLANK:
            text[size] = _BLANK
            size += 1
        text[size : size + end - at] = data[at:end]
        size += end - at
        if not normalised:
            position = begin
            while position < size:
                point, width = _point(text, position)
                if kinds[point] & CHANGES:
                    return NORMALISE, document, begin, count, need
                position += width
        before = count
        position = begin
        while position < size:
            position = _word(words, text, position, size)
            ends[count] = position
            count += 1
        counts[document] = count - before
    return DONE, len(offsets) - 1, size, count, 0


@compiled(nogil=True)
def word_piece(words, data, offsets, given, first, text, ends, counts):
    """Normalises documents and finds their words, concatenated in `text`; see `byte_level`."""
    size = count = np.int64(0)
    all_actions, right_sides = words.actions, words.right_sides
    for document in range(first, len(offsets) - 1):
        at, end = offsets[document], offsets[document + 1]
        need = words.longest + SLACK + (end - at)
        if size + need > len(text):
            return (FULL if size else GROW), document, size, count, need
        if given[document] >= 0:
            counts[document] = -1 - given[document]
            continue
        if given[document] == REFUSED or holds_token(
            words.tokens, words.begins_token, data, at, end
        ):
            return LIBRARY, document, size, count, need
        begin_size, begin_count = size, count
        room = len(text) - words.longest - SLACK
        begin = size  # of the current word
        while at < end:
            if size > room:
                # Replacements lengthen the text, so the document needs more room.
                need = 2 * (len(text) - begin_size)
                why = FULL if begin_size else GROW
                return why, document, begin_size, begin_count, need
            point, width = _point(data, at)
            action = all_actions[point]
            if action >= 0:
                source = np.int64(action)
                while right_sides[source]:
                    if right_sides[source] == _BLANK:
                        ends[count] = size
                        count += size > begin
                        begin = size
                    else:
                        text[size] = right_sides[source]
                        size += 1
                    source += 1
            elif action == KEEP:
                for index in range(width):
                    text[size + index] = data[at + index]
                size += width
            elif action == BREAK:
                ends[count] = size
                count += size > begin
                begin = size
            elif action == ALONE:
                ends[count] = size
                count += size > begin
                for index in range(width):
                    text[size + index] = data[at + index]
                size += width
                ends[count] = size
                count += 1
                begin = size
            elif action == REFUSE:
                return LIBRARY, document, begin_size, begin_count, need
            at += width
        ends[count] = size
        count += size > begin
        counts[document] = count - begin_count
    return DONE, len(offsets) - 1, size, count, 0


BPE = 0
WORD_PIECE = 1

# Longest memoised word, in bytes.
MEMO_BYTES = 64
# Number of ids stored in the memo entry itself, and bits per id.
_INLINE = 3
_ID_BITS = 20

_FULL = np.uint64(0xFF) << np.uint64(56)


class Model(NamedTuple):
    """Tables of a model."""

    kind: int  # BPE or WORD_PIECE
    # int64[entries, 2] hash table (left id, right id) -> (rank, id), see `pair_table`.
    pairs: np.ndarray
    byte_ids: np.ndarray  # int32[256] ids of single bytes
    whole: bool  # whether a word in the vocabulary becomes one piece without merges
    # int64[nodes] trie of word-initial pieces (WordPiece), or of all pieces in `spelt` form (BPE,
    # if `whole`).
    initial: np.ndarray
    continuing: np.ndarray  # int64[nodes] trie of continuation pieces without their prefix
    unknown: int  # id of a word that cannot be spelt
    longest: int  # maximum characters of a known word


class Work(NamedTuple):
    """Buffers; a word's arrays grow, and the others have a fixed size."""

    # ids, ends: int32[n] ids of a word, and ends of symbols, 0 if merged into another.
    ids: np.ndarray
    ends: np.ndarray
    before: np.ndarray  # int32[n] start of the preceding symbol
    heap: np.ndarray  # int64[3 n] pending merges, each rank << 32 | start
    # table, store, fill: the memo, see `_remember` and `kernels.Work`.
    table: np.ndarray
    store: np.ndarray
    fill: np.ndarray


@intrinsic
def _eight_bytes(context, array, index):
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
def _key(text, at, length):
    """Returns (low, high), the key of a word, as `kernels._key` does."""
    low = _eight_bytes(text, at)
    if length <= 8:
        return _low_bytes(low, length), np.uint64(length) << np.uint64(56)
    high = _eight_bytes(text, at + 8)
    if length < 16:
        return low, _low_bytes(high, length - 8) | np.uint64(length) << np.uint64(56)
    for index in range(8, length, 8):
        word = _low_bytes(_eight_bytes(text, at + index), min(8, length - index))
        low = (low ^ word) * np.uint64(0x9E3779B97F4A7C15)
        low ^= low >> np.uint64(29)
    return low, _FULL | np.uint64(length)


@compiled(inline="always")
def _slot(low, high, size):
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(mixed >> np.uint64(20)) & (size - 1)


@compiled
def pair_table(lefts, rights, ids):
    """Returns Model.pairs for merges in rank order; the last of equal merges counts.

    Entries are left << 32 | right (-1 if empty) and rank << 32 | id.
    """
    size = 16
    while size < 2 * len(ids):
        size *= 2
    table = np.full((size, 2), -1, np.int64)
    for rank in range(len(ids)):
        key = np.int64(lefts[rank]) << 32 | np.int64(rights[rank])
        slot = _slot(np.uint64(key), np.uint64(key), size)
        while table[slot, 0] != -1 and table[slot, 0] != key:
            slot = (slot + 1) & (size - 1)
        table[slot, 0] = key
        table[slot, 1] = np.int64(rank) << 32 | np.int64(ids[rank])
    return table


@compiled(inline="always")
def _merge(pairs, left, right):
    key = np.int64(left) << 32 | np.int64(right)
    slot = _slot(np.uint64(key), np.uint64(key), len(pairs))
    while pairs[slot, 0] != key:
        if pairs[slot, 0] == -1:
            return np.int64(-1)
        slot = (slot + 1) & (len(pairs) - 1)
    return pairs[slot, 1]


@compiled(inline="always")
def _push(heap, size, value):
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if heap[above] <= value:
            break
        heap[at] = heap[above]
        at = above
    heap[at] = value


@compiled(inline="always")
def _pop(heap, size):
    value = heap[size - 1]
    size -= 1
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] < heap[below]:
            below += 1
        if value <= heap[below]:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = value


@compiled
def _by_merges(model, text, at, length, work):
    """Writes the BPE ids of a word to work.ids; returns their number.

    Merges the adjacent pair of lowest rank, leftmost first. A symbol is identified by its start; a
    heap entry is valid only if the pair starting there still has that rank.
    Source: huggingface/tokenizers, `models/bpe/word.rs`, Word::merge_all.
    """
    pairs, byte_ids = model.pairs, model.byte_ids
    ids, ends, before, heap = work.ids, work.ends, work.before, work.heap
    for index in range(length):
        ids[index] = byte_ids[text[at + index]]
        ends[index] = index + 1
        before[index] = index - 1
    size = 0
    for index in range(length - 1):
        found = _merge(pairs, ids[index], ids[index + 1])
        if found >= 0:
            _push(heap, size, (found >> 32) << 32 | index)
            size += 1
    while size > 0:
        top = heap[0]
        _pop(heap, size)
        size -= 1
        start = top & 0xFFFFFFFF
        middle = np.int64(ends[start])
        if middle == 0 or middle == length:
            continue
        found = _merge(pairs, ids[start], ids[middle])
        if found < 0 or found >> 32 != top >> 32:
            continue
        ids[start] = found & 0xFFFFFFFF
        end = np.int64(ends[middle])
        ends[start] = end
        ends[middle] = 0
        if end < length:
            before[end] = start
            found = _merge(pairs, ids[start], ids[end])
            if found >= 0:
                _push(heap, size, (found >> 32) << 32 | start)
                size += 1
        left = np.int64(before[start])
        if left >= 0:
            found = _merge(pairs, ids[left], ids[start])
            if found >= 0:
                _push(heap, size, (found >> 32) << 32 | left)
                size += 1
    count = 0
    start = np.int64(0)
    while start < length:
        ids[count] = ids[start]
        start = np.int64(ends[start])
        count += 1
    return count


@compiled
def _by_longest(model, text, at, length, work):
    """Writes the WordPiece ids of a word to work.ids; returns their number.

    Source: huggingface/tokenizers, `models/wordpiece/mod.rs`, WordPiece::tokenize.
    """
    work.ids[0] = model.unknown
    end = at + length
    characters = 0
    for position in range(at, end):
        characters += text[position] & 0xC0 != 0x80
    if characters > model.longest:
        return 1
    count = 0
    trie = model.initial
    while at < end:
        size, piece = _longest_key(trie, text, at, end)
        if size == 0:
            work.ids[0] = model.unknown
            return 1
        work.ids[count] = piece
        count += 1
        at += size
        trie = model.continuing
    return count


@compiled
def _whole(trie, text, at, length):
    """Returns the id of the piece equal to the word, or -1.

    Tries cannot hold byte 0, so each byte is spelt as its high and low half, each plus 1.
    """
    node = trie[0]
    for position in range(at, at + length):
        byte = np.int64(text[position])
        for half in (byte >> 4, byte & 15):
            node = trie[(node >> 32) ^ (half + 1)]
            if node & 0xFF != half + 1:
                return np.int64(-1)
    return ((node >> 8) & 0xFFFFFF) - 1


@compiled
def ids_of_word(model, text, at, length, work):
    """Writes the ids of the word text[at : at + length] to work.ids; returns their number."""
    if model.kind == WORD_PIECE:
        return _by_longest(model, text, at, length, work)
    if model.whole:
        piece = _whole(model.initial, text, at, length)
        if piece >= 0:
            work.ids[0] = piece
            return 1
    return _by_merges(model, text, at, length, work)


@compiled
def _remember(text, at, length, count, work, slot, low, high):
    """Stores a word and its `count` ids in the memo, emptying a full memo first.

    A table entry is two words of key and a third: the number of ids in the two lowest bits, then
    the ids. If that number is 0, an index follows, from which `store` holds the number of ids, the
    word if it exceeds 15 bytes, and the ids.
    """
    table, store, fill, ids = work.table, work.store, work.fill, work.ids
    spelt = (length + 7) // 8 if length > 15 else 0
    if 2 * fill[0] >= len(table) or fill[1] + 1 + spelt + count > len(store):
        table[:] = 0
        fill[:] = 0
        slot = _slot(low, high, len(table))
    inline = count <= _INLINE and spelt == 0
    value = np.int64(0)
    if inline:
        value = np.int64(count)
        for index in range(count):
            inline = inline and ids[index] < 1 << _ID_BITS
            value |= np.int64(ids[index]) << (2 + _ID_BITS * index)
    if not inline:
        place = fill[1]
        value = place << 2
        store[place] = count
        letters = store.view(np.uint8)
        for index in range(length if spelt else 0):
            letters[8 * (place + 1) + index] = text[at + index]
        place += 1 + spelt
        for index in range(count):
            store[place + index] = ids[index]
        fill[1] = place + count
    table[slot, 0], table[slot, 1], table[slot, 2] = np.int64(low), np.int64(high), value
    fill[0] += 1


@compiled(nogil=True)
def encode(model, work, text, ends, counts, first, stop, out, used, lengths):
    """Writes the ids of documents `first` to `stop`, whose words begin `text`; returns new `used`.

    `text`: uint8[n] concatenated words; `ends`: int32[n] ends of words; `counts`: int64[documents]
    words per document, or -1 minus its only id; `out`: int32[n], receives ids from out[used], at
    most one per byte of text; `lengths`: int64[documents], receives the ids per document.
    """
    table, store = work.table, work.store
    letters = store.view(np.uint8)
    mask = (1 << _ID_BITS) - 1
    at = np.int64(0)
    word = 0
    for document in range(first, stop):
        begin = used
        if counts[document] < 0:
            out[used] = -1 - counts[document]
            used += 1
        for _ in range(counts[document]):
            end = np.int64(ends[word])
            word += 1
            length = end - at
            low, high, slot, value = np.uint64(0), np.uint64(0), np.int64(0), np.int64(-1)
            if length <= MEMO_BYTES:
                low, high = _key(text, at, length)
                slot = _slot(low, high, len(table))
            while length <= MEMO_BYTES and table[slot, 1] != 0:
                if table[slot, 0] == np.int64(low) and table[slot, 1] == np.int64(high):
                    value = table[slot, 2]
                    if length > 15:
                        spelt = 8 * ((value >> 2) + 1)
                        for index in range(length):
                            if letters[spelt + index] != text[at + index]:
                                value = np.int64(-1)
                                break
                    if value >= 0:
                        break
                slot = (slot + 1) & (len(table) - 1)
            if value < 0:
                count = ids_of_word(model, text, at, length, work)
                for index in range(count):
                    out[used + index] = work.ids[index]
                used += count
                if length <= MEMO_BYTES:
                    _remember(text, at, length, count, work, slot, low, high)
            elif value & 3:
                # Write all places; the next word overwrites the excess.
                out[used] = value >> 2 & mask
                out[used + 1] = value >> 2 + _ID_BITS & mask
                out[used + 2] = value >> 2 + 2 * _ID_BITS & mask
                used += value & 3
            else:
                place = value >> 2
                count = store[place]
                place += 1 + ((length + 7) // 8 if length > 15 else 0)
                for index in range(count):
                    out[used + index] = store[place + index]
                used += count
            at = end
        lengths[document] = used - begin
    return used
