"""Compiled code for WordPiece: cuts texts into words, and encodes words.

One file, as in kernels.py, because Numba's cache checks only a function's own file.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pipeline.tokenizer.added_tokens import REFUSED
from tasks.numba_cache import compiled

# Reasons why a function stops.
DONE = 0
FULL = 1  # `text` cannot hold another document
GROW = 2  # `text` is shorter than the document
LIBRARY = 3  # an odd added token, or context-dependent normalisation

# WordPiece's treatment of a character; 0 or more is the index of a replacement.
KEEP, BREAK, ALONE, REMOVE, REFUSE = -1, -2, -3, -4, -5

# Unused bytes at the end of `text`: words are read eight bytes at a time.
SLACK = 32

_LAST_POINT = 0x10FFFF
_BLANK = 0x20


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


@compiled(nogil=True)
def word_piece(words, data, offsets, given, first, text, ends, counts):
    """Normalises documents and finds their words, concatenated in `text`.

    Starts at document data[offsets[first] : offsets[first + 1]]. Returns (DONE or the reason for
    stopping, next document, used bytes of `text`, number of words, bytes that the next document
    needs). `words`: a `characters.Actions`; `data`: uint8[bytes] UTF-8; `offsets`:
    int64[documents + 1]; `given`: int32[documents] TEXT, REFUSED or the id of an added token;
    `text`, `ends`: uint8[n], int32[n], receive the documents and the ends of words in `text`;
    `counts`: int64[documents], receives the words per document, or -1 minus its id.
    """
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


# Longest memoised word, in bytes.
MEMO_BYTES = 64
# Number of ids stored in the memo entry itself, and bits per id.
_INLINE = 3
_ID_BITS = 20

_FULL = np.uint64(0xFF) << np.uint64(56)


class Model(NamedTuple):
    """Tables of a model."""

    initial: np.ndarray  # int64[nodes] trie of word-initial pieces
    continuing: np.ndarray  # int64[nodes] trie of continuation pieces without their prefix
    unknown: int  # id of a word that cannot be spelt
    longest: int  # maximum characters of a known word


class Work(NamedTuple):
    """Buffers; `ids` grows, and the others have a fixed size."""

    ids: np.ndarray  # int32[n] ids of a word
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
                count = _by_longest(model, text, at, length, work)
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
