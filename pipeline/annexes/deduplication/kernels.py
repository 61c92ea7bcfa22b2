"""Compiled code for signatures: words and hashes of texts, MinHash, shared n-grams.

One file, because Numba's cache checks only the function's own file.
"""

import functools
import itertools
import sys
import unicodedata

import numpy as np

from tasks.numba_cache import compiled

# Classes of characters in the table; any other value is a word character in lower case.
_SEPARATOR, _SPACE = 0, 1
# Flag of a character that forms a word alone, in scripts written without spaces.
_ALONE = 1 << 31
_SCRIPTS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0x20000, 0x323AF),  # Han, extensions B and later
)
# Odd multiplicative hash constants. Source: fractional parts of the golden ratio and of square
# roots, as in SplitMix64 (Steele et al. 2014) and xxHash.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND, _THIRD = 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD


@functools.cache
def character_table() -> np.ndarray:
    """Returns uint32[1114112], each character's class or lower case; see the constants above.

    Python's letters, digits and combining marks form words, `str.isspace` is space, and all other
    characters separate words.
    """
    table = np.zeros(sys.maxunicode + 1, np.uint32)
    for code in itertools.chain(range(0xD800), range(0xE000, 0x323B0), range(0xE0000, 0xE01F0)):
        character = chr(code)
        if character.isspace():
            table[code] = _SPACE
        elif character.isalnum() or unicodedata.category(character)[0] == "M":
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    for first, last in _SCRIPTS:
        chosen = table[first : last + 1]
        chosen[chosen > _SPACE] |= np.uint32(_ALONE)
    return table


def multipliers(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns (odd uint32[count], uint32[count]), hash functions a · x + b modulo 2**32."""
    with np.errstate(over="ignore"):
        state = (np.arange(1, 2 * count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(
            _GOLDEN
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        high = (state >> np.uint64(32)).astype(np.uint32)
    return high[:count] | np.uint32(1), high[count:]


@compiled(inline="always")
def _mixed(value):
    """Returns a finalised 64-bit hash. Source: MurmurHash3's fmix64 without its last step."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(_THIRD)
    return value ^ (value >> np.uint64(33))


@compiled(nogil=True)
def words_of(data, begins, ends, table, out, bounds, exact):
    """Fills in hashes of words and texts.

    `data`: uint8, UTF-8 of all texts, at `begins` to `ends`, int64[texts]; `table` from
    `character_table`; `out`: uint64, an element per byte, receives hashes of words; `bounds`:
    int64[texts + 1], each text's range in `out`; `exact`: uint64[texts, 2], hashes of lower-case
    texts without outer white space and with inner white space as one space; collisions are
    negligible.
    """
    word_count = 0
    for text in range(len(begins)):
        at, end = begins[text], ends[text]
        first, second = np.uint64(_GOLDEN), np.uint64(_SECOND)
        word = np.uint64(0)
        in_word = waiting = begun = False
        while at < end:
            code = np.uint32(data[at])
            if code < 0x80:
                at += 1
            elif code < 0xE0:
                code = (code & 0x1F) << 6 | (np.uint32(data[at + 1]) & 0x3F)
                at += 2
            elif code < 0xF0:
                code = (
                    (code & 0x0F) << 12
                    | (np.uint32(data[at + 1]) & 0x3F) << 6
                    | (np.uint32(data[at + 2]) & 0x3F)
                )
                at += 3
            else:
                code = (
                    (code & 0x07) << 18
                    | (np.uint32(data[at + 1]) & 0x3F) << 12
                    | (np.uint32(data[at + 2]) & 0x3F) << 6
                    | (np.uint32(data[at + 3]) & 0x3F)
                )
                at += 4
            kind = table[code]
            if kind > _SPACE:
                alone = kind & np.uint32(_ALONE)
                letter = np.uint64(kind & np.uint32(0x7FFFFFFF))
                if in_word and alone:
                    out[word_count] = _mixed(word)
                    word_count += 1
                    in_word = False
                if not in_word:
                    word = np.uint64(_GOLDEN)
                word = (word ^ letter) * np.uint64(_FIRST)
                word ^= word >> np.uint64(32)
                in_word = True
                if alone:
                    out[word_count] = _mixed(word)
                    word_count += 1
                    in_word = False
            else:
                letter = np.uint64(code)
                if in_word:
                    out[word_count] = _mixed(word)
                    word_count += 1
                    in_word = False
                if kind == _SPACE:
                    waiting = begun
                    continue
            if waiting:
                first = (first ^ np.uint64(0x20)) * np.uint64(_FIRST)
                first ^= first >> np.uint64(32)
                second = (second ^ np.uint64(0x20)) * np.uint64(_THIRD)
                second ^= second >> np.uint64(29)
                waiting = False
            begun = True
            first = (first ^ letter) * np.uint64(_FIRST)
            first ^= first >> np.uint64(32)
            second = (second ^ letter) * np.uint64(_THIRD)
            second ^= second >> np.uint64(29)
        if in_word:
            out[word_count] = _mixed(word)
            word_count += 1
        bounds[text + 1] = word_count
        exact[text, 0] = _mixed(first) if begun else np.uint64(0)
        exact[text, 1] = _mixed(second) if begun else np.uint64(0)


@compiled(inline="always")
def _gram(words, begin, count, factors):
    """Hashes some words by multilinear hashing (Lemire and Kaser 2014, arXiv:1202.4961)."""
    total = np.uint64(count) * np.uint64(_GOLDEN)
    for place in range(count):
        total += words[begin + place] * factors[place]
    return _mixed(total)


@compiled(nogil=True)
def minhash(words, bounds, size, factors, multiply, add, out):
    """Fills in uint32[texts, hashes], each hash function's minimum over the shingles.

    A shingle is `size` consecutive words. A shorter text is one shingle; a text without words keeps
    the largest value.

    Source: Broder 1997, "On the resemblance and containment of documents".
    """
    hashes = len(multiply)
    for text in range(len(bounds) - 1):
        least = out[text]
        for number in range(hashes):
            least[number] = np.uint32(0xFFFFFFFF)
        begin, end = bounds[text], bounds[text + 1]
        count = min(size, end - begin)
        if not count:
            continue
        for at in range(begin, end - count + 1):
            shingle = np.uint32(_gram(words, at, count, factors) >> np.uint64(32))
            for number in range(hashes):
                value = np.uint32(multiply[number] * shingle + add[number])
                least[number] = min(least[number], value)


@compiled
def band_keys(sketches, bands, rows):
    """Returns uint64[bands, texts], a hash of each band's `rows` values."""
    keys = np.empty((bands, len(sketches)), np.uint64)
    for text in range(len(sketches)):
        for band in range(bands):
            key = np.uint64(_GOLDEN)
            for row in range(rows):
                key = (key ^ np.uint64(sketches[text, band * rows + row])) * np.uint64(_FIRST)
                key ^= key >> np.uint64(32)
            keys[band, text] = _mixed(key)
    return keys


@compiled
def lines_of(data, bounds):
    """Returns int64 (text, number, begin, end) of all non-empty lines of texts."""
    count = len(bounds) - 1
    for at in range(bounds[0], bounds[-1]):
        count += data[at] == 10
    found = np.empty((count, 4), np.int64)
    count = 0
    for text in range(len(bounds) - 1):
        begin, number = bounds[text], 0
        for at in range(bounds[text], bounds[text + 1] + 1):
            if at == bounds[text + 1] or data[at] == 10:
                if at > begin:
                    found[count, 0], found[count, 1] = text, number
                    found[count, 2], found[count, 3] = begin, at
                    count += 1
                begin, number = at + 1, number + 1
    return found[:count]


@compiled(nogil=True)
def grams_of(words, bounds, size, factors):
    """Returns (uint64 hashes of n-grams of `size` words, int64[texts + 1] bounds)."""
    count = 0
    for text in range(len(bounds) - 1):
        count += max(0, bounds[text + 1] - bounds[text] - size + 1)
    found = np.empty(count, np.uint64)
    ends = np.zeros(len(bounds), np.int64)
    count = 0
    for text in range(len(bounds) - 1):
        for at in range(bounds[text], bounds[text + 1] - size + 1):
            found[count] = _gram(words, at, size, factors)
            count += 1
        ends[text + 1] = count
    return found, ends


@compiled(nogil=True)
def shared_grams(words, bounds, size, factors, known, sieve):
    """Returns int64[found, 2], (text, index in `known`) of each known n-gram found.

    `words`, `bounds` are from `words_of`; an n-gram has `size` words. `factors`: uint64[size];
    `known`: uint64, sorted hashes; `sieve`: bool[2**bits], true at the first bits of known hashes.
    """
    shift = np.uint64(64)
    width = len(sieve)
    while width > 1:
        width >>= 1
        shift -= np.uint64(1)
    found = np.empty((64, 2), np.int64)
    count = 0
    for text in range(len(bounds) - 1):
        for at in range(bounds[text], bounds[text + 1] - size + 1):
            gram = _gram(words, at, size, factors)
            if not sieve[gram >> shift]:
                continue
            place = np.searchsorted(known, gram)
            if place < len(known) and known[place] == gram:
                if count == len(found):
                    more = np.empty((2 * count, 2), np.int64)
                    more[:count] = found
                    found = more
                found[count, 0], found[count, 1] = text, place
                count += 1
    return found[:count]


@compiled
def similar_pairs(bounds, places, signatures, least, leaders):
    """Returns (int64[edges, 2] indices in groups, candidates, unlike).

    In each group of texts with a common key, the first one is a leader. Every other is a candidate,
    which joins the first leader with which it shares `least` values (0 for any); without one, it is
    unlike and becomes a leader, of at most `leaders`. `bounds`: int64[groups + 1]; `places`: int64,
    each text's row in `signatures`, group after group; `signatures`: uint8[texts, hashes].
    """
    edges = np.empty((len(places), 2), np.int64)
    count = candidates = unlike = 0
    leading = np.empty(leaders, np.int64)
    for group in range(len(bounds) - 1):
        begin, end = bounds[group], bounds[group + 1]
        leading[0], known = begin, 1
        for member in range(begin + 1, end):
            candidates += 1
            joined = False
            for number in range(known):
                leader = leading[number]
                if least:
                    equal = 0
                    for place in range(signatures.shape[1]):
                        equal += (
                            signatures[places[leader], place] == signatures[places[member], place]
                        )
                    if equal < least:
                        continue
                edges[count, 0], edges[count, 1] = leader, member
                count += 1
                joined = True
                break
            if not joined:
                unlike += 1
                if known < leaders:
                    leading[known] = member
                    known += 1
    return edges[:count], candidates, unlike


@compiled
def join(parents, first, second):
    """Joins the sets of first[i] and second[i]; a set's root is its least member."""
    for number in range(len(first)):
        left, right = first[number], second[number]
        while parents[left] != left:
            parents[left] = parents[parents[left]]
            left = parents[left]
        while parents[right] != right:
            parents[right] = parents[parents[right]]
            right = parents[right]
        if left < right:
            parents[right] = left
        elif right < left:
            parents[left] = right


@compiled
def flatten(parents):
    """Replaces every parent by its root; a parent never exceeds its child."""
    for number in range(len(parents)):
        parents[number] = parents[parents[number]]


@compiled
def reroot(roots, out):
    """Replaces each root that is `out` (bool) by its set's first member that is not, if any.

    Members that are out keep theirs.
    """
    for number in range(len(roots)):
        root = roots[number]
        if root == number or out[number] or not out[root]:
            continue
        if roots[root] == root:
            roots[root] = number
        roots[number] = roots[root]


@compiled
def others_of(roots):
    """Returns uint32, the number of other units in each root's set."""
    counts = np.zeros(len(roots), np.uint32)
    for number in range(len(roots)):
        if roots[number] != number:
            counts[roots[number]] += np.uint32(1)
    return counts


def gram_factors(size: int) -> np.ndarray:
    """Returns uint64[size], odd factors for the words of a shingle or n-gram."""
    odd, add = multipliers(2 * size, seed=2)
    return (
        odd[:size].astype(np.uint64) << np.uint64(32)
        | odd[size:].astype(np.uint64)
        | add[:size].astype(np.uint64)
    )
