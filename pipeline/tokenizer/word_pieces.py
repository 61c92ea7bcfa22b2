"""WordPiece in compiled code, with the words of BERT."""

import ctypes
from typing import NamedTuple

import numpy as np

from pipeline.tokenizer import added_tokens, characters
from pipeline.tokenizer.word_tokenizer import WordTokenizer
from tasks.vocabularies.tokenizer_json import TokenizersCodec


class Model(NamedTuple):
    """Pieces."""

    initial: np.ndarray  # int64[nodes] trie of pieces that begin words
    continuing: np.ndarray  # int64[nodes] trie of continuation pieces without their prefix
    unknown: int  # id of a word that cannot be spelt
    most_characters: int  # of a word that can
    ids: int  # one more than the largest


class _Rules(ctypes.Structure):
    _fields_ = [
        *(("actions", ctypes.c_void_p), ("right_sides", ctypes.c_void_p)),
        *(("longest", ctypes.c_int64), ("initial", ctypes.c_void_p)),
        *(("continuing", ctypes.c_void_p), ("unknown", ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("most_characters", "ids", "memo_bytes")),
    ]


class WordPieceTokenizer(WordTokenizer):
    """WordPiece."""

    def __init__(
        self,
        words: characters.Actions,
        added: list[added_tokens.Added],
        model: Model,
        codec: TokenizersCodec,
    ):
        super().__init__("word_piece", _Rules, {**words._asdict(), **model._asdict()}, added, codec)
