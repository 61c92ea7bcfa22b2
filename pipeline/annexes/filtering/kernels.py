"""Compiled code for filters: characters, words, lines and repeated n-grams of texts.

One file, because Numba's cache checks only the function's own file.
"""

import functools
import itertools
import sys
import unicodedata

import numpy as np

from tasks.numba_cache import compiled

# Properties of a character, as bits.
SPACE, ALPHA, ALNUM, DIGIT, UPPER, PUNCTUATION, CONTROL, CLOSING = (1 << bit for bit in range(8))
# Columns of `counts` in `words_of`.
COLUMNS = (
    *("characters", "words", "word_characters", "alphabetic_words", "hashes", "ellipses"),
    *("letters", "digits", "uppercase", "punctuation", "spaces", "controls", "sentences", "braces"),
)
_CHARACTERS, _WORDS, _WORD_CHARACTERS, _ALPHABETIC_WORDS, _HASHES, _ELLIPSES = range(6)
_LETTERS, _DIGITS, _UPPERCASE, _PUNCTUATION, _SPACES, _CONTROLS, _SENTENCES, _BRACES = range(6, 14)
# N-gram sizes measured by their most frequent n-gram, and by all repetitions.
TOP, REPEATED = range(2, 5), range(5, 11)
_ELLIPSIS = 0x2026
MOST_STOP_WORDS = 64
_LINE = np.dtype(
    [
        ("text", "i8"), ("begin", "i8"), ("end", "i8"), ("characters", "i8"), ("hash", "u8"),
        ("paragraph", "i8"), ("first", "u4"), ("last", "u4"), ("ellipsis", "?"),
    ]
)  # fmt: skip
# Odd multiplicative hash constants. Source: fractional parts of the golden ratio and of square
# roots, as in SplitMix64 (Steele et al. 2014) and xxHash.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD


@functools.cache
def properties() -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8[1114112] bits of every character, uint32[1114112] its lower case).

    Both come from Python; a character stays as it is if its lower case has several characters.
    """
    bits = np.zeros(sys.maxunicode + 1, np.uint8)
    lower = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    # Only private-use characters are assigned between these ranges.
    for code in itertools.chain(range(0xD800), range(0xE000, 0x32400), range(0xE0000, 0xE01F0)):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cn", "Co", "Cs"):
            continue
        bits[code] = (
            SPACE * character.isspace()
            | ALPHA * character.isalpha()
            | ALNUM * character.isalnum()
            | DIGIT * character.isdigit()
            | UPPER * character.isupper()
            | PUNCTUATION * (category[0] == "P")
            | CONTROL * ((category == "Cc" and not character.isspace()) or code == 0xFFFD)
            | CLOSING * (character in "\"'”’)]")
        )
        if len(character.lower()) == 1:
            lower[code] = ord(character.lower())
    return bits, lower


@functools.cache
def scripts() -> dict[str, np.ndarray]:
    """Returns letters' codes by script, the lower-case first word of their names; CJK is "han"."""
    found: dict[str, list[int]] = {}
    for code in np.flatnonzero(properties()[0] & ALPHA).tolist():
        name = unicodedata.name(chr(code), "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
        script = name.partition(" ")[0].lower()
        if not name or not script.isalpha():
            continue
        found.setdefault({"cjk": "han", "ideographic": "han"}.get(script, script), []).append(code)
    return {name: np.array(codes) for name, codes in found.items()}


@compiled(inline="always")
def _decoded(data, at):
    """Returns (code point, bytes) of the UTF-8 character at `at`."""
    code = np.uint32(data[at])
    if code < 0x80:
        return code, 1
    second = np.uint32(data[at + 1]) & 0x3F
    if code < 0xE0:
        return (code & 0x1F) << 6 | second, 2
    third = np.uint32(data[at + 2]) & 0x3F
    if code < 0xF0:
        return (code & 0x0F) << 12 | second << 6 | third, 3
    return (code & 0x07) << 18 | second << 12 | third << 6 | np.uint32(data[at + 3]) & 0x3F, 4


@compiled(inline="always")
def _joined(state, value):
    state = (state ^ np.uint64(value)) * np.uint64(_FIRST)
    return state ^ (state >> np.uint64(32))


@compiled(inline="always")
def _finished(state):
    """Returns a finalised 64-bit hash. Source: MurmurHash3's fmix64 without its last step."""
    state ^= state >> np.uint64(33)
    state *= np.uint64(_SECOND)
    return state ^ (state >> np.uint64(33))


@compiled(nogil=True)
def words_of(data, bounds, bits, lower, exact, folded, sizes, word_bounds, counts):
    """Fills in the words of all texts, and counts of characters and words.

    White space separates words. A sentence ends at a run of ".", "!" and "?", with optional closing
    quotes and brackets, before white space or a line end; the rest of a line is also a sentence.

    `data`: uint8, UTF-8 of all texts; `bounds`: int64[texts + 1]; `bits`, `lower` from
    `properties`. `exact`: uint64, an element per byte, receives hashes of words; `folded` likewise,
    in lower case without outer characters that are neither letters nor digits, 0 if nothing is
    left; `sizes`: int32, characters per word; `word_bounds`: int64[texts + 1], each text's range of
    words; `counts`: int64[texts, COLUMNS].
    """
    number = 0
    for text in range(len(bounds) - 1):
        at, end = bounds[text], bounds[text + 1]
        row = counts[text]
        row[:] = 0
        dots = size = 0
        in_word = has_letter = in_sentence = is_marked = False
        word = kept = running = np.uint64(0)
        while at < end:
            code, width = _decoded(data, at)
            at += width
            kind = bits[code]
            row[_CHARACTERS] += 1
            if code == 0x2E:  # "."
                dots += 1
                if dots == 3:
                    row[_ELLIPSES] += 1
                    dots = 0
            else:
                dots = 0
            if kind & SPACE:
                row[_SPACES] += 1
                if in_word:
                    exact[number], folded[number] = _finished(word), kept
                    sizes[number] = size
                    number += 1
                    row[_WORD_CHARACTERS] += size
                    row[_ALPHABETIC_WORDS] += has_letter
                    in_word = False
                if is_marked or (code == 0x0A and in_sentence):
                    row[_SENTENCES] += 1
                    in_sentence = is_marked = False
                continue
            if not in_word:
                in_word, has_letter, size = True, False, 0
                word, kept, running = np.uint64(_GOLDEN), np.uint64(0), np.uint64(0)
            size += 1
            word = _joined(word, code)
            if kind & ALNUM:
                running = _joined(running if running else np.uint64(_GOLDEN), lower[code])
                kept = running
            elif running:
                running = _joined(running, lower[code])
            has_letter |= (kind & ALPHA) != 0
            row[_LETTERS] += (kind & ALPHA) != 0
            row[_DIGITS] += (kind & DIGIT) != 0
            row[_UPPERCASE] += (kind & UPPER) != 0
            row[_PUNCTUATION] += (kind & PUNCTUATION) != 0
            row[_CONTROLS] += (kind & CONTROL) != 0
            row[_HASHES] += code == 0x23
            row[_ELLIPSES] += code == _ELLIPSIS
            row[_BRACES] += code == 0x7B
            in_sentence = True
            if code == 0x2E or code == 0x21 or code == 0x3F:
                is_marked = True
            elif not kind & CLOSING:
                is_marked = False
        if in_word:
            exact[number], folded[number] = _finished(word), kept
            sizes[number] = size
            number += 1
            row[_WORD_CHARACTERS] += size
            row[_ALPHABETIC_WORDS] += has_letter
        row[_SENTENCES] += in_sentence
        word_bounds[text + 1] = number
        row[_WORDS] = number - word_bounds[text]


@compiled(nogil=True)
def distinct(folded, word_bounds, wanted, out):
    """Fills in int64[texts], the number of `wanted` hashes (at most 64) among the words."""
    for text in range(len(word_bounds) - 1):
        found = np.uint64(0)
        for at in range(word_bounds[text], word_bounds[text + 1]):
            for number in range(len(wanted)):
                if folded[at] == wanted[number]:
                    found |= np.uint64(1) << np.uint64(number)
        out[text] = 0
        while found:
            found &= found - np.uint64(1)
            out[text] += 1


@compiled(nogil=True)
def count_of(data, bounds, table, out):
    """Fills in int64[texts], the number of characters in `table`, bool[1114112]."""
    for text in range(len(bounds) - 1):
        at, end = bounds[text], bounds[text + 1]
        out[text] = 0
        while at < end:
            code, width = _decoded(data, at)
            at += width
            out[text] += table[code]


@compiled(nogil=True)
def lines_of(data, bounds, bits):
    """Returns all non-blank lines, without outer white space.

    Fields: `text`, its index; `begin` and `end`, in bytes; `characters`; `hash`; `paragraph`,
    number of the run of lines between blank ones, across all texts; `first` and `last`, character
    codes; `ellipsis`, true if the line ends with "..." or "…".
    """
    count = len(bounds) - 1
    for at in range(bounds[0], bounds[-1]):
        count += data[at] == 0x0A
    lines = np.empty(count, _LINE)
    count = 0
    paragraph = -1
    for text in range(len(bounds) - 1):
        at, end = bounds[text], bounds[text + 1]
        is_blank_before = True
        while at < end:
            begin = stop = at
            first = last = np.uint32(0)
            characters = seen = dots = 0
            is_apart = False
            state = kept = np.uint64(_GOLDEN)
            while at < end:
                code, width = _decoded(data, at)
                at += width
                if code == 0x0A:
                    break
                if bits[code] & SPACE:
                    if seen:
                        seen += 1
                        state = _joined(state, code)
                    is_apart = True
                    continue
                if not seen:
                    first, begin = code, at - width
                seen += 1
                dots = dots * (not is_apart) + 1 if code == 0x2E else 0
                is_apart = False
                state = _joined(state, code)
                kept, characters, stop, last = state, seen, at, code
            if not characters:
                is_blank_before = True
                continue
            paragraph += is_blank_before
            is_blank_before = False
            line = lines[count]
            line.text, line.paragraph = text, paragraph
            line.begin, line.end, line.characters = begin, stop, characters
            line.hash, line.first, line.last = _finished(kept), first, last
            line.ellipsis = last == _ELLIPSIS or dots >= 3
            count += 1
    return lines[:count]


@compiled(nogil=True)
def repeats(keys, groups):
    """Returns bool[keys], whether an earlier key of the same group is equal; groups are sorted."""
    found = np.zeros(len(keys), np.bool_)
    width = 2
    while width < 2 * len(keys):
        width *= 2
    places = np.full(width, -1, np.int64)
    begin = 0
    for at in range(len(keys)):
        if at and groups[at] != groups[at - 1]:
            begin = at
        slot = np.int64(keys[at] & np.uint64(width - 1))
        # Slots of earlier groups count as free: no one looks for those groups again.
        while places[slot] >= begin and keys[places[slot]] != keys[at]:
            slot = (slot + 1) & (width - 1)
        if places[slot] >= begin:
            found[at] = True
        else:
            places[slot] = at
    return found


@compiled(nogil=True)
def repeated_grams(exact, sizes, word_bounds, out):
    """Fills in int64[texts, 9], non-space characters in repeated n-grams of 2 to 10 words.

    For 2 to 4 words: characters of the most frequent n-gram, the longest in a tie, times its
    occurrences; 0 if it occurs once. For 5 to 10 words: characters of words in any repeated
    occurrence except the first, each word once.
    """
    longest = 1
    for text in range(len(word_bounds) - 1):
        longest = max(longest, word_bounds[text + 1] - word_bounds[text])
    width = 2
    while width < 2 * longest:
        width *= 2
    keys = np.empty(width, np.uint64)
    times = np.empty(width, np.int32)
    stamps = np.zeros(width, np.int64)
    grams = np.empty(longest, np.uint64)
    before = np.zeros(longest + 1, np.int64)
    stamp = 0
    for text in range(len(word_bounds) - 1):
        out[text] = 0
        start = word_bounds[text]
        words = word_bounds[text + 1] - start
        own = 2
        while own < 2 * words:
            own *= 2
        mask = np.uint64(own - 1)
        for at in range(words):
            grams[at] = exact[start + at]
            before[at + 1] = before[at] + sizes[start + at]
        for count in range(2, min(10, words) + 1):
            stamp += 1
            most = 1
            characters = covered = until = 0
            for at in range(words - count + 1):
                grams[at] = _joined(grams[at] * np.uint64(_GOLDEN), exact[start + at + count - 1])
                key = _finished(grams[at])
                slot = np.int64(key & mask)
                while stamps[slot] == stamp and keys[slot] != key:
                    slot = (slot + 1) & np.int64(mask)
                if stamps[slot] != stamp:
                    stamps[slot], keys[slot], times[slot] = stamp, key, 1
                    continue
                times[slot] += 1
                size = before[at + count] - before[at]
                if times[slot] > most:
                    most, characters = times[slot], size
                elif times[slot] == most:
                    characters = max(characters, size)
                covered += before[at + count] - before[max(at, until)]
                until = at + count
            if most == 1:
                break  # an unrepeated n-gram has no repeated continuation
            out[text, count - 2] = most * characters if count < 5 else covered


@compiled(nogil=True)
def check_lines(data, begins, ends, bits, least_words, longest_word, phrases, phrase_ends, kept):
    """Clears `kept`, bool[lines], for lines with too few words, a long word or a phrase.

    `data`: uint8, UTF-8 of all texts; `begins`, `ends`: int64[lines]; `bits` from `properties`;
    `least_words` per line; `longest_word` in characters; `phrases`: uint8, concatenated, with
    lower-case ASCII letters, as matches ignore ASCII case; `phrase_ends`: int64[phrases].
    """
    begins_phrase = np.zeros(256, np.bool_)
    for number in range(len(phrase_ends)):
        letter = phrases[phrase_ends[number - 1] if number else 0]
        begins_phrase[letter] = True
        if 0x61 <= letter <= 0x7A:
            begins_phrase[letter - 32] = True
    for line in range(len(begins)):
        if not kept[line]:
            continue
        at, end = begins[line], ends[line]
        words = size = 0
        while at < end and kept[line]:
            if begins_phrase[data[at]]:
                kept[line] = not _begins_phrase(data, at, end, phrases, phrase_ends)
            code, width = _decoded(data, at)
            at += width
            if bits[code] & SPACE:
                size = 0
                continue
            words += size == 0
            size += 1
            if size > longest_word:
                kept[line] = False
        if words < least_words:
            kept[line] = False


@compiled
def _begins_phrase(data, at, end, phrases, phrase_ends):
    begin = 0
    for stop in phrase_ends:
        size = stop - begin
        same = at + size <= end
        place = 0
        while same and place < size:
            letter = data[at + place]
            if 0x41 <= letter <= 0x5A:
                letter += 32
            same = letter == phrases[begin + place]
            place += 1
        if same:
            return True
        begin = stop
    return False


@compiled(nogil=True)
def joined_lines(data, texts, begins, ends, kept, count):
    """Returns `count` texts of kept lines with line breaks: (uint8, int64[count + 1] bounds)."""
    size = 0
    for line in range(len(texts)):
        if kept[line]:
            size += ends[line] - begins[line] + 1
    out = np.empty(size, np.uint8)
    bounds = np.zeros(count + 1, np.int64)
    at = line = 0
    for text in range(count):
        start = at
        while line < len(texts) and texts[line] == text:
            if kept[line]:
                if at > start:
                    out[at] = 0x0A
                    at += 1
                for place in range(begins[line], ends[line]):
                    out[at] = data[place]
                    at += 1
            line += 1
        bounds[text + 1] = at
    return out[:at], bounds
