"""SentencePiece encoding in compiled code: identical ids, several times as fast.

1. Text splits between two characters that no piece contains side by side, into segments with
   independent best paths. Most are words seen before, whose ids are memoised.
2. SentencePiece sums scores over the whole document in float32, so rounding may change how a word
   far into it is cut. The memo stores the largest preceding score at which it cannot (see
   `kernels._certain_path`); beyond it, the segment is encoded from the current float32 score.

BPE merges within segments and adds no scores, so its memo is always valid.
"""

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.tokenizer import kernels, table_cache, trie
from pipeline.tokenizer.kernels import Normaliser, Pieces, Work

_SPACE = "\u2581"
# SentencePiece's penalty, relative to the lowest score, for a character that is not a piece.
# Source: `unigram_model.cc`, kUnkPenalty.
_UNKNOWN_PENALTY = 10.0
# Memo size: 24 bytes per entry, half of them used, and 8 bytes per word for segments of several
# ids. Segments of large vocabularies are longer and repeat less: 1, 2 and 4 times this size give
# 45, 50 and 59 MB/s of mixed text with 250,000 pieces, and 73, 75 and 77 with 32,000.
_MEMO_ENTRIES = 1 << 19
_MEMO_WORDS = 1 << 21
_LARGE = 100_000
# Initial sizes of the buffers, which grow with the longest document and the longest segment.
_TEXT_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 12
_OUT_TOKENS = 1 << 20


class Unsupported(Exception):
    """The library must encode this model; the text says why."""


@dataclasses.dataclass
class FastTokenizer:
    """Encoder with the ids of a SentencePiece model; `refused` counts texts left to the library."""

    normaliser: Normaliser
    pieces: Pieces
    processor: Any

    def __post_init__(self) -> None:
        self.refused = 0
        scale = 4 if len(self.pieces.scores) >= _LARGE else 1
        self._out = np.empty(_OUT_TOKENS, np.int32)
        self._work = Work(
            np.empty(_TEXT_BYTES, np.uint8),
            np.empty(_TEXT_BYTES, np.int32),
            np.empty(kernels.MEMO_BYTES + 1),
            np.empty(kernels.MEMO_BYTES + 1),
            *_segment_arrays(_SEGMENT_BYTES),
            table=np.zeros((scale * _MEMO_ENTRIES, 3), np.int64),
            store=np.empty(scale * _MEMO_WORDS, np.int64),
            fill=np.zeros(2, np.int64),
        )

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32[sum of lengths] ids, valid until the next call; int64[texts] lengths).

        `texts`: string or large_string, without nulls.
        """
        data, offsets = buffers(texts)
        lengths = np.zeros(len(texts), np.int64)
        document = used = 0
        while True:
            why, document, used, need = kernels.encode(
                self.normaliser, self.pieces, self._work, data, offsets, document, self._out, used,
                lengths,
            )  # fmt: skip
            if why == kernels.DONE:
                return self._out[:used], lengths
            if why == kernels.GROW_TEXT:
                buffers_of_text = np.empty(need, np.uint8), np.empty(need, np.int32)
                self._work = Work(*buffers_of_text, *self._work[2:])
            elif why == kernels.GROW_TOKENS:
                self._out = grown(self._out, need, used)
            elif why == kernels.GROW_SEGMENT:
                self._work = Work(*self._work[:4], *_segment_arrays(2 * need), *self._work[-3:])
            else:  # kernels.GIVE_UP
                text = data[offsets[document] : offsets[document + 1]].tobytes().decode()
                ids = np.asarray(self.processor.encode(text), np.int32)
                self._out = grown(self._out, used + len(ids), used)
                self._out[used : used + len(ids)] = ids
                used += len(ids)
                lengths[document] = len(ids)
                self.refused += 1
                document += 1


def grown(tokens: np.ndarray, count: int, used: int) -> np.ndarray:
    """Returns an array with room for `count` tokens, of which the first `used` are kept."""
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


def _segment_arrays(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    narrow, ids, starts = (np.empty(size + 1, t) for t in (np.float32, np.int32, np.int32))
    return narrow, ids, starts


def from_model(model: bytes, processor: Any) -> FastTokenizer:
    """Makes a tokenizer from a serialized ModelProto; `processor` encodes refused documents.

    Tables are kept in the user's cache folder: for 250,000 pieces, making them takes seconds,
    loading them milliseconds. Raises Unsupported for other models.
    """

    def make() -> dict[str, Any]:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
        return {**_normaliser(proto)._asdict(), **_pieces(proto)._asdict()}  # no common field

    kinds: tuple[Any, ...] = (Normaliser, Pieces)
    modules = (kernels.__file__, trie.__file__, __file__)
    names = (*Normaliser._fields, *Pieces._fields)
    tables = table_cache.load_or_make(model, modules, names, make)
    normaliser, pieces = (kind(**{name: tables[name] for name in kind._fields}) for kind in kinds)
    return FastTokenizer(normaliser, pieces, processor)


def _normaliser(proto: Any) -> Normaliser:
    spec = proto.normalizer_spec
    if not spec.escape_whitespaces:
        raise Unsupported("its spaces are not escaped")
    rules, right_sides = np.zeros(1, np.uint32), np.zeros(1, np.uint8)
    if blob := spec.precompiled_charsmap:
        # Source: `normalizer.cc`, DecodePrecompiledCharsMap.
        size = int.from_bytes(blob[:4], "little")
        rules = np.frombuffer(blob[4 : 4 + size], "<u4").astype(np.uint32)
        right_sides = np.frombuffer(blob[4 + size :] + b"\0", np.uint8)
    defined = [piece.piece.encode() for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    begins_symbol = np.zeros(256, bool)
    begins_symbol[[symbol[0] for symbol in defined]] = True
    ends = np.flatnonzero(right_sides == 0)
    suffixed = proto.trainer_spec.treat_whitespace_as_suffix
    ascii = kernels.ascii_table(rules, right_sides)
    letters = np.zeros(256, bool)
    letters[:128] = (ascii == np.arange(128)) & (ascii != ord(" ")) & ~begins_symbol[:128]
    return Normaliser(
        rules=rules,
        right_sides=right_sides,
        ascii=ascii,
        letters=letters,
        plain=kernels.plain_characters(rules),
        symbols=trie.build((symbol, 0) for symbol in defined),
        begins_symbol=begins_symbol,
        longest=max(int(np.diff(ends, prepend=-1).max()), 64),
        remove_extra=spec.remove_extra_whitespaces,
        prefix=spec.add_dummy_prefix and not suffixed,
        suffix=spec.add_dummy_prefix and suffixed,
    )


def _pieces(proto: Any) -> Pieces:
    kinds = proto.trainer_spec
    if kinds.model_type not in (kinds.UNIGRAM, kinds.BPE):
        raise Unsupported("its type is neither unigram nor BPE")
    unigram = kinds.model_type == kinds.UNIGRAM
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
    if not unigram and any(len(text) == 1 for text in special):
        raise Unsupported("it is BPE and has a control piece of one character")
    of_type = [piece for piece in proto.pieces if piece.type == piece.NORMAL]
    lowest = np.float32(min((piece.score for piece in of_type), default=np.finfo(np.float32).max))
    highest = np.float32(max([np.finfo(np.float32).tiny, *(piece.score for piece in of_type)]))
    if unigram:
        # Source: `unigram_model.cc`: user-defined symbols always win.
        for _, number in symbols:
            length = len(proto.pieces[number].piece.encode())
            scores[number] = np.float64(np.float32(length) * highest) - 0.1
    scores[unknown_id] = np.float32(lowest - np.float32(_UNKNOWN_PENALTY))
    used = scores[[unknown_id, *(number for _, number in normal)]]
    singles = np.full(128, -1, np.int32)
    for key, number in normal:
        if len(key) == 1:
            singles[key[0]] = number
    # No piece has a line end, so it separates them.
    points = "\n".join(key.decode() for key, _ in normal).encode("utf-32-le")
    text = np.frombuffer(points, np.uint32).astype(np.int64)
    adjacent = np.unique(text[:-1] << 32 | text[1:])
    ascii_pairs, pairs = kernels.pair_sets(adjacent >> 32, adjacent & 0xFFFFFFFF)
    return Pieces(
        kind=kernels.UNIGRAM if unigram else kernels.BPE,
        trie=trie.build(normal),
        frozen=trie.build(symbols),
        scores=scores,
        unknown_id=unknown_id,
        singles=singles,
        byte_ids=byte_ids,
        has_bytes=kinds.byte_fallback,
        cost=float(np.abs(used).max()),
        ascii_pairs=ascii_pairs,
        pairs=pairs,
    )
