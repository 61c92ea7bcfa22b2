"""Compiled code that cuts texts into words, for byte-level BPE and WordPiece.

One file, as in kernels.py, because Numba's cache checks only the function's own file.
"""

import numpy as np

from tasks.numba_cache import compiled

# Reasons why a function stops.
DONE = 0
FULL = 1  # `text` cannot hold another document
GROW = 2  # `text` is shorter than the document
NORMALISE = 3  # the normaliser may change the document
LIBRARY = 4  # an odd added token, or context-dependent normalisation

# Instead of an added token's id: a part is text, or left to the library.
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
def _token(tokens, data, at, end):
    """Returns (value, end) of the longest trie key at `at`, or (-1, at)."""
    value, stop = np.int64(-1), at
    node = tokens[0]
    for position in range(at, end):
        byte = np.int64(data[position])
        node = tokens[(node >> 32) ^ byte]
        if node & 0xFF != byte:
            break
        if (node >> 8) & 0xFFFFFF:
            value, stop = ((node >> 8) & 0xFFFFFF) - 1, np.int64(position + 1)
    return value, stop


@compiled(nogil=True)
def parts(added, data, offsets, given, owners, of_ends, of_given, of_owners):
    """Cuts documents at added tokens: the leftmost match, then the longest.

    Returns the number of parts, -1 if there is no room for them.
    Source: Hugging Face's tokenizers, `AddedVocabulary::find_matches`, MatchKind::LeftmostLongest.

    Args:
      added: an `added_tokens.Added`.
      data, offsets: uint8[bytes] UTF-8; int64[parts + 1].
      given: int32[parts] TEXT, REFUSED or an id; only texts are cut.
      owners: int64[parts] document of each part.
      of_ends, of_given, of_owners: receive ends, kinds and owners of the new parts.
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
                value, stop = _token(added.tokens, data, at, end)
                if value >= 0:
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
    bytes that the next document needs).

    Args:
      words: a `byte_level.Words`.
      normalised: whether the documents are already normalised.
      data, offsets: uint8[bytes] UTF-8; int64[documents + 1].
      given: int32[documents] TEXT, REFUSED or the id of an added token.
      first: index of the first document.
      text, ends: uint8[n], int32[n]; receive the documents and the ends of words in `text`.
      counts: int64[documents]; receives the words per document, or -1 minus its id.
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
    """Normalises documents from `first` on and finds their words; see `byte_level`.

    `words` is a `word_piece.Words`; `text` receives the concatenated words.
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
