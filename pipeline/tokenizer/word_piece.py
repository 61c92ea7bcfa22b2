"""Words of BERT's WordPiece: normalised text, cut at white space and punctuation.

BERT's normaliser treats each character alone, except for the order of combining marks, which it
then removes. So a table holds each character's result. The library encodes texts with the few
exceptions.
"""

from typing import Any, NamedTuple

import numpy as np

from pipeline.tokenizer import characters
from pipeline.tokenizer.characters import POINTS
from pipeline.tokenizer.pretokenize_kernels import ALONE, BREAK, KEEP, REFUSE, REMOVE


class Words(NamedTuple):
    """Rules that turn texts into words.

    Attributes:
      actions: int32[POINTS] for each character KEEP, BREAK (white space), ALONE (a separate word),
        REMOVE, REFUSE, or the index of its replacement in `right_sides`.
      right_sides: uint8[bytes] zero-terminated replacements; spaces separate words.
      longest: longest replacement, in bytes.
      tokens: int64[nodes] trie of added tokens that need the library.
      begins_token: bool[256] their first bytes.
    """

    actions: np.ndarray
    right_sides: np.ndarray
    longest: int
    tokens: np.ndarray
    begins_token: np.ndarray


def actions(normaliser: Any, decomposes: bool) -> dict[str, Any]:
    """Returns the fields of Words for a normaliser, as required by `characters.rendered`."""
    found = np.full(POINTS, KEEP, np.int32)
    right_sides: dict[str, int] = {}
    size = 1  # index 0 is no replacement
    for character, shown in characters.rendered(normaliser, decomposes).items():
        if shown is None:
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
