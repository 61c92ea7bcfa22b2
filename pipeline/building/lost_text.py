"""The text that unknown tokens stand for: one may be a long run of characters, in SentencePiece.

Texts are compared with tokens as the vocabulary normalises them, without white space: what
normalisation changes is not lost.
"""

import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.building.rows import sums
from pipeline.native.library import library, pointer
from pipeline.tokenizer.word_tokenizer import buffers
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import Vocabulary


class Sizes(NamedTuple):
    """Bytes of a column's documents, each int64 [documents]."""

    bytes: np.ndarray  # UTF-8 bytes of all text
    lost: np.ndarray  # those that unknown tokens stand for
    # Of documents that are cut or split: bytes that known tokens stand for, number of unknown ones.
    whole: tuple[np.ndarray, np.ndarray] | None = None


class Lost(NamedTuple):
    """The text that a column's rows lost, out of `bytes`."""

    bytes: int
    lost: int
    rows: int  # number of rows that lost all their text


# Printable ASCII and its white space, but for the last byte, with which what follows may combine.
_PLAIN = re.compile(rb"[\t-\r -~]{15,}(?=[\t-\r -~])")
Measure = Callable[[np.ndarray], int]


def _normalised(text: np.ndarray, vocabulary: Vocabulary, measure: Measure | None) -> int:
    """Returns the UTF-8 bytes of a text as the vocabulary normalises it, without white space.

    The normalisers of a tokenizer.json are slow, and keep the size of long runs of ASCII. Those of
    SentencePiece may not: a user-defined symbol does not combine with what follows.
    """
    if measure:
        return measure(text)
    whole = text.tobytes()
    rest = whole if vocabulary.is_sentencepiece else _PLAIN.sub(b" ", whole)
    words = vocabulary.codec.normalize(rest.decode()).replace(SPACE, " ").split()
    return _solid(whole) - _solid(rest) + len("".join(words).encode())


def _solid(text: bytes) -> int:
    return len(text.translate(None, b" \t\n\v\f\r"))


def _known(tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary) -> dict[int, int]:
    """Returns number -> bytes that known tokens stand for, of the texts with unknown tokens."""
    unknown = vocabulary.special.of_unknown_text
    if unknown is None:
        return {}
    known, sizes = np.empty(len(lengths), np.int64), vocabulary.piece_bytes
    tokens, lengths = (
        np.ascontiguousarray(values, kind)
        for values, kind in ((tokens, np.int32), (lengths, np.int64))
    )
    library().lost_text_known(
        pointer(tokens), pointer(lengths), ctypes.c_int64(len(lengths)), ctypes.c_int32(unknown),
        pointer(sizes), pointer(known),
    )  # fmt: skip
    numbers = np.flatnonzero(known >= 0)
    return dict(zip(numbers.tolist(), known[numbers].tolist(), strict=True))


def of_texts(
    texts: pa.Array,
    tokens: np.ndarray,
    lengths: np.ndarray,
    vocabulary: Vocabulary,
    measure: Measure | None = None,
) -> np.ndarray:
    """Returns int64 [texts], the UTF-8 bytes of each that no known token stands for.

    They are at most the text's own bytes, even if normalisation makes it longer.

    Args:
      tokens: int32, of all texts, one after another.
      lengths: int64 [texts], tokens of each.
      measure: the tokenizer's `normalised_bytes`; without it, the vocabulary's library normalises.
    """
    lost = np.zeros(len(texts), np.int64)
    data, bounds = buffers(texts)
    for number, known in _known(tokens, lengths, vocabulary).items():
        text = data[bounds[number] : bounds[number + 1]]
        size, own = _normalised(text, vocabulary, measure), len(text)
        lost[number] = round(max(size - known, 0) * min(own / max(size, 1), 1))
    return lost


def counted(
    tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (bytes that known tokens stand for, number of unknown tokens), int64 [texts]."""
    unknown = tokens == vocabulary.special.of_unknown_text
    return sums(vocabulary.piece_bytes[tokens], lengths), sums(unknown, lengths)


def of_rows(
    sizes: Sizes,
    rows: tuple[np.ndarray, np.ndarray],
    documents_R: np.ndarray,
    vocabulary: Vocabulary,
) -> Lost:
    """Returns the text that rows of documents, or of parts of documents, lost.

    Args:
      rows: their tokens, one row after another, and int64 [rows], tokens of each.
      documents_R: int64 [rows], the document of each.

    Tokens of a document are taken to stand for equally much of its text, known and unknown ones
    each for their share.
    """
    bytes_R, lost_R = sizes.bytes[documents_R], sizes.lost[documents_R]
    if sizes.whole is not None:
        known_D, unknown_D = sizes.whole
        known_R, unknown_R = counted(*rows, vocabulary)
        spelt_R = _divided(bytes_R - lost_R, known_R, known_D, documents_R)
        lost_R = _divided(lost_R, unknown_R, unknown_D, documents_R)
        bytes_R = spelt_R + lost_R
    lost = int(lost_R.sum())
    return Lost(int(bytes_R.sum()), lost, _alone(*rows, vocabulary) if lost else 0)


def _divided(
    whole_R: np.ndarray, counts_R: np.ndarray, counts_D: np.ndarray, documents_R: np.ndarray
) -> np.ndarray:
    """Returns each row's part of its document's `whole_R`, by its share of the document's counts.

    The parts of all rows of a document add up to `whole_R`. `documents_R` is sorted.
    """
    until_R = np.cumsum(counts_R)
    firsts_R = np.searchsorted(documents_R, documents_R)
    until_R -= (until_R - counts_R)[firsts_R]
    of_R = np.maximum(counts_D[documents_R], 1)
    return whole_R * until_R // of_R - whole_R * (until_R - counts_R) // of_R


def _alone(tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary) -> int:
    """Returns the number of rows with unknown tokens and no known ones but white space."""
    return sum(known == 0 for known in _known(tokens, lengths, vocabulary).values())
