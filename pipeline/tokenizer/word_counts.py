"""Counts the words of text in compiled code (pipeline/native/word_counts.c)."""

import ctypes
import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.native.library import filled, library, pointer
from pipeline.tokenizer import trie
from pipeline.tokenizer.fast_tokenizer import Normaliser, normaliser
from pipeline.tokenizer.word_tokenizer import buffers

_SPACE = "\u2581"
# Of `Words`, and why `words_add` returns; see pipeline/native/word_counts.c.
_LETTER, _SIGN, _SPACE_CLASS = 1, 2, 4
_DONE, _FULL, _NO_MEMORY = range(3)


class _Words(ctypes.Structure):
    _fields_ = [
        ("normaliser", Normaliser),
        *((name, ctypes.c_void_p) for name in ("marks", "begins_mark", "classes")),
        *((name, ctypes.c_int64) for name in ("space_runs", "longest", "passage")),
    ]


class WordCounter:
    """Counts words of text that is normalised like the SentencePiece model `model`.

    A word ends before a space (with `space_runs`, before the first of several), at one of `marks`,
    which are in no word, and between a letter and a sign, given as ranges of a regular expression.
    A word of more than `longest` characters is cut. `passage` characters are normalised at a time.
    Raises Unsupported for a model whose spaces are not escaped.
    """

    def __init__(
        self, model: bytes, marks: tuple[str, ...], space_runs: bool, letters: str, signs: str,
        longest: int, passage: int,
    ):  # fmt: skip
        self._tables = _tables(model, marks, letters, signs)  # the C code reads the arrays
        values = {
            **self._tables,
            "normaliser": filled(Normaliser, self._tables),
            "space_runs": space_runs,
            "longest": longest,
            "passage": passage,
        }
        words = filled(_Words, values)
        code = library()
        code.words_new.restype = ctypes.c_void_p
        self._counter = ctypes.c_void_p(code.words_new(ctypes.byref(words)))
        if not self._counter:
            raise MemoryError(_SHORT)
        weakref.finalize(self, code.words_free, self._counter)

    def add(self, texts: pa.Array, limit: int) -> Iterator[None]:
        """Counts the words of texts; yields whenever `limit` bytes of text wait to be taken.

        `texts`: string or large_string, without nulls.
        """
        data, offsets = buffers(texts)
        text, at = ctypes.c_int64(), ctypes.c_int64()
        while why := library().words_add(
            self._counter, pointer(data), pointer(offsets), ctypes.c_int64(len(texts)),
            ctypes.byref(text), ctypes.byref(at), ctypes.c_int64(limit),
        ):  # fmt: skip
            if why == _NO_MEMORY:
                raise MemoryError(_SHORT)
            yield

    def take(self) -> tuple[pa.Array, np.ndarray, np.ndarray, int]:
        """Returns the words (large_string), their counts and hashes, and the bytes of their text.

        The counter is empty then. A hash is the digest of BLAKE2b as a big-endian uint64.
        """
        words, spelt, size = (ctypes.c_int64() for _ in range(3))
        library().words_sizes(self._counter, *map(ctypes.byref, (words, spelt, size)))
        data = np.empty(spelt.value, np.uint8)
        offsets = np.empty(words.value + 1, np.int64)
        counts, hashes = np.empty(words.value, np.int64), np.empty(words.value, np.uint64)
        arrays = (pointer(each) for each in (data, offsets, counts, hashes))
        library().words_take(self._counter, *arrays)
        taken = pa.LargeStringArray.from_buffers(
            words.value, pa.py_buffer(offsets), pa.py_buffer(data)
        )
        return taken, counts, hashes, size.value


_SHORT = "no memory to count words"


@functools.lru_cache(maxsize=1)
def _tables(model: bytes, marks: tuple[str, ...], letters: str, signs: str) -> dict[str, Any]:
    from sentencepiece import sentencepiece_model_pb2

    found = normaliser(sentencepiece_model_pb2.ModelProto.FromString(model))
    # In normalised text, the byte 0x20 represents the space symbol, and no other character.
    keys = [mark.replace(_SPACE, " ").encode() for mark in marks if " " not in mark]
    begins_mark = np.zeros(256, np.uint8)
    begins_mark[[key[0] for key in keys]] = 1
    return {
        **found,
        "rules_size": len(found["rules"]),
        "marks": trie.build((key, 0) for key in {*keys} - {b"\0"}),
        "begins_mark": begins_mark,
        "classes": _classes(letters, signs),
    }


def _classes(letters: str, signs: str) -> np.ndarray:
    """Returns uint8[65536] classes of characters."""
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000))))
    classes = np.zeros(1 << 16, np.uint8)
    for found, ranges in ((_LETTER, letters), (_SIGN, signs)):
        classes[[ord(each) for each in re.findall(f"[{ranges}]", every)]] = found
    classes[ord(" ")] = _SPACE_CLASS
    return classes
