"""Byte-level BPE in compiled code, with the ids of Hugging Face's `tokenizers`.

Texts are cut at added tokens, then into words, whose ids are memoised. The library normalises texts
that its normaliser may change, and encodes those with added tokens that only it finds.
"""

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.native.library import library, pointer
from pipeline.tokenizer import added_tokens, byte_level
from pipeline.tokenizer.fast_tokenizer import buffers, grown
from tasks.vocabularies.tokenizer_json import TokenizersCodec

# Most memory of the words that are remembered; 2.6 million short ones fit, then they are forgotten.
_MEMO_BYTES = 192 << 20
# Ids that are written beyond the last.
_SLACK = 8
# Why the code stops.
_DONE, _NORMALISE, _LIBRARY, _NO_MEMORY = range(4)


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


class BytePairTokenizer:
    """Encoder with a tokenizer.json's ids; `refused` counts texts left to the library in part."""

    def __init__(
        self,
        words: byte_level.Words,
        added: list[added_tokens.Added],
        model: Model,
        codec: TokenizersCodec,
    ):
        self.refused = 0
        self._added, self._codec = added, codec
        self._refused: set[int] = set()  # documents of the current call
        self._out = np.empty(0, np.int32)
        self._tables = words, model  # the C code reads their arrays
        values = {**words._asdict(), **model._asdict(), "merges": len(model.left)}
        values |= {"words": structure(words), "memo_bytes": _MEMO_BYTES}
        rules = _filled(_Rules, values)
        code = library()
        code.byte_bpe_new.restype = ctypes.c_void_p
        self._encoder = ctypes.c_void_p(code.byte_bpe_new(ctypes.byref(rules)))
        if not self._encoder:
            raise MemoryError("no memory for the tokenizer's tables")
        weakref.finalize(self, code.byte_bpe_free, self._encoder)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32[sum of lengths] ids, valid until the next call; int64[texts] lengths).

        `texts`: string or large_string, without nulls.
        """
        data, offsets = buffers(texts)
        parts = added_tokens.cut(self._added, data, offsets)
        lengths = np.zeros(len(parts.given), np.int64)
        self._refused.clear()
        used = self._encode(data, parts, lengths, 0)
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
        raw: str | None = None,
    ) -> int:
        """Appends the ids of parts; sets `lengths`; returns the new number of ids.

        `raw`: the text of which `data` is the normalised form, if it is one.
        """
        offsets, given, owners = parts
        normal = self._codec.tokenizer.normalizer is None or raw is not None
        place, end = ctypes.c_int64(), ctypes.c_int64(used)
        while True:
            left = len(given) - place.value
            room = int(offsets[-1] - offsets[place.value]) + left + _SLACK
            self._out = grown(self._out, end.value + room, end.value)
            why = library().byte_bpe_encode(
                self._encoder, pointer(data), pointer(offsets), pointer(given),
                ctypes.c_int64(len(given)), ctypes.byref(place), pointer(self._out),
                ctypes.byref(end), pointer(lengths), ctypes.c_int64(normal),
            )  # fmt: skip
            if why == _DONE:
                return end.value
            if why == _NO_MEMORY:
                raise MemoryError("no memory for the words of a document")
            at = place.value
            text = data[offsets[at] : offsets[at + 1]].tobytes().decode() if raw is None else raw
            end.value = self._other(why, text, lengths[at : at + 1], end.value, int(owners[at]))
            place.value += 1

    def _other(self, why: int, text: str, length: np.ndarray, used: int, owner: int) -> int:
        """Like `_encode`, for one text of document `owner` that needs the library."""
        if why == _NORMALISE:
            again = np.frombuffer(self._codec.normalize(text).encode() + b"\0", np.uint8)
            place, given = np.array([0, len(again) - 1]), np.full(1, added_tokens.TEXT, np.int32)
            # The library searches for some tokens after normalisation, for others before it.
            part = added_tokens.Parts(place, given, np.array([owner]))
            return self._encode(again, part, length, used, text)
        self._refused.add(owner)
        (ids,) = self._codec.encode([text])
        self._out = grown(self._out, used + len(ids), used)
        self._out[used : used + len(ids)] = ids
        length[0] = len(ids)
        return used + len(ids)


def structure(words: byte_level.Words) -> ctypes.Structure:
    """Returns the rules that cut texts into words for the C code, which reads their arrays."""
    return _filled(_WordRules, words._asdict())


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    given = {name: values[name] for name, _ in kind._fields_}
    return kind(**{n: pointer(v) if isinstance(v, np.ndarray) else v for n, v in given.items()})
