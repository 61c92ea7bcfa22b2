"""WordPiece in compiled code, with the ids of Hugging Face's `tokenizers`.

Texts are cut at added tokens, then into words, whose ids are memoised. The library encodes only
what tables cannot decide, such as parts that depend on the order of combining marks.
"""

import numpy as np
import pyarrow as pa

from pipeline.tokenizer import added_tokens, characters, word_kernels
from pipeline.tokenizer.fast_tokenizer import buffers, grown
from tasks.vocabularies.tokenizer_json import TokenizersCodec

# Memo size: 24 bytes per entry, half of them used, and 8 bytes per word of the store.
_MEMO_ENTRIES = 1 << 19
_MEMO_WORDS = 1 << 20
# Initial buffer sizes. Texts are encoded in portions that fit into the processor's cache; a longer
# document is one portion.
_TEXT_BYTES = 1 << 18
_WORD_BYTES = 1 << 10
_OUT_TOKENS = 1 << 20
# Number of ids that `word_kernels.encode` may write beyond the last.
_EXCESS = 4


class WordTokenizer:
    """Encoder with a tokenizer.json's ids; `refused` counts texts left to the library in part."""

    def __init__(
        self,
        words: characters.Actions,
        added: list[added_tokens.Added],
        model: word_kernels.Model,
        codec: TokenizersCodec,
    ):
        self.refused = 0
        self._words, self._added, self._model, self._codec = words, added, model, codec
        self._refused: set[int] = set()  # documents of the current call
        self._reserve_text(_TEXT_BYTES)
        self._out = np.empty(_OUT_TOKENS, np.int32)
        self._work = word_kernels.Work(
            ids=np.empty(_WORD_BYTES, np.int32),
            table=np.zeros((_MEMO_ENTRIES, 3), np.int64),
            store=np.empty(_MEMO_WORDS, np.int64),
            fill=np.zeros(2, np.int64),
        )

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32[sum of lengths] ids, valid until the next call; int64[texts] lengths).

        `texts`: string or large_string, without nulls.
        """
        data, offsets = buffers(texts)
        parts = added_tokens.cut(self._added, data, offsets)
        lengths = np.zeros(len(parts.given), np.int64)
        self._refused.clear()
        used = self._encode(data, parts, lengths)
        self.refused += len(self._refused)
        if len(lengths) > len(texts):
            firsts = np.searchsorted(parts.owners, np.arange(len(texts)))
            lengths = np.add.reduceat(lengths, firsts)
        return self._out[:used], lengths

    def _encode(self, data: np.ndarray, parts: added_tokens.Parts, lengths: np.ndarray) -> int:
        """Writes the ids of parts; sets `lengths`; returns the number of ids."""
        offsets, given, owners = parts
        counts = np.empty(len(lengths), np.int64)
        first = used = 0
        while True:
            why, stop, size, words, need = word_kernels.word_piece(
                self._words, data, offsets, given, first, self._text, self._ends, counts
            )
            self._out = grown(self._out, used + size + stop - first + _EXCESS, used)
            if words:
                longest = int(np.diff(self._ends[:words], prepend=np.int32(0)).max())
                if longest > len(self._work.ids):
                    self._work = self._work._replace(ids=np.empty(2 * longest, np.int32))
            used = word_kernels.encode(
                self._model, self._work, self._text, self._ends, counts, first, stop, self._out,
                used, lengths,
            )  # fmt: skip
            first = stop
            if why == word_kernels.DONE:
                return used
            if why == word_kernels.GROW:
                self._reserve_text(need)
            elif why != word_kernels.FULL:
                text = data[offsets[first] : offsets[first + 1]].tobytes().decode()
                self._refused.add(int(owners[first]))
                (ids,) = self._codec.encode([text])
                self._out = grown(self._out, used + len(ids) + _EXCESS, used)
                self._out[used : used + len(ids)] = ids
                lengths[first] = len(ids)
                used += len(ids)
                first += 1

    def _reserve_text(self, size: int) -> None:
        self._text = np.empty(size, np.uint8)
        self._ends = np.empty(size, np.int32)
