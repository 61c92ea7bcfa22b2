"""Byte-level BPE in compiled code, with the ids of Hugging Face's `tokenizers`.

Texts are cut at added tokens, then into words, whose ids are memoised. The library normalises texts
that its normaliser may change, and encodes those with added tokens that only it finds.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.native.library import filled
from pipeline.tokenizer import added_tokens, byte_level
from pipeline.tokenizer.word_tokenizer import WordTokenizer, buffers
from tasks.vocabularies.tokenizer_json import TokenizersCodec


class ByteTokenizer:
    """Tokenizer whose ids stand for single bytes; `refused` is always 0."""

    refused = 0

    def __init__(self, byte_ids: np.ndarray):
        self._byte_ids = byte_ids

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        data, offsets = buffers(texts)
        return self._byte_ids[data[offsets[0] : offsets[-1]]], np.diff(offsets)


class Model(NamedTuple):
    """Pieces and merges."""

    byte_ids: np.ndarray  # int32[256] ids of single bytes
    # left, right, merged: int32[merges] ids, by rank
    left: np.ndarray
    right: np.ndarray
    merged: np.ndarray
    # int64[nodes] trie of pieces that a word equal to them becomes without merges, each byte spelt
    # as its high and its low half, each plus 1; None if every word is merged.
    whole: np.ndarray | None
    ids: int  # one more than the largest


class _WordRules(ctypes.Structure):
    _fields_ = [
        ("kinds", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("contractions", "before_letters")),
        *((name, ctypes.c_int64) for name in ("space_before_numbers", "numbers")),
        *((name, ctypes.c_int64) for name in ("lines_after_others", "lines", "last_space")),
    ]


class _Rules(ctypes.Structure):
    _fields_ = [
        *(("words", _WordRules), ("prefix", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("tokens", "begins_token", "byte_ids")),
        *((name, ctypes.c_void_p) for name in ("left", "right", "merged")),
        *(("merges", ctypes.c_int64), ("whole", ctypes.c_void_p)),
        *(("ids", ctypes.c_int64), ("memo_bytes", ctypes.c_int64)),
    ]


class BytePairTokenizer(WordTokenizer):
    """Byte-level BPE."""

    def __init__(
        self,
        words: byte_level.Words,
        added: list[added_tokens.Added],
        model: Model,
        codec: TokenizersCodec,
    ):
        values = {**words._asdict(), **model._asdict(), "merges": len(model.left)}
        values["words"] = structure(words)
        self.words = words
        super().__init__("byte_bpe", _Rules, values, added, codec)
        self._normalises = codec.tokenizer.normalizer is not None


def structure(words: byte_level.Words) -> ctypes.Structure:
    """Returns the rules that cut texts into words for the C code, which reads their arrays."""
    return filled(_WordRules, words._asdict())
