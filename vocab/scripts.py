"""Finds the script of a character or word from Unicode character names."""

import functools
import unicodedata

DIGITS = "digits"
SIGNS = "punctuation"
OTHER = "other"
# The first word of a character's Unicode name gives its script. Source: UnicodeData.txt; Unicode
# Standard Annex 24 assigns letters the same scripts.
_BY_NAME = {
    "LATIN": "Latin",
    "FULLWIDTH": "Latin",
    "CYRILLIC": "Cyrillic",
    "GREEK": "Greek",
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "HIRAGANA": "Hiragana",
    "KATAKANA": "Katakana",
    "HALFWIDTH": "Katakana",
    "KATAKANA-HIRAGANA": "Katakana",
    "HANGUL": "Hangul",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
    "THAI": "Thai",
}
SCRIPTS = (*dict.fromkeys(_BY_NAME.values()), DIGITS, SIGNS, OTHER)


@functools.lru_cache(maxsize=1 << 16)
def _of_character(character: str) -> str:
    """Returns one of `SCRIPTS`; digits and punctuation of all scripts are `DIGITS` and `SIGNS`."""
    category = unicodedata.category(character)
    if category in ("Nd", "No"):
        return DIGITS
    if category[0] in "PS":
        return SIGNS
    name = unicodedata.name(character, "") if category[0] in "LMN" else ""
    return _BY_NAME.get(name.split(" ")[0], OTHER)


def of_word(word: str) -> str:
    """Returns the script of the word's first letter, or `DIGITS` or `SIGNS` if it has no letter."""
    found = [_of_character(character) for character in word]
    for script in found:
        if script not in (DIGITS, SIGNS):
            return script
    return DIGITS if DIGITS in found else SIGNS
