"""Counts words, separated by white space, in rows of ids without decoding the rows.

Dimensions: B rows, L positions, N ids.
"""

from itertools import pairwise

import numpy as np

from tasks.decode import texts
from tasks.vocabulary import UNKNOWN, TokenIds


class WordCounter:
    """Counts the words that begin in rows of ids.

    A word begins at a character other than white space that follows white space or an EOS. A word
    cut by the end of a row counts once, in the row with the space before the word.
    """

    def __init__(self, ids: TokenIds):
        each = [texts([token], ids)[0] for token in range(len(ids.pieces))]
        # An unknown piece is decoded with spaces around it, but stands for characters of a word.
        each = [
            "?" if kind == UNKNOWN else text for text, kind in zip(each, ids.kinds, strict=True)
        ]
        each += [""] * (ids.size - len(each))
        inside = [[a.isspace() and not b.isspace() for a, b in pairwise(text)] for text in each]
        self._inside_N = np.array(list(map(sum, inside)))
        self._opens_N = np.array([bool(text) and not text[0].isspace() for text in each])
        self._closes_N = np.array([bool(text) and text[-1].isspace() for text in each])
        self._eos = ids.special.eos

    def __call__(self, ids_BL: np.ndarray, is_token_BL: np.ndarray) -> int:
        """Returns the number of words; `is_token_BL` marks the tokens."""
        inside_BL = self._inside_N[ids_BL] * is_token_BL
        next_BL = np.pad(ids_BL[:, 1:], ((0, 0), (0, 1)))
        padding_BL = ~np.pad(is_token_BL[:, 1:], ((0, 0), (0, 1)))
        opens_BL = self._opens_N[next_BL] & ~padding_BL
        # The word after a row's last space is in another row.
        ends_BL = (next_BL == self._eos) | padding_BL
        begins_BL = np.where(
            ids_BL == self._eos, opens_BL, self._closes_N[ids_BL] & (opens_BL | ends_BL)
        )
        return int(inside_BL.sum() + (begins_BL & is_token_BL).sum())
