"""Decodes ids to text, token by token, without the library that encoded it."""

import contextlib
from collections.abc import Sequence

from tasks.vocabulary import CONTROL, PAIR_BORDER, TokenIds, sentinel_piece

# Stands for a byte that is not part of a character.
REPLACEMENT = "\ufffd"
# Separates the sides of a pair.
PAIR_BORDER_SIGN = "\u2192"


def piece(token: int, ids: TokenIds) -> str:
    """Returns a token's piece in the vocabulary, or its sentinel's name if it lies outside."""
    if token == PAIR_BORDER:
        return PAIR_BORDER_SIGN
    if token < len(ids.pieces):
        return ids.pieces[token]
    if not ids.pieces:  # unknown vocabulary
        return f"#{token}"
    return sentinel_piece(ids.size - 1 - token)


def is_text(token: int, ids: TokenIds) -> bool:
    """Returns True for text ids: not padding, EOS, a border, a sentinel or a control piece."""
    if token in (ids.special.pad, ids.special.eos, PAIR_BORDER):
        return False
    if token >= min(ids.first_sentinel, len(ids.pieces)):
        return False
    return ids.kinds[token] != CONTROL


def texts(tokens: Sequence[int], ids: TokenIds) -> list[str]:
    """Returns the text of each token; joined, the texts equal what the library decodes.

    A character spelled by several tokens belongs to the token with its first byte; a byte outside
    any character becomes U+FFFD. Padding, EOS, sentinels and other control pieces have no text.
    Unlike in SentencePiece and WordPiece, a leading space is kept.
    """
    out: list[str] = []
    run: list[bytes] = []
    for token in tokens:
        text = ids.texts[token] if is_text(token, ids) else ""
        if isinstance(text, bytes):
            run.append(text)
        else:
            out += [*_characters(run), text]
            run = []
    return [*out, *_characters(run)]


def decode(tokens: Sequence[int], ids: TokenIds) -> str:
    """Returns the text of tokens, without a leading space."""
    return "".join(texts(tokens, ids)).removeprefix(" ")


def spelled(tokens: Sequence[int], ids: TokenIds) -> str:
    """Returns the text of tokens as `decode`, with the pieces of sentinels and borders in it."""
    silent = (ids.special.pad, ids.special.eos)
    pairs = zip(tokens, texts(tokens, ids), strict=True)
    return "".join(
        text if token in silent or is_text(token, ids) else piece(token, ids)
        for token, text in pairs
    ).removeprefix(" ")


def _characters(parts: list[bytes]) -> list[str]:
    data, out = b"".join(parts), [""] * len(parts)
    owners = [number for number, part in enumerate(parts) for _ in part]
    at = 0
    while at < len(data):
        character, size = _character(data[at : at + 4])
        out[owners[at]] += character
        at += size
    return out


def _character(data: bytes) -> tuple[str, int]:
    """Returns the first character of `data`, and its number of bytes."""
    for size in range(1, len(data) + 1):
        with contextlib.suppress(UnicodeDecodeError):
            return data[:size].decode(), size
    return REPLACEMENT, 1
