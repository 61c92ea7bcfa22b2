r"""Words of byte-level BPE, found without a regular expression.

The words of GPT-2, GPT-4, Llama 3, Qwen and their relatives differ in a few places of one pattern:

    's|'t|…      contractions, with or without their capitals, or none
    ?\p{L}+      letters, with the character before them
    ?\p{N}+      numbers, with the space before them, or in groups
    ?[^\s\p{L}\p{N}]+     everything else, with the space before and the ends of lines after
    \s*[\r\n]+|\s+(?!\S)|\s+    white space; its last character may belong to the next word

`PATTERNS` has all patterns of this family, and what is in their places.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np


class Words(NamedTuple):
    """Rules by which texts are cut into words.

    Attributes:
      kinds: uint8[characters.POINTS], kinds of characters; `cut_kernels.CHANGES` is added where a
        document must be normalised.
      tokens: int64[nodes] trie of the added tokens with which the library is needed.
      begins_token: bool[256] their first bytes.
      prefix: whether a space is added to texts that begin without one.
      contractions: 0 for none, 1 for small letters, 2 for any case.
      before_letters: 0 for none, 1 for a space, 2 for any character but numbers and ends of lines.
      space_before_numbers: whether a space before numbers belongs to them.
      numbers: how many of them are a word at most; 0 for any number.
      lines_after_others: whether ends of lines after other characters belong to them.
      lines: whether white space is cut after its last end of line.
      last_space: whether the last of several spaces belongs to the next word.
    """

    kinds: np.ndarray
    tokens: np.ndarray
    begins_token: np.ndarray
    prefix: bool
    contractions: int
    before_letters: int
    space_before_numbers: bool
    numbers: int
    lines_after_others: bool
    lines: bool
    last_space: bool


# The places of a pattern, each with its values in Words.
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
    _CONTRACTIONS,
    _LETTERS,
    _NUMBERS,
    _OTHERS,
    _LINES,
    _LAST_SPACE,
)
PATTERNS = {
    "".join(parts): tuple(place[part] for place, part in zip(_PLACES, parts, strict=True))
    for parts in itertools.product(*_PLACES)
}
# Other ways to write the same. Source: openai/tiktoken, `tiktoken_ext/openai_public.py`.
_SYNONYMS = (
    ("'(?i:[sdmt]|ll|ve|re)|", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"),
    ("(?:'s|'t|'re|'ve|'m|'ll|'d)|", "'s|'t|'re|'ve|'m|'ll|'d|"),
    ("'(?:[sdmt]|ll|ve|re)|", "'s|'t|'re|'ve|'m|'ll|'d|"),
    # A possessive one gives no last space back, so it matches only where `\s+` matches as much.
    (r"\s++(?!\S)|\s+", r"\s+"),
    ("?+", "?"),
    ("++", "+"),
    (r"\s*[\r\n]|", r"\s*[\r\n]+|"),
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def places(pattern: str) -> dict[str, int] | None:
    """Returns the fields of Words that a regular expression means; None if it is another."""
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
