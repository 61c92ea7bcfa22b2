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
    its = tokens[np.repeat(here_D, totals_D)]  # of the documents that lose text
    totals_H = totals_D[here_D]
    begins_H = np.cumsum(totals_H) - totals_H
    known_H, letters_H = (
        np.add.reduceat(table[its], begins_H, dtype=np.int64) for table in vocabulary.piece_bytes
    )
    lost_H = np.maximum(bytes_D[here_D] - known_H, 0)
    return Lost(int(lost_H.sum()), int((letters_H == 0).sum()))
