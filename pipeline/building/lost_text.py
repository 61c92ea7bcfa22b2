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
    # Few documents have such tokens: only these are looked at.
    here_H = np.unique(np.searchsorted(ends_D, places, "right"))
    here_H = here_H[bytes_D[here_H] > 0]
    if not len(here_H):
        return Lost(0, 0)
    sizes_H = totals_D[here_H]
    begins_H = np.cumsum(sizes_H) - sizes_H
    shift_H = ends_D[here_H] - sizes_H - begins_H
    its = tokens[np.arange(int(sizes_H.sum())) + np.repeat(shift_H, sizes_H)]
    known_H, letters_H = (
        np.add.reduceat(table[its], begins_H, dtype=np.int64) for table in vocabulary.piece_bytes
    )
    lost_H = np.maximum(bytes_D[here_H] - known_H, 0)
    return Lost(int(lost_H.sum()), int((letters_H == 0).sum()))
