"""The text behind unknown tokens: one may stand for a long run of characters, in SentencePiece."""

from typing import NamedTuple

import numpy as np

from tasks.vocabulary import Vocabulary

# Key of the counts in a shard, beside the columns' names.
BYTES = "bytes"


class Lost(NamedTuple):
    """The UTF-8 bytes that documents lost, and the number of documents that lost all their text."""

    bytes: int
    documents: int


def of_column(
    tokens: np.ndarray, totals_D: np.ndarray, bytes_D: np.ndarray, vocabulary: Vocabulary
) -> Lost:
    """Returns what the documents of a column lost.

    Args:
      tokens: int32, of all documents, one after another.
      totals_D: int64 [documents], tokens of each.
      bytes_D: int64 [documents], UTF-8 bytes of each; 0 leaves a document out.

    Bytes are those that no known token stands for. Normalisation adds or removes a few.
    """
    unknown = vocabulary.special.of_unknown_text
    if unknown is None or not len(places := np.flatnonzero(tokens == unknown)):
        return Lost(0, 0)
    here_D = np.zeros(len(totals_D), bool)
    here_D[np.searchsorted(np.cumsum(totals_D), places, "right")] = True
    here_D &= bytes_D > 0
    if not here_D.any():
        return Lost(0, 0)

    def sums(table: np.ndarray, of_D: np.ndarray) -> np.ndarray:
        """Returns the sum of a table's values for the tokens of some documents."""
        begins = np.cumsum(totals_D[of_D]) - totals_D[of_D]
        values = table[tokens[np.repeat(of_D, totals_D)]]
        return np.add.reduceat(values, begins, dtype=np.int64)

    every, letters = vocabulary.piece_bytes
    known_H = sums(every, here_D)
    lost = int(np.maximum(bytes_D[here_D] - known_H, 0).sum())
    # Documents with more known bytes than tokens have letters besides spaces.
    here_D[here_D] = known_H <= totals_D[here_D]
    return Lost(lost, int((sums(letters, here_D) == 0).sum()) if here_D.any() else 0)
