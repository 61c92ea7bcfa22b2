"""Tokenizers in compiled code, with the ids of Hugging Face's `tokenizers` or of SentencePiece.

Texts are cut at added tokens, then into words, whose ids are memoised. The library normalises or
encodes only what tables cannot decide, such as parts that depend on the order of combining marks.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.native.library import filled, library
from pipeline.tokenizer import added_tokens

# Most memory of the words that are remembered; 2.6 million short ones fit, then they are forgotten.
_MEMO_BYTES = 192 << 20
# Ids that are written beyond the last.
_SLACK = 8
# Why the code stops; see parts.h.
_DONE, _NORMALISE, _LIBRARY, _NO_MEMORY, _GROW = range(5)


class _Call(ctypes.Structure):
    """Parts, and where their ids go, as in pipeline/native/parts.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "offsets", "given")),
        *(("parts", ctypes.c_int64), ("first", ctypes.c_int64), ("out", ctypes.c_void_p)),
        *(("room", ctypes.c_int64), ("used", ctypes.c_int64), ("lengths", ctypes.c_void_p)),
        ("normal", ctypes.c_int64),
    ]


class Unsupported(Exception):
    """The library must encode this model; the text says why."""


def grown(tokens: np.ndarray, count: int, used: int) -> np.ndarray:
    """Returns `tokens`, or a copy of the first `used` in an array with room for `count`."""
    if count <= len(tokens):
        return tokens
    larger = np.empty(count + count // 4, tokens.dtype)
    larger[:used] = tokens[:used]
    return larger


def buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8 bytes of all texts, int64[texts + 1] offsets) without copying bytes."""
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offsets, data = texts.buffers()
    if offsets is None:
        return np.zeros(1, np.uint8), np.zeros(len(texts) + 1, np.int64)
    bounds = np.frombuffer(offsets, kind)[texts.offset : texts.offset + len(texts) + 1]
    raw = np.frombuffer(data, np.uint8) if data and data.size else np.zeros(1, np.uint8)
    return raw, bounds.astype(np.int64)


class WordTokenizer:
    """Encoder with a library's ids; `refused` counts texts left to the library in part.

    Several threads need several encoders.
    """

    # Whether the library must normalise texts that the code stops at.
    _normalises = False

    def __init__(
        self,
        name: str,
        rules: type[ctypes.Structure],
        values: dict[str, Any],
        added: Sequence[added_tokens.Added],
        codec: Any,
    ):
        """`name`: prefix of the C functions; `values` by name: fields of `rules`.

        `codec` encodes lists of texts, and normalises texts if `_normalises`.
        """
        self.refused = 0
        self._added, self._codec = added, codec
        self._refused: set[int] = set()  # documents of the current call
        self._out = np.empty(0, np.int32)
        self._tables = {"memo_bytes": _MEMO_BYTES, **values}  # the C code reads the arrays
        code = library()
        new, free = getattr(code, f"{name}_new"), getattr(code, f"{name}_free")
        new.restype = ctypes.c_void_p
        self._encoder = ctypes.c_void_p(new(ctypes.byref(filled(rules, self._tables))))
        self._function = f"{name}_encode"
        if not self._encoder:
            raise MemoryError("no memory for the tokenizer's tables")
        weakref.finalize(self, free, self._encoder)

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
        encode = getattr(library(), self._function)
        normal = not self._normalises or raw is not None
        room = int(offsets[-1] - offsets[0]) + len(given) + _SLACK
        self._out = grown(self._out, used + room, used)
        values = {"parts": len(given), "first": 0, "used": used, "normal": normal}
        arrays = {"data": data, "offsets": offsets, "given": given, "lengths": lengths}
        call = filled(_Call, {**values, **arrays, "out": self._out, "room": 0})
        while True:
            call.out, call.room = self._out.ctypes.data, len(self._out)
            why = encode(self._encoder, ctypes.byref(call))
            if why == _DONE:
                return call.used
            if why == _NO_MEMORY:
                raise MemoryError("no memory for the words of a document")
            if why == _GROW:
                self._out = grown(self._out, 2 * len(self._out), call.used)
                continue
            at = call.first
            text = data[offsets[at] : offsets[at + 1]].tobytes().decode() if raw is None else raw
            call.used = self._other(why, text, lengths[at : at + 1], call.used, int(owners[at]))
            call.first += 1

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
