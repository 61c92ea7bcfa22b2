"""Unicode tables of Hugging Face's `tokenizers`, read from the library itself.

The library, its parts and Python follow different Unicode versions. So each table is made by
passing every character to the library, which takes a second per table.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from pipeline.tokenizer.byte_level import LETTER, NEWLINE, NUMBER, SPACE

POINTS = 0x110000
# Treatment of a character by WordPiece; 0 or more is the index of a replacement.
KEEP, BREAK, ALONE, REMOVE, REFUSE = -1, -2, -3, -4, -5
# Separates characters that are normalised together; it neither changes nor combines.
_BORDER = "|"
_PER_CALL = 1 << 16
# Marks with the lowest and highest combining class, 1 and 240. Source: Unicode's
# DerivedCombiningClass.txt.
_OVERLAY, _IOTA = "\u0334", "\u0345"


def _all() -> list[str]:
    surrogates = range(0xD800, 0xE000)
    return [
        chr(point) for point in range(POINTS) if point not in surrogates and chr(point) != _BORDER
    ]


def kinds() -> np.ndarray:
    r"""Returns uint8[POINTS], the kinds of characters in the library's regular expressions.

    Letters are \p{L}, numbers \p{N}, spaces \s; NEWLINE is \r and \n.
    """
    text = "".join(_all())
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    found = np.zeros(POINTS, np.uint8)
    kinds = {r"\p{L}+": LETTER, r"\p{N}+": NUMBER, r"\s+": SPACE}
    runs = _matches("|".join(kinds), text)
    firsts = "".join(text[begin] for begin, _ in runs)
    for pattern, kind in kinds.items():
        for first, last in _matches(pattern, firsts):
            for begin, end in runs[first:last]:
                found[points[begin:end]] = kind
    found[[ord("\r"), ord("\n")]] = NEWLINE
    return found


def _matches(pattern: str, text: str) -> list[tuple[int, int]]:
    from tokenizers import Regex, pre_tokenizers

    rule = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return [place for _, place in rule.pre_tokenize_str(text)]


def normalised(rule: Callable[[str], str], texts: Iterable[str]) -> list[str]:
    """Applies `rule` to many short texts without _BORDER, in few calls."""
    texts, found = list(texts), []
    for begin in range(0, len(texts), _PER_CALL):
        part = texts[begin : begin + _PER_CALL]
        results = rule(_BORDER.join(part)).split(_BORDER)
        # Some result contains the border.
        found += results if len(results) == len(part) else [rule(text) for text in part]
    return found


def _marks() -> np.ndarray:
    """Returns bool[POINTS], True for characters that the library's NFD may reorder."""
    from tokenizers import normalizers

    decompose = normalizers.NFD().normalize_str
    characters = _all()
    alone = normalised(decompose, characters)
    after = normalised(decompose, (_IOTA + each for each in characters))
    found = np.zeros(POINTS, bool)
    for character, one, two in zip(characters, alone, after, strict=True):
        found[ord(character)] = two != _IOTA + one
    found[ord(_IOTA)] = True
    assert found[ord(_OVERLAY)]
    return found


def changed_by(normaliser: Any) -> np.ndarray:
    """Returns bool[POINTS], True for characters whose texts NFC or NFKC may change.

    No other character decomposes permanently, is reordered, or combines with the one before it.
    Source: Unicode Standard Annex 15, section 9.
    """
    from tokenizers import normalizers

    found = _marks()
    characters = _all()
    results = normalised(normaliser.normalize_str, characters)
    for character, result in zip(characters, results, strict=True):
        found[ord(character)] |= result != character
    for result in normalised(normalizers.NFD().normalize_str, characters):
        for part in result[1:]:
            found[ord(part)] = True
    return found


class Actions(NamedTuple):
    """Rules for BERT's words: normalised text, cut at white space and punctuation.

    BERT's normaliser treats each character alone, except for the order of combining marks, which it
    then removes. The library encodes texts with the few exceptions.
    """

    # int32[POINTS] for each character KEEP, BREAK (white space), ALONE (a separate word), REMOVE,
    # REFUSE, or the index of its replacement in `right_sides`.
    actions: np.ndarray
    right_sides: np.ndarray  # uint8[bytes] zero-terminated replacements; spaces separate words
    longest: int  # longest replacement, in bytes


def actions(normaliser: Any, decomposes: bool) -> dict[str, Any]:
    """Returns the normaliser's fields of `Actions`; `decomposes` if NFD or NFKD reorders marks."""
    found = np.full(POINTS, KEEP, np.int32)
    right_sides: dict[str, int] = {}
    size = 1  # index 0 means no replacement
    rendered = _rendered(normaliser, decomposes)
    alone = {each for each, shown in rendered.items() if shown == f" {each} "}
    for character, shown in rendered.items():
        if shown is None or _joins(shown, alone):
            action = REFUSE
        elif shown == f" {character} ":
            action = ALONE
        elif not shown:
            action = REMOVE
        elif not shown.strip(" "):
            action = BREAK
        else:
            if shown not in right_sides:
                right_sides[shown] = size
                size += len(shown.encode()) + 1
            action = right_sides[shown]
        found[ord(character)] = action
    blob = b"\0" + b"".join(shown.encode() + b"\0" for shown in right_sides)
    return {
        "actions": found,
        "right_sides": np.frombuffer(blob, np.uint8),
        "longest": max([4, *(len(shown.encode()) for shown in right_sides)]),
    }


def _joins(shown: str, alone: set[str]) -> bool:
    """Returns whether a character joins others here and is a word of its own elsewhere.

    Then normalised text does not determine its words. `shown` has a space at each word border.
    """
    first, *inner = shown.split(" ")
    last = [inner.pop()] if inner else []
    long = (each for each in inner if len(each) > 1)
    return any(not alone.isdisjoint(each) for each in (first, *last, *long))


def _rendered(normaliser: Any, decomposes: bool) -> dict[str, str | None]:
    """Returns replacements, with a space at each new word border; None if neighbours matter."""
    from tokenizers import pre_tokenizers

    characters = _all()
    results = [
        *normalised(normaliser.normalize_str if normaliser else str, characters),
        normaliser.normalize_str(_BORDER) if normaliser else _BORDER,
    ]
    characters.append(_BORDER)
    parts = [*dict.fromkeys("".join(results))]
    words = pre_tokenizers.BertPreTokenizer()
    # Between letters, white space is removed and punctuation is a separate word.
    begins = [begin for _, (begin, _) in words.pre_tokenize_str("".join(f"a{x}a" for x in parts))]
    borders = {begin // 3 for begin in begins if begin % 3 == 2}
    words_of_one = {begin // 3 for begin in begins if begin % 3 == 1}
    shown = {parts[n]: f" {parts[n]} " if n in words_of_one else " " for n in borders}
    marks = set(map(chr, np.flatnonzero(_marks()))) if decomposes else set()
    found: dict[str, str | None] = {}
    for character, result in zip(characters, results, strict=True):
        if result == character and character not in shown and character not in marks:
            continue
        apart = marks.isdisjoint(result)
        found[character] = "".join(shown.get(part, part) for part in result) if apart else None
    return found
