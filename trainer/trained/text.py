"""Text in and out of a model: prompts as it saw them in training, and spans in their places."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds, Vocabulary, sentinel_piece

_SENTINEL = re.compile(r"<extra_id_(\d{1,9})>")
# SentencePiece's mark for a space.
_SPACE = "\u2581"


def encode(vocabulary: Vocabulary, text: str) -> np.ndarray:
    """Returns the ids of a text, int32 [tokens], without EOS; <extra_id_k> becomes a sentinel.

    A space before a sentinel is dropped, since it belongs to the span's first token. Text that
    follows a sentinel without a space goes on with the word, where the vocabulary has the piece.

    Raises:
      UserError: the vocabulary has no such sentinel.
    """
    # Texts and, at odd places, numbers of sentinels.
    parts = _SENTINEL.split(text)
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(_sentinel(vocabulary, int(part)))
            continue
        if place < len(parts) - 1:
            part = part.removesuffix(" ")
        own = vocabulary.encode([part])[0].tolist() if part else []
        if place and own and not part[0].isspace():
            own = _without_space(vocabulary, own)
        ids += own
    return np.asarray(ids, np.int32)


def _sentinel(vocabulary: Vocabulary, number: int) -> int:
    count = vocabulary.record.sentinels
    if number >= count:
        which = f"{sentinel_piece(0)} to {sentinel_piece(count - 1)}" if count else "no sentinels"
        raise UserError(f"the vocabulary has no {sentinel_piece(number)}: it has {which}")
    return vocabulary.size - 1 - number


def _without_space(vocabulary: Vocabulary, ids: list[int]) -> list[int]:
    """Returns ids of a text without the space that SentencePiece writes before it."""
    first = vocabulary.piece(ids[0])
    if first == _SPACE:
        return ids[1:]
    known = vocabulary.ids.find(first.removeprefix(_SPACE))
    return ids if known is None else [known, *ids[1:]]


def decode(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """Returns the text of ids, skipping ids above the vocabulary, which pad the embedding."""
    return vocabulary.decode(ids[ids < vocabulary.size])


def sentinels(text: str) -> list[int]:
    """Returns the numbers of the sentinels in a text, in their order."""
    return [int(number) for number in _SENTINEL.findall(text)]


def sentinel_number(ids: TokenIds, token: int) -> int | None:
    """Returns k if a token is the sentinel <extra_id_k>, else None."""
    return ids.size - 1 - token if ids.first_sentinel <= token < ids.size else None


def span_ids(ids: TokenIds, answer: np.ndarray) -> dict[int, list[int]]:
    """Returns the tokens after each sentinel of a model's output, by the sentinel's number.

    The first one counts if a sentinel comes twice.
    """
    found: dict[int, list[int]] = {}
    current: list[int] = []
    for token in map(int, answer):
        if token in (ids.special.pad, ids.special.eos) or token >= ids.size:
            continue
        number = sentinel_number(ids, token)
        if number is None:
            current.append(token)
        else:
            current = []
            found.setdefault(number, current)
    return found


def spans(vocabulary: Vocabulary, answer: np.ndarray) -> dict[int, str]:
    """Returns the text after each sentinel of a model's output, as `span_ids`."""
    found = span_ids(vocabulary.ids, answer)
    return {number: decode(vocabulary, np.asarray(span)) for number, span in found.items()}


def filled(text: str, span_of: Mapping[int, str]) -> str:
    """Returns a text with sentinels replaced by their spans in brackets.

    Sentinels without a span stay.
    """

    def span(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"[{span_of[number]}]" if number in span_of else match[0]

    return _SENTINEL.sub(span, text)
