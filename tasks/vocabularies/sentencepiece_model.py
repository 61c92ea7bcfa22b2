"""SentencePiece models, read without importing SentencePiece, except to encode and decode."""

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.storage import protobuf
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, SpecialIds

FILE = "sentencepiece.model"
# SentencePiece's mark for a space; the first piece of a word begins with it.
SPACE = "\u2581"
# Laws of encoding with a unigram model, named after the first releases with them. OLD compares
# candidates in float64 with sums in float32; NEW rounds both, subtracts the score from all sums
# where it exceeds 100,000, and scores user-defined symbols differently. All other models have the
# same ids in every release. Source: `unigram_model.cc` of 0.2.1 and 0.2.2, Model::EncodeOptimized.
LAWS = OLD_LAW, NEW_LAW = "0.1", "0.2.2"
# Releases with a law, as pip takes them.
RELEASES = {OLD_LAW: "sentencepiece<0.2.2", NEW_LAW: "sentencepiece>=0.2.2"}
# TrainerSpec.model_type. Source: sentencepiece_model.proto.
_UNIGRAM = 1
# SentencePiece's text for an unknown piece.
_UNKNOWN_TEXT = " \u2047 "
# Models kept in memory: a build loads that of its flags, and its own copy several times.
_once = functools.lru_cache(maxsize=2)


def pieces(model: bytes) -> Pieces:
    """Returns the pieces of a serialized ModelProto."""
    messages = list(_fields(model, 1))
    names = [next(_fields(message, 1)).decode() for message in messages]
    # Kinds take one byte.
    kinds = [next((value[0] for value in _fields(each, 3)), NORMAL) for each in messages]
    return Pieces(names, kinds, [_text(*each) for each in zip(names, kinds, strict=True)])


def _text(name: str, kind: int) -> str | bytes:
    if kind == CONTROL:
        return ""
    if kind == UNKNOWN:
        return _UNKNOWN_TEXT
    if kind == BYTE:  # its name is <0x41>
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE, " ")


def _fields(message: bytes, number: int) -> Iterator[bytes]:
    """Yields the payloads of the fields `number` of a protocol buffer."""
    for each, _, payload in protobuf.fields(memoryview(message)):
        if each == number:
            yield bytes(payload)


@_once
def is_unigram(model: bytes) -> bool:
    """Returns whether a serialized ModelProto is a unigram model, to which LAWS apply."""
    trainer = next(_fields(model, 2), b"")
    return next((kind[0] for kind in _fields(trainer, 3)), _UNIGRAM) == _UNIGRAM


def installed() -> tuple[str, str]:
    """Returns (the version of the installed sentencepiece, its law)."""
    version = importlib.metadata.version("sentencepiece")
    numbers = [int(part) for part in version.split(".")[:3] if part.isdecimal()]
    return version, OLD_LAW if numbers < [0, 2, 2] else NEW_LAW


@_once
def _loaded(model: bytes) -> tuple[Any, tuple[str, ...]]:
    """Returns a processor of a model, which nobody changes, and its pieces; none if it has none."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    with contextlib.suppress(RuntimeError):
        processor.LoadFromSerializedProto(model)
        return processor, tuple(processor.id_to_piece(list(range(processor.get_piece_size()))))
    return processor, ()


class SentencePieceCodec:
    """SentencePiece with a model; `name` is for messages.

    Raises UserError at construction if `model` is not a SentencePiece model.
    """

    library = "SentencePiece"

    def __init__(self, model: bytes, name: str):
        with extras.needed(name, "pipeline"):
            self.processor, self._names = _loaded(model)
        if not self._names:
            raise UserError(f"{name} is not a SentencePiece model")

    def special(self) -> tuple[SpecialIds, bool]:
        """Returns (the model's special ids, whether it has an EOS; if not, EOS's id is -1)."""
        eos = self.processor.eos_id()
        found = {role: getattr(self.processor, f"{role}_id")() for role in ("pad", "unk", "bos")}
        roles = {role: None if number < 0 else number for role, number in found.items()}
        return SpecialIds(eos=eos, **roles), eos >= 0

    def names(self) -> list[str]:
        """Returns the names of all pieces, of which `pieces` makes the same list more slowly."""
        return [*self._names]

    def normalize(self, text: str) -> str:
        return self.processor.normalize(text)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        found = self.processor.encode(texts, out_type=int, num_threads=1)
        return [np.asarray(ids, np.int32) for ids in found]

    def spans(self, text: str) -> list[tuple[int, str]]:
        """Returns the ids of a text, each with the part of the text that it stands for."""
        found = self.processor.encode(text, out_type="immutable_proto")
        return [(piece.id, piece.surface) for piece in found.pieces]

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)
