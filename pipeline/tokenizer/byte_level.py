r"""Finds words of byte-level BPE without a regular expression.

The patterns of GPT-2, GPT-4, Llama 3, Qwen and relatives differ only in details:

    's|'t|…      contractions: lower case, any case, or none
    ?\p{L}+      letters and the character before them
    ?\p{N}+      numbers, with the space before them or in groups
    ?[^\s\p{L}\p{N}]+     other characters, the space before and the line ends after them
    \s*[\r\n]+|\s+(?!\S)|\s+    white space; the last one may belong to the next word

`PATTERNS` lists all supported combinations.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

# Kinds of characters.
OTHER, LETTER, NUMBER, SPACE, NEWLINE = range(5)
# Added to a kind: a normaliser may change texts with this character.
CHANGES = 0x80


class Words(NamedTuple):
    """Rules that cut texts into words."""

    # uint8[characters.POINTS], kinds of characters, plus CHANGES if texts must be normalised.
    kinds: np.ndarray
    tokens: np.ndarray  # int64[nodes] trie of added tokens that need the library
    begins_token: np.ndarray  # bool[256] their first bytes
    prefix: bool  # whether to add a missing leading space
    contractions: int  # 0 for none, 1 for lower case, 2 for any case
    before_letters: int  # 0 for none, 1 for a space, 2 for any character but numbers and line ends
    space_before_numbers: bool  # whether a number includes the space before it
    numbers: int  # maximum digits in a word, 0 for no limit
    lines_after_others: bool  # whether other characters include the line ends after them
    lines: bool  # whether to cut white space after its last line end
    last_space: bool  # whether the last of several spaces belongs to the next word


# Variable places of a pattern, each with its values in Words.
_CONTRACTIONS = {"": 0, "'s|'t|'re|'ve|'m|'ll|'d|": 1, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|": 2}
_LETTERS = {r"\p{L}+|": 0, r" ?\p{L}+|": 1, r"[^\r\n\p{L}\p{N}]?\p{L}+|": 2}
_NUMBERS = {
    r" ?\p{N}+|": (True, 0),
    r"\p{N}+|": (False, 0),
    r"\p{N}|": (False, 1),
    r"\p{N}{1,3}|": (False, 3),
}
_OTHERS = {r" ?[^\s\p{L}\p{N}]+|": False, r" ?[^\s\p{L}\p{N}]+[\r\n]*|": True}
_LINES = {"": False, r"\s*[\r\n]+|": True}
_LAST_SPACE = {r"\s+": False, r"\s+(?!\S)|\s+": True}
_PLACES: tuple[dict[str, Any], ...] = (
    *(_CONTRACTIONS, _LETTERS, _NUMBERS, _OTHERS, _LINES, _LAST_SPACE),
)
PATTERNS = {
    "".join(parts): tuple(place[part] for place, part in zip(_PLACES, parts, strict=True))
    for parts in itertools.product(*_PLACES)
}
# Equivalent spellings. Source: openai/tiktoken, `tiktoken_ext/openai_public.py`.
_SYNONYMS = (
    ("'(?i:[sdmt]|ll|ve|re)|", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"),
    ("(?:'s|'t|'re|'ve|'m|'ll|'d)|", "'s|'t|'re|'ve|'m|'ll|'d|"),
    ("'(?:[sdmt]|ll|ve|re)|", "'s|'t|'re|'ve|'m|'ll|'d|"),
    # The possessive form gives no space back, so it matches only where `\s+` matches as much.
    (r"\s++(?!\S)|\s+", r"\s+"),
    ("?+", "?"),
    ("++", "+"),
    (r"\s*[\r\n]|", r"\s*[\r\n]+|"),
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def places(pattern: str) -> dict[str, int] | None:
    """Returns the fields of Words for a regular expression; None if it is unsupported."""
    for ours, theirs in _SYNONYMS:
        pattern = pattern.replace(ours, theirs)
    if pattern not in PATTERNS:
        return None
    contractions, letters, (space, numbers), others, lines, last = PATTERNS[pattern]
    return {
        "contractions": contractions,
        "before_letters": letters,
        "space_before_numbers": space,
        "numbers": numbers,
        "lines_after_others": others,
        "lines": lines,
        "last_space": last,
    }
