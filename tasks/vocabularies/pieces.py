"""Facts about the pieces of any vocabulary."""

import dataclasses
from typing import NamedTuple

# Kinds of pieces; 4 is user-defined. Source: sentencepiece_model.proto, Type.
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


class Pieces(NamedTuple):
    """The pieces of a vocabulary, in id order."""

    names: list[str]  # the pieces as the vocabulary's file spells them
    kinds: list[int]  # NORMAL, UNKNOWN, CONTROL, 4, UNUSED or BYTE
    # Text that each adds, with its spaces: str, or bytes if it may hold part of a character; "" for
    # control pieces.
    texts: list[str | bytes]

    def add(self, name: str, kind: int, text: str | bytes) -> None:
        self.names.append(name)
        self.kinds.append(kind)
        self.texts.append(text)


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids with a role, None if there is no such piece; the defaults are T5's.

    Source: T5's `sentencepiece.model` and seqio's SentencePieceVocabulary.
    """

    pad: int | None = 0
    eos: int = 1
    unk: int | None = 2
    bos: int | None = None

    @property
    def start(self) -> int:
        """The id that a decoder reads first: BOS, else padding, as in T5, else EOS, as in GPT-2."""
        return next(found for found in (self.bos, self.pad, self.eos) if found is not None)

    @property
    def of_unknown_text(self) -> int | None:
        """The id of text that the vocabulary cannot spell; None if its unknown token has a role.

        GPT-2's is EOS, too, and stands for no text: its pieces spell every byte.
        """
        return None if self.unk in (self.pad, self.eos, self.bos) else self.unk

    def starting(self, first: int | None) -> "SpecialIds":
        """Returns the same ids with another `start`; None keeps it."""
        return self if first in (None, self.start) else _Starting(**vars(self) | {"first": first})

    def pads(self, begins_texts: bool) -> int:
        """Returns the id that pads rows for transformers.

        It is EOS if there is no padding id, or if the padding id is a `start` that `begins_texts`,
        which must not be masked.
        """
        if self.pad is None or (begins_texts and self.pad == self.start):
            return self.eos
        return self.pad

    @property
    def zero_pads(self) -> bool:
        """True if id 0 is padding, which no token in a row has."""
        return self.pad == 0


@dataclasses.dataclass(frozen=True)
class _Starting(SpecialIds):
    """Special ids of a model whose decoder reads another id first than its vocabulary says."""

    first: int = 0

    @property
    def start(self) -> int:
        return self.first


T5_IDS = SpecialIds()
