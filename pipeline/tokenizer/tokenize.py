"""Tokenization of batches of texts, with an audit of the fast tokenizer."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipeline.tokenizer import fast_tokenizer
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary

FAST = "fast"
SENTENCEPIECE = "sentencepiece"
LIBRARY = "library"  # SentencePiece, or `tokenizers` for a tokenizer.json
ENGINES = (FAST, LIBRARY, SENTENCEPIECE)

# Bytes of text per call of a library. They return Python objects, SentencePiece about 36 bytes per
# token, whose memory this bounds; larger chunks are not faster.
_CHUNK_BYTES = 1 << 16
# One byte in 256 is also encoded by SentencePiece and compared. As SentencePiece has a sixth of the
# fast tokenizer's speed, this costs 2 % of the time.
_AUDIT_INTERVAL = 256
# Of a longer text only the beginning is compared, to limit SentencePiece's memory.
_AUDITED_BYTES = 64 << 10


class Tokenizer:
    """Tokenizer of a vocabulary with one of ENGINES; all return the library's ids.

    Attributes:
      refusal: why FAST does not support the vocabulary, which is left to its library; "" otherwise.
      documents: numbers of texts "encoded", and of these "left to the library" and "audited".

    Raises:
      UserError: at construction, if the engine is not for such vocabularies.
    """

    def __init__(self, vocabulary: Vocabulary, engine: str = FAST):
        self._vocabulary = vocabulary
        self._fast: fast_tokenizer.FastTokenizer | None = None
        self.refusal = ""
        self.documents = {"encoded": 0, "left to the library": 0, "audited": 0}
        self._seen = self._audited = 0
        if engine == SENTENCEPIECE and not vocabulary.is_sentencepiece:
            raise UserError(
                f"--tokenizer={engine}: {vocabulary.name} is a tokenizer.json; use "
                f"--tokenizer={LIBRARY}"
            )
        if engine == FAST and not vocabulary.is_sentencepiece:
            self.refusal = "the fast tokenizer is for SentencePiece models"
        elif engine == FAST:
            try:
                self._fast = fast_tokenizer.from_model(vocabulary.model, vocabulary.processor)
            except fast_tokenizer.Unsupported as error:
                self.refusal = str(error)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32[sum of lengths] ids of all texts, int64[texts] number of ids of each).

        The ids may be in a buffer that the next call overwrites. `texts` has no nulls. A text that
        normalises to nothing has no ids. EOS is not added.

        Raises:
          UserError: the audit found a text that SentencePiece encodes differently.
        """
        self.documents["encoded"] += len(texts)
        if not self._fast:
            self.documents["left to the library"] += len(texts)
            return self._by_library(texts)
        refused = self._fast.refused
        tokens, lengths = self._fast.encode(texts)
        self.documents["left to the library"] += self._fast.refused - refused
        self._audit(texts, tokens, lengths)
        return tokens, lengths

    def _by_library(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        tokens = [np.zeros(0, np.int32)]
        for chunk in _chunks(texts):
            tokens += self._vocabulary.encode(chunk.to_pylist())
        lengths = np.fromiter(map(len, tokens[1:]), np.int64, len(texts))
        return np.concatenate(tokens), lengths

    def _audit(self, texts: pa.Array, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Compares ids with SentencePiece's, for one in _AUDIT_INTERVAL of all bytes so far."""
        ends = np.cumsum(lengths)
        sizes = text_bytes(texts)
        before = self._seen + np.cumsum(sizes) - sizes
        self._seen += int(sizes.sum())
        at = 0
        while True:
            due = np.searchsorted(before[at:], self._audited * _AUDIT_INTERVAL) + at
            if due >= len(texts):
                return
            at = int(due)
            text = texts[at].as_py()
            found = tokens[ends[at] - lengths[at] : ends[at]]
            if sizes[at] > _AUDITED_BYTES:
                text = text[: _AUDITED_BYTES // 4]
                found = self._encode_another(text, tokens)
            if not np.array_equal(found, self._vocabulary.processor.encode(text)):
                start = text[:60].replace("\n", " ")
                raise UserError(
                    f"the fast tokenizer differs from SentencePiece on the text {start!r}: use "
                    "--tokenizer=sentencepiece, and please report this text and the vocabulary"
                )
            self.documents["audited"] += 1
            self._audited += min(max(int(sizes[at]), 1), _AUDITED_BYTES)
            at += 1

    def _encode_another(self, text: str, tokens: np.ndarray) -> np.ndarray:
        """Returns the ids of another text, and restores `tokens` in the shared buffer."""
        kept = tokens.copy()
        assert self._fast
        found = self._fast.encode(pa.array([text]))[0].copy()
        tokens[:] = kept
        return found


def without_sentinels(
    vocabulary: Vocabulary, tokens: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Removes the ids of texts that contain one of `Vocabulary.reserved`.

    Returns:
      (tokens, lengths) as from `Tokenizer.encode`, and bool[texts], True if it contained one.
    """
    spelt = np.zeros(len(lengths), bool)
    if vocabulary.is_sentencepiece:  # no text spells its control pieces: comparing is faster
        places = np.flatnonzero(tokens >= vocabulary.first_sentinel)
    else:
        places = np.flatnonzero(vocabulary.reserved[tokens])
    if not len(places):
        return tokens, lengths, spelt
    spelt[np.searchsorted(np.cumsum(lengths), places, side="right")] = True
    kept = np.repeat(~spelt, lengths)
    return tokens[kept], np.where(spelt, 0, lengths), spelt


def text_bytes(texts: pa.Array) -> np.ndarray:
    """Returns int64[texts]: bytes of each text as UTF-8."""
    return np.diff(fast_tokenizer.buffers(texts)[1])


def _chunks(texts: pa.Array) -> Iterator[pa.Array]:
    """Yields chunks of at most _CHUNK_BYTES; a longer text is a chunk of its own."""
    ends = np.cumsum(text_bytes(texts))
    begin = 0
    while begin < len(texts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _CHUNK_BYTES, side="right")))
        yield texts[begin:end]
        begin = end
