"""Texts to ids: where a build spends its time."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from tasks.vocabulary import Vocabulary

# Text given to SentencePiece at once. It answers with Python lists, some 36 bytes a token, so this
# bounds their memory; more is no faster.
_CHUNK_BYTES = 1 << 20


def encode(vocabulary: Vocabulary, texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32[sum of lengths] ids of all texts, int64[texts] how many each has).

    `texts` has no nulls. A text that normalises to nothing has no ids; none ends in EOS.
    """
    tokens, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for chunk in _chunks(texts):
        # One thread: a build takes more cores by --workers.
        ids = vocabulary.processor.encode(chunk.to_pylist(), out_type=int, num_threads=1)
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens.append(np.fromiter(chain.from_iterable(ids), np.int32, int(counts.sum())))
        lengths.append(counts)
    return np.concatenate(tokens), np.concatenate(lengths)


def without_sentinels(
    vocabulary: Vocabulary, tokens: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Empties the texts that hold a sentinel.

    Returns:
      (tokens, lengths) as `encode`, and bool[texts]: which were emptied.
    """
    text = np.repeat(np.arange(len(lengths)), lengths)
    spelt = np.zeros(len(lengths), bool)
    spelt[text[tokens >= vocabulary.first_sentinel]] = True
    if not spelt.any():
        return tokens, lengths, spelt
    return tokens[~spelt[text]], np.where(spelt, 0, lengths), spelt


def text_bytes(texts: pa.StringArray) -> np.ndarray:
    """Returns int64[texts]: bytes of each text as UTF-8."""
    import pyarrow.compute as pc

    return pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)


def _chunks(texts: pa.StringArray) -> Iterator[pa.StringArray]:
    """Splits before the text that would exceed _CHUNK_BYTES; a longer text is alone."""
    ends = np.cumsum(text_bytes(texts))
    begin = 0
    while begin < len(texts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _CHUNK_BYTES, side="right")))
        yield texts[begin:end]
        begin = end
