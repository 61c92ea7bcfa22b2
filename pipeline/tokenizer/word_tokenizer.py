"""Byte-level BPE and WordPiece in compiled code, with the ids of Hugging Face's `tokenizers`.

Texts are cut at added tokens, then into words, whose ids are memoised. The library encodes only
what tables cannot decide, such as parts that depend on the order of combining marks.
"""

import functools
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.tokenizer import added_tokens, byte_level, characters, tokenizer_file, word_kernels
from pipeline.tokenizer.fast_tokenizer import buffers, grown
from tasks.vocabularies import tokenizer_json
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


def from_file(model: bytes, codec: TokenizersCodec) -> "WordTokenizer | ByteTokenizer":
    """Makes a tokenizer from a tokenizer.json, also read by `codec`; may raise Unsupported."""
    rules = tokenizer_file.rules(tokenizer_json.parsed(model), codec.tokenizer.normalizer)
    tables = tokenizer_file.model(rules)
    if rules.is_bytes:
        return ByteTokenizer(tables.byte_ids)
    passes, refused = added_tokens.passes(codec.tokenizer)
    return WordTokenizer(tokenizer_file.words(rules, refused), passes, tables, codec)


class ByteTokenizer:
    """Tokenizer whose ids stand for single bytes; `refused` is always 0."""

    refused = 0

    def __init__(self, byte_ids: np.ndarray):
        self._byte_ids = byte_ids

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        data, offsets = buffers(texts)
        return self._byte_ids[data[offsets[0] : offsets[-1]]], np.diff(offsets)


class WordTokenizer:
    """Encoder with a tokenizer.json's ids; `refused` counts texts left to the library in part."""

    def __init__(
        self,
        words: byte_level.Words | characters.Actions,
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
            **_word_arrays(_WORD_BYTES),
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
        normalised = self._codec.tokenizer.normalizer is None
        self._refused.clear()
        used = self._encode(data, parts, lengths, 0, normalised)
        self.refused += len(self._refused)
        if len(lengths) > len(texts):
            firsts = np.searchsorted(parts.owners, np.arange(len(texts)))
            lengths = np.add.reduceat(lengths, firsts)
        return self._out[:used], lengths

    def _encode(
        self,
        data: np.ndarray,
        parts: added_tokens.Parts,
        lengths: np.ndarray,
        used: int,
        normal: bool,
    ) -> int:
        """Appends ids of parts (as is if `normal`); sets `lengths`; returns the new `used`."""
        offsets, given, owners = parts
        counts = np.empty(len(lengths), np.int64)
        cut = functools.partial(word_kernels.byte_level, self._words, normal)
        if isinstance(self._words, characters.Actions):
            cut = functools.partial(word_kernels.word_piece, self._words)
        first = 0
        while True:
            why, stop, size, words, need = cut(
                data, offsets, given, first, self._text, self._ends, counts
            )
            self._out = grown(self._out, used + size + stop - first + _EXCESS, used)
            if words:
                longest = int(np.diff(self._ends[:words], prepend=np.int32(0)).max())
                if longest > len(self._work.ids):
                    self._work = self._work._replace(**_word_arrays(2 * longest))
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
                one = lengths[first : first + 1]
                used = self._other(why, text, one, used, int(owners[first]))
                first += 1

    def _other(self, why: int, text: str, length: np.ndarray, used: int, owner: int) -> int:
        """Like `_encode`, for one text of document `owner` that needs the library."""
        if why == word_kernels.NORMALISE:
            again = np.frombuffer(self._codec.normalize(text).encode() + b"\0", np.uint8)
            size, words = len(again) - 1, self._words
            # The library searches for these tokens after normalisation, and for others before it.
            if not word_kernels.holds_token(words.tokens, words.begins_token, again, 0, size):
                place, given = np.array([0, size]), np.full(1, word_kernels.TEXT, np.int32)
                part = added_tokens.Parts(place, given, np.array([owner]))
                return self._encode(again, part, length, used, True)
        self._refused.add(owner)
        (ids,) = self._codec.encode([text])
        self._out = grown(self._out, used + len(ids) + _EXCESS, used)
        self._out[used : used + len(ids)] = ids
        length[0] = len(ids)
        return used + len(ids)

    def _reserve_text(self, size: int) -> None:
        self._text = np.empty(size, np.uint8)
        self._ends = np.empty(size, np.int32)


def _word_arrays(size: int) -> dict[str, Any]:
    """Returns the fields of `word_kernels.Work` for a word of `size` bytes."""
    arrays: dict[str, Any] = {name: np.empty(size, np.int32) for name in ("ids", "ends", "before")}
    return {**arrays, "heap": np.empty(3 * size, np.int64)}
