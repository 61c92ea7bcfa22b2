"""Text into and out of a model: prompts in training's form, and spans in their gaps."""

import re
from collections.abc import Mapping

import numpy as np

from tasks.vocabulary import TokenIds, Vocabulary

_SENTINEL = re.compile(r"<extra_id_(\d{1,9})>")


def decode(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """Returns the text of ids, skipping ids above the vocabulary, which pad the embedding."""
    return vocabulary.decode(ids[ids < vocabulary.size])


def sentinels(text: str) -> list[int]:
    """Returns the numbers of a text's sentinels, in order."""
    return [int(number) for number in _SENTINEL.findall(text)]


def sentinel_number(ids: TokenIds, token: int) -> int | None:
    """Returns k for the sentinel <extra_id_k>; None for other tokens."""
    return ids.size - 1 - token if ids.first_sentinel <= token < ids.size else None


def span_ids(ids: TokenIds, answer: np.ndarray) -> dict[int, list[int]]:
    """Returns the tokens after each sentinel, by number; only a sentinel's first span counts."""
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
    """Returns the text after each sentinel of a model's output; see `span_ids`."""
    found = span_ids(vocabulary.ids, answer)
    return {number: decode(vocabulary, np.asarray(span)) for number, span in found.items()}


def filled(text: str, span_of: Mapping[int, str]) -> str:
    """Replaces a text's sentinels with their spans in brackets; keeps those without a span."""

    def span(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"[{span_of[number]}]" if number in span_of else match[0]

    return _SENTINEL.sub(span, text)
