"""SentencePiece encoding in compiled code: identical ids, many times as fast.

1. Text is cut between characters that no piece contains side by side, mostly before spaces and
   between letters and signs. The words have independent best paths, and a memo keeps their ids.
   Plain ASCII is cut where it stands; only text around other characters is normalised first.
2. SentencePiece sums scores over the whole document in float32, so rounding may change how a word
   far into it is segmented. The memo stores the largest preceding score at which it cannot (see
   `certain_path` in pipeline/native/sentencepiece.c); beyond it, the word is encoded from the
   current float32 score, which is summed only then.

BPE merges within words and adds no scores, so its memo is always valid.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.native import build
from pipeline.native.library import filled, library, pointer
from pipeline.tokenizer import added_tokens, table_cache, trie
from pipeline.tokenizer.word_tokenizer import Unsupported, WordTokenizer
from tasks.vocabularies.sentencepiece_model import LAWS, OLD_LAW

_SPACE = "\u2581"
# SentencePiece's penalty, relative to the lowest score, for a character that is not a piece.
# Source: `unigram_model.cc`, kUnkPenalty.
_UNKNOWN_PENALTY = 10.0
# Most memory of the words that are remembered; 1.3 million short ones fit, then they are forgotten.
_MEMO_BYTES = 96 << 20
_BITS_OF_ID = 24
_STRIPS = ("collapse", "strip_left", "strip_right")
# Of `Model`; see pipeline/native/sentencepiece.c.
UNIGRAM, _BPE = 0, 1


class Tables(NamedTuple):
    """A model's arrays and properties, as in `Normaliser` and `Model` of the C code."""

    rules: np.ndarray  # uint32[units]
    right_sides: np.ndarray  # uint8[bytes]
    ascii: np.ndarray  # int16[128]
    points: np.ndarray  # uint8[65536], [0x110000] if `graphemes`
    symbols: np.ndarray  # int64[nodes]
    begins_symbol: np.ndarray  # uint8[256]
    longest: int
    collapse: bool
    strip_left: bool
    strip_right: bool
    prefix: int
    suffix: bool
    graphemes: bool
    kind: int
    law: int  # of LAWS, or unigrams.LAW
    trie: np.ndarray  # int64[nodes]
    frozen: np.ndarray  # int64[nodes]
    scores: np.ndarray  # float64[ids]
    unknown_score: float
    unknown_id: int
    byte_ids: np.ndarray  # int32[256]
    has_bytes: bool
    cost: float
    ascii_pairs: np.ndarray  # uint8[128 * 128]
    pairs: np.ndarray  # uint64[words]
    spaces_apart: bool
    tokens: np.ndarray  # int64[nodes]
    begins_token: np.ndarray  # bool[256]


class Normaliser(ctypes.Structure):
    """A model's normalisation, as in pipeline/native/normalise.h."""

    _fields_ = [
        *(("rules", ctypes.c_void_p), ("rules_size", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("right_sides", "ascii", "points", "symbols")),
        ("begins_symbol", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("longest", "collapse", "strip_left")),
        *((name, ctypes.c_int64) for name in ("strip_right", "prefix", "suffix", "graphemes")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(("normaliser", Normaliser), ("kind", ctypes.c_int64), ("law", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("trie", "frozen", "scores", "narrow")),
        *(("unknown_score", ctypes.c_double), ("unknown_id", ctypes.c_int64)),
        ("byte_ids", ctypes.c_void_p),
        *(("has_bytes", ctypes.c_int64), ("cost", ctypes.c_double)),
        *(("ascii_pairs", ctypes.c_void_p), ("pairs", ctypes.c_void_p), ("words", ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("spaces_apart", "pieces", "memo_bytes")),
        *((name, ctypes.c_void_p) for name in ("tokens", "begins_token")),
    ]


class FastTokenizer(WordTokenizer):
    """Encoder with the ids of a SentencePiece model, or of a tokenizer.json's unigram model."""

    def __init__(self, tables: Tables, codec: Any, added: Sequence[added_tokens.Added] = ()):
        """`codec`: a SentencePieceProcessor or a TokenizersCodec."""
        self._narrow = tables.scores.astype(np.float32)
        values = {
            **tables._asdict(),
            "narrow": self._narrow,
            "rules_size": len(tables.rules),
            "words": len(tables.pairs),
            "pieces": len(tables.scores),
            "memo_bytes": _MEMO_BYTES,
        }
        values["normaliser"] = filled(Normaliser, values)
        super().__init__("sentencepiece", _Model, values, added, codec)

    def normalised_bytes(self, text: np.ndarray) -> int:
        """Returns the bytes of UTF-8 text, uint8, once normalised, without white space."""
        measure = library().sentencepiece_normalised
        measure.restype = ctypes.c_int64
        found = measure(self._encoder, pointer(text), ctypes.c_int64(len(text)))
        if found < 0:
            raise MemoryError("no memory for a normalised text")
        return found


def from_model(model: bytes, processor: Any, law: str = OLD_LAW) -> FastTokenizer:
    """Makes a tokenizer from a serialized ModelProto; `processor` encodes refused documents.

    A unigram model is encoded by `law`, one of `sentencepiece_model.LAWS`.

    Tables are kept in the user's cache folder: for 250,000 pieces, making them takes seconds,
    loading them milliseconds. Raises Unsupported for other models.
    """

    def make() -> dict[str, Any]:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
        return {**normaliser(proto), **_pieces(proto, law)}

    modules = (*map(str, build.sources()), trie.__file__, __file__)
    key = law.encode() + model
    return FastTokenizer(
        Tables(**table_cache.load_or_make(key, modules, Tables._fields, make)), processor
    )


def charsmap(blob: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rules, right sides) of a precompiled charsmap, of an empty one without rules."""
    if not blob:
        # A root whose children are beyond the array: no byte begins a rule, not even byte 0.
        return np.array([256 << 10], np.uint32), np.zeros(1, np.uint8)
    # Source: `normalizer.cc`, DecodePrecompiledCharsMap.
    size = int.from_bytes(blob[:4], "little")
    rules = np.frombuffer(blob[4 : 4 + size], "<u4").astype(np.uint32)
    return rules, np.frombuffer(blob[4 + size :] + b"\0", np.uint8)


def longest(right_sides: np.ndarray) -> int:
    """Returns the bytes of the longest right side, at least 64."""
    return max(int(np.diff(np.flatnonzero(right_sides == 0), prepend=-1).max()), 64)


def normaliser(proto: Any) -> dict[str, Any]:
    """Returns the fields of `Normaliser` for a ModelProto, but `rules_size`; raises Unsupported."""
    spec = proto.normalizer_spec
    if not spec.escape_whitespaces:
        raise Unsupported("its spaces are not escaped")
    rules, right_sides = charsmap(spec.precompiled_charsmap)
    defined = [piece.piece.encode() for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    begins_symbol = np.zeros(256, np.uint8)
    begins_symbol[[symbol[0] for symbol in defined]] = 1
    suffixed = proto.trainer_spec.treat_whitespace_as_suffix
    found: dict[str, Any] = {
        "rules": rules,
        "right_sides": right_sides,
        "ascii": np.zeros(128, np.int16),
        "points": np.zeros(1 << 16, np.uint8),
        "symbols": trie.build((symbol, 0) for symbol in defined),
        "begins_symbol": begins_symbol,
        "longest": longest(right_sides),
        **dict.fromkeys(_STRIPS, spec.remove_extra_whitespaces),
        "prefix": spec.add_dummy_prefix and not suffixed,
        "suffix": spec.add_dummy_prefix and suffixed,
        "graphemes": False,
    }
    fill_tables(found)
    return found


def fill_tables(found: dict[str, Any]) -> None:
    """Fills `ascii` and `points` of a normaliser's fields."""
    given = filled(Normaliser, {**found, "rules_size": len(found["rules"])})
    others = "".join(map(chr, (*range(0x80, 0xD800), *range(0xE000, 0x10000)))).encode()
    library().normaliser_tables(
        ctypes.byref(given), others, ctypes.c_int64(len(others)), pointer(found["ascii"]),
        pointer(found["points"]),
    )  # fmt: skip


def _pieces(proto: Any, law: str) -> dict[str, Any]:
    kinds = proto.trainer_spec
    if kinds.model_type not in (kinds.UNIGRAM, kinds.BPE):
        raise Unsupported("its type is neither unigram nor BPE")
    unigram = kinds.model_type == kinds.UNIGRAM
    if len(proto.pieces) >> _BITS_OF_ID:
        raise Unsupported(f"it has {len(proto.pieces)} pieces")
    normal, special, symbols = [], [], []
    byte_ids = np.zeros(256, np.int32)
    unknown_id = 0
    scores = np.zeros(len(proto.pieces))
    for number, piece in enumerate(proto.pieces):
        # In normalised text, the byte 0x20 represents the space symbol.
        key = piece.piece.replace(_SPACE, " ").encode()
        scores[number] = piece.score
        if piece.type in (piece.NORMAL, piece.USER_DEFINED):
            if "\0" in piece.piece:
                raise Unsupported(f"its piece {number} holds a zero byte")
            if " " in piece.piece:
                continue  # normalised text has no bare spaces; the normaliser handles the symbol
            normal.append((key, number))
            if piece.type == piece.USER_DEFINED:
                symbols.append((key, number))
        elif piece.type == piece.UNUSED:
            if not unigram:
                raise Unsupported("it is BPE and has unused pieces")
        else:
            special.append(piece.piece)
            if piece.type == piece.UNKNOWN:
                unknown_id = number
            elif piece.type == piece.BYTE:
                byte_ids[int(piece.piece[3:5], 16)] = number
    if not normal or len({key for key, _ in normal}) < len(normal):
        raise Unsupported("it has no pieces, or a repeated piece")
    if not unigram:
        # The library looks for control pieces first. Source: model_interface.cc, PieceToId.
        of_keys = {text.replace(_SPACE, " ").encode() for text in special}
        if any(len(text) == 1 for text in special) or any(key in of_keys for key, _ in normal):
            raise Unsupported("it is BPE and has a control piece that text may hold")
    of_type = [piece for piece in proto.pieces if piece.type == piece.NORMAL]
    lowest = np.float32(min((piece.score for piece in of_type), default=np.finfo(np.float32).max))
    highest = np.float32(max([np.finfo(np.float32).tiny, *(piece.score for piece in of_type)]))
    if unigram:
        # Source: `unigram_model.cc`: user-defined symbols always win.
        for _, number in symbols:
            length = len(proto.pieces[number].piece.encode())
            if law == OLD_LAW:
                scores[number] = np.float64(np.float32(length) * highest) - 0.1
            else:
                scores[number] = np.float32(0.1 * (length - 1))
    scores[unknown_id] = np.float32(lowest - np.float32(_UNKNOWN_PENALTY))
    used = scores[[unknown_id, *(number for _, number in normal)]]
    if kinds.byte_fallback:
        # A sum over ids counts an unknown character once, at its first byte.
        continues = (np.arange(256) & 0xC0) == 0x80
        scores[byte_ids] = np.where(continues, 0.0, scores[unknown_id])
    return {
        "kind": UNIGRAM if unigram else _BPE,
        "law": LAWS.index(law),
        "trie": trie.build(normal),
        "frozen": trie.build(symbols),
        "scores": scores,
        "unknown_score": float(scores[unknown_id]),
        "unknown_id": unknown_id,
        "byte_ids": byte_ids,
        "has_bytes": kinds.byte_fallback,
        "cost": float(np.abs(used).max()),
        **pairs([key.decode() for key, _ in normal]),
        # Only a tokenizer.json has tokens that are looked up in normalised text.
        **dict(zip(("tokens", "begins_token"), added_tokens.table([]), strict=True)),
    }


def pairs(pieces: list[str]) -> dict[str, Any]:
    """Returns the sets of adjacent characters in pieces, for pipeline/native/cuts.h.

    `ascii_pairs`: uint8[128 * 128], by first and second character; `pairs`: uint64[power of two],
    bits by hash; `spaces_apart`: whether no piece has a space after another character.
    """
    # No piece has a zero byte, so it separates them.
    points = np.frombuffer("\0".join(pieces).encode("utf-32-le"), "<u4")
    adjacent = np.unique(points[:-1].astype(np.uint64) << np.uint64(32) | points[1:])
    left, right = (adjacent >> np.uint64(32)).astype(np.uint32), adjacent.astype(np.uint32)
    inside = (left > 0) & (right > 0)
    left, right = left[inside], right[inside]
    # With 16 bits per pair, one in 16 borders is missed, which only costs time.
    ascii_pairs = np.zeros(128 * 128, np.uint8)
    others = np.zeros(max(1024, 1 << (len(left) // 4).bit_length()), np.uint64)
    library().pair_sets(
        pointer(left), pointer(right), ctypes.c_int64(len(left)), pointer(ascii_pairs),
        pointer(others), ctypes.c_int64(len(others)),
    )  # fmt: skip
    return {
        "ascii_pairs": ascii_pairs,
        "pairs": others,
        "spaces_apart": bool((left[right == ord(" ")] == ord(" ")).all()),
    }
