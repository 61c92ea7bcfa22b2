"""The text that unknown tokens stand for: one may be a long run of characters, in SentencePiece.

Sizes are UTF-8 bytes without white space, of texts that the vocabulary has normalised: what
normalisation changes is not lost.
"""

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.building.rows import sums
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import Vocabulary

# Normalisers are slow, and keep the size of ASCII. What follows it may combine with its last one.
_ASCII = re.compile(rb"[\x00-\x7f]{15,}(?=[\x00-\x7f])")
_SPACES = b" \t\n\v\f\r"


class Sizes(NamedTuple):
    """Sizes of a column's documents, int64 [documents]."""

    bytes: np.ndarray  # UTF-8 bytes of all text
    lost: np.ndarray  # those that unknown tokens stand for


class Lost(NamedTuple):
    """The text that a column's documents lost, out of `bytes`."""

    bytes: int
    lost: int
    documents: int  # number of those that lost all their text


def _normalised(text: str, vocabulary: Vocabulary) -> int:
    """Returns the size of a text as the vocabulary normalises it."""
    raw = text.encode()
    rest = _ASCII.sub(b" ", raw)
    removed = len(raw.translate(None, _SPACES)) - len(rest.translate(None, _SPACES))
    words = vocabulary.codec.normalize(rest.decode()).replace(SPACE, " ").split()
    return removed + len("".join(words).encode())


def _known(tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary) -> dict[int, int]:
    """Returns number -> bytes that known tokens stand for, of the texts with unknown tokens."""
    unknown = vocabulary.special.of_unknown_text
    if unknown is None or not len(places := np.flatnonzero(tokens == unknown)):
        return {}
    ends, sizes = np.cumsum(lengths), vocabulary.piece_bytes
    return {
        number: int(sizes[tokens[ends[number] - lengths[number] : ends[number]]].sum())
        for number in np.unique(np.searchsorted(ends, places, "right")).tolist()
    }


def of_texts(
    texts: pa.Array, tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary
) -> np.ndarray:
    """Returns int64 [texts], the bytes of each that no known token stands for.

    Args:
      tokens: int32, of all texts, one after another.
      lengths: int64 [texts], tokens of each.
    """
    lost = np.zeros(len(texts), np.int64)
    for number, known in _known(tokens, lengths, vocabulary).items():
        lost[number] = max(_normalised(texts[number].as_py(), vocabulary) - known, 0)
    return lost


def after_cut(
    sizes: Sizes, whole: tuple[np.ndarray, np.ndarray], most: int, vocabulary: Vocabulary
) -> Sizes:
    """Returns the sizes of documents after a cut to `most` tokens.

    Args:
      whole: the tokens before, one document after another, and their numbers.

    Unknown tokens of a document are taken to stand for equally much of it.
    """
    tokens, lengths = whole
    known, unknown = vocabulary.piece_bytes[tokens], tokens == vocabulary.special.of_unknown_text
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = np.arange(len(tokens)) - starts < most
    share = sums(unknown & kept, lengths) / np.maximum(sums(unknown, lengths), 1)
    lost = np.round(sizes.lost * share).astype(np.int64)
    before, after = sums(known, lengths) + sizes.lost, sums(known * kept, lengths) + lost
    return Sizes(np.round(sizes.bytes * (after / np.maximum(before, 1))).astype(np.int64), lost)


def alone(tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary) -> int:
    """Returns the number of documents with unknown tokens and no known ones but white space."""
    return sum(known == 0 for known in _known(tokens, lengths, vocabulary).values())
