"""Ids and pieces of a vocabulary for objectives."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabularies import registered, sentencepiece_model, tokenizer_json
from tasks.vocabularies.pieces import BYTE, CONTROL, T5_IDS, UNKNOWN, UNUSED, Pieces, SpecialIds

# T5's ids.
PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
_UNK_END = UNK_ID + 1
# Thai and Lao, Burmese, Khmer, kana and Han.
_WITHOUT_SPACES = re.compile(
    "[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
# EOS piece added to a tokenizer without one.
ADDED_EOS = "</s>"


def sentinel_piece(number: int) -> str:
    """Returns the text of sentinel `number`, counted from 0: <extra_id_0> has the highest id."""
    return f"<extra_id_{number}>"


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A vocabulary for objectives, without the library that encodes text.

    Attributes:
      size: number of ids.
      sentinels: number of sentinels, the last ids.
      model: bytes of the vocabulary's file, parsed only if pieces are needed.
      special: ids of padding, EOS and so on.
    """

    size: int
    sentinels: int
    model: bytes = dataclasses.field(default=b"", repr=False)
    special: SpecialIds = T5_IDS

    @property
    def first_sentinel(self) -> int:
        """The lowest sentinel id; `size` if there are none."""
        return self.size - self.sentinels

    @functools.cached_property
    def _of_file(self) -> Pieces:
        found, special = kind_of(self.model).pieces(self.model), self.special
        for number in (special.pad, special.eos, special.bos):
            if number is not None and number < len(found.names):
                found.kinds[number], found.texts[number] = CONTROL, ""
        if special.eos == len(found.names):
            found.add(ADDED_EOS, CONTROL, "")
        return found

    @property
    def pieces(self) -> list[str]:
        """Names of the file's pieces, in order of ids; an added EOS is the last."""
        return self._of_file.names

    @property
    def kinds(self) -> list[int]:
        """Kinds of `pieces`: NORMAL, UNKNOWN, CONTROL, 4 (user-defined), 5 (unused) or BYTE."""
        return self._of_file.kinds

    @property
    def texts(self) -> list[str | bytes]:
        """The text that each of `pieces` adds; bytes if it may be part of a character."""
        return self._of_file.texts

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Ids that begin a word, bool [size]: pieces that begin with a space, or lack text.

        Scripts without spaces have a word for each piece, as has a vocabulary without spaces.
        """
        starts = np.ones(self.size, bool)
        first = _UNK_END if self.special == T5_IDS else 0
        texts = self.texts[first : self.first_sentinel]
        kinds = self.kinds[first : self.first_sentinel]
        spaces = [
            text[:1] in (" ", b" ") and kind != BYTE
            for text, kind in zip(texts, kinds, strict=True)
        ]
        if any(spaces):
            starts[first : first + len(texts)] = [
                after_space or (isinstance(text, str) and bool(_WITHOUT_SPACES.match(text)))
                for after_space, text in zip(spaces, texts, strict=True)
            ]
        return starts

    @functools.cached_property
    def random_ids(self) -> np.ndarray:
        """Ids that may replace any token, int64: all but special ids and sentinels."""
        if self.special == T5_IDS:  # without reading the pieces
            return np.arange(_UNK_END, self.first_sentinel)
        kinds = np.array(self.kinds[: self.first_sentinel])
        return np.flatnonzero(~np.isin(kinds, (CONTROL, UNKNOWN, UNUSED)))

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """For each id, the id with its text: itself, unless inspection gives tokens marker ids."""
        return np.arange(self.size)

    def find(self, piece: str) -> int | None:
        """Returns the id of a piece or sentinel (<extra_id_K>); None if there is none."""
        return self._ids.get(piece)

    def id_of(self, piece: str) -> int:
        """Returns the id of a piece or sentinel (<extra_id_K>); raises UserError if absent."""
        if piece not in self._ids:
            raise UserError(
                f"the vocabulary has no piece {piece}: make one with vocab.train "
                f"--user_defined_symbols={piece}, or let the objective use a sentinel, "
                f"<extra_id_0> to {sentinel_piece(self.sentinels - 1)}"
                if self.sentinels
                else f"the vocabulary has neither a piece {piece} nor sentinels: make one with "
                "vocab.train, or add sentinels with --extra_ids=100"
            )
        return self._ids[piece]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        found = {piece: number for number, piece in enumerate(self.pieces)}
        for number in range(self.sentinels):
            found[sentinel_piece(number)] = self.size - 1 - number
        return found


def kind_of(model: bytes) -> Any:
    """Returns the module that reads the vocabulary."""
    if registered.is_registered(model):
        return registered
    is_json = tokenizer_json.is_tokenizer_json(model)
    return tokenizer_json if is_json else sentencepiece_model
