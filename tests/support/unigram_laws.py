"""The laws of unigram models, as plain Python, and models that tell them apart.

EXACT is the law of `tokenizers`, which sums in float64. Source of the others: SentencePiece,
`unigram_model.cc` of 0.2.1 and of 0.2.2, Model::EncodeOptimized.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from tasks.vocabularies.sentencepiece_model import NEW_LAW, OLD_LAW

EXACT = "exact"
_SPACE = "\u2581"
_RESET = np.float32(100_000)


def encode(model: bytes, text: str, law: str) -> list[int]:
    """Returns the ids of a normalised text, in which U+2581 is a space."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    pieces = list(proto.pieces)
    normal = [np.float32(piece.score) for piece in pieces if piece.type == piece.NORMAL]
    unknown = next(number for number, piece in enumerate(pieces) if piece.type == piece.UNKNOWN)
    scores = {
        piece.piece: (_score(piece, max(normal), law), number)
        for number, piece in enumerate(pieces)
        if piece.type in (piece.NORMAL, piece.USER_DEFINED)
    }
    longest = max(map(len, scores))
    least = min(normal) - np.float32(10) if law != EXACT else np.float64(min(normal)) - 10
    rounded = np.float32 if law == NEW_LAW else np.float64
    best = np.zeros(len(text) + 1, np.float64 if law == EXACT else np.float32)
    last = [(-1, -1)] * (len(text) + 1)  # (start, id) of the last piece up to a place
    for start in range(len(text)):
        if law == NEW_LAW and abs(best[start]) > _RESET:
            reached = [p for p in range(start + 1, len(text) + 1)[:longest] if last[p][0] >= 0]
            best[[start, *reached]] -= best[start]
        ends = range(start + 1, min(start + longest, len(text)) + 1)
        found = [(end, *scores[text[start:end]]) for end in ends if text[start:end] in scores]
        if text[start] not in scores:
            found.append((start + 1, least, unknown))
        for end, score, number in found:
            candidate = rounded(score + best[start])
            if number == unknown:
                candidate = best.dtype.type(candidate)
            if last[end][0] < 0 or candidate > best[end]:
                best[end], last[end] = candidate, (start, number)
    path = []
    end = len(text)
    while end:
        start, number = last[end]
        path.append((text[start:end], number))
        end = start
    return list(_ids(path[::-1], unknown, pieces))


def _score(piece, highest, law: str):
    """Returns a piece's score, float32, or float64 for OLD_LAW."""
    if piece.type == piece.NORMAL:
        return np.float32(piece.score) if law == NEW_LAW else np.float64(piece.score)
    size = len(piece.piece.encode())
    if law == NEW_LAW:
        return np.float32(0.1 * (size - 1))
    return np.float64(np.float32(size) * max(highest, np.finfo(np.float32).tiny)) - 0.1


def _ids(path, unknown: int, pieces) -> Iterator[int]:
    byte_ids = {
        piece.piece: number for number, piece in enumerate(pieces) if piece.type == piece.BYTE
    }
    before = -1
    for text, number in path:
        if number != unknown:
            yield number
        elif byte_ids:
            yield from (byte_ids[f"<0x{byte:02X}>"] for byte in text.encode())
        elif before != unknown:
            yield unknown
        before = number


def model(
    symbols: tuple[str, ...] = (),
    begins: str = f"abc{_SPACE}",
    least: float = -207,
    has_bytes: bool = False,
) -> bytes:
    """Returns a model of strings of up to three of the letters abc and the space symbol.

    Nearly all their segmentations have nearly the same score, unlike those of x and y. `begins`
    are the letters that begin a string; `least` is the lowest score, on which unknown ones depend.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.byte_fallback = has_bytes
    proto.normalizer_spec.name = "identity"
    kinds = {"<pad>": 3, "</s>": 3, "<unk>": 2}
    if has_bytes:
        kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
    for name, kind in kinds.items():
        proto.pieces.add(piece=name, score=0, type=kind)
    for size in (1, 2, 3):
        for letters in itertools.product(f"abc{_SPACE}", repeat=size):
            if (name := "".join(letters)) not in symbols and name[0] in begins:
                proto.pieces.add(piece=name, score=-20.7 * size, type=1)
    for name, score in (("x", -207), ("y", -207), ("xy", -300), ("yx", -310), ("q", least)):
        proto.pieces.add(piece=name, score=score, type=1)
    for symbol in symbols:
        proto.pieces.add(piece=symbol, score=0, type=4)
    return proto.SerializeToString()


MODELS = {
    "ties": model(),
    "symbols": model(("ab", "abca", "bc")),
    "gaps": model(begins=f"ac{_SPACE}", least=-150_000),
    "bytes": model(has_bytes=True),
}
_LETTERS = random.Random(0)
# The score of the last one passes 100,000 twice.
TEXTS = ["".join(_LETTERS.choices("abcc d\u00e9xyxy", k=size)) for size in (0, 1, 40, 500, 12_000)]
# Digests of the ids of TEXTS by model, made with SentencePiece 0.2.1 and 0.2.3.
DIGESTS = {
    OLD_LAW: {
        "ties": "02fdd3319480f309",
        "symbols": "9886bcefb0b5110f",
        "gaps": "492be0e5afe3d1dd",
        "bytes": "16b0702591c84d90",
    },
    NEW_LAW: {
        "ties": "c9513f6cfa92ec2e",
        "symbols": "c0f2ed0af4c31a0d",
        "gaps": "2b0fbaa5af786529",
        "bytes": "2dcbd6429adffafe",
    },
}


def digest(lines: list[list[int]]) -> str:
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]
