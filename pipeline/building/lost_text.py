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
    if unknown is None or not (of_unknown := tokens == unknown).any():
        return Lost(0, 0)
    of_document = np.repeat(np.arange(len(totals_D)), totals_D)
    here_D = np.bincount(of_document[of_unknown], minlength=len(totals_D)) > 0
    known, letters = np.where(of_unknown, 0, vocabulary.piece_bytes[:, tokens])
    known_D, letters_D = (
        np.bincount(of_document, each, len(totals_D)).astype(np.int64) for each in (known, letters)
    )
    here_D &= bytes_D > 0
    lost_D = np.maximum(bytes_D - known_D, 0)[here_D]
    return Lost(int(lost_D.sum()), int((here_D & (letters_D == 0)).sum()))
