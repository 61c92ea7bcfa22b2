"""The text behind unknown tokens: SentencePiece makes one of a whole run of unknown characters."""

from typing import NamedTuple

import numpy as np

from tasks.vocabulary import Vocabulary

# Key of the counts in a shard, beside the columns' names.
BYTES = "bytes"


class Lost(NamedTuple):
    """Text that documents lost: its UTF-8 bytes, and the number of those of which all was lost."""

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
    ends_D = np.cumsum(totals_D)
    lost = documents = 0
    # Few documents have such tokens: only these are looked at.
    for number in np.unique(np.searchsorted(ends_D, places, "right")).tolist():
        if bytes_D[number]:
            its = tokens[ends_D[number] - totals_D[number] : ends_D[number]]
            known, letters = vocabulary.piece_bytes[:, its[its != unknown]].sum(axis=1).tolist()
            lost += max(int(bytes_D[number]) - known, 0)
            documents += not letters
    return Lost(lost, documents)
