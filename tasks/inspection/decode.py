"""Decodes ids to text, token by token, without SentencePiece."""

from collections.abc import Sequence

from tasks.vocabulary import (
    BYTE,
    CONTROL,
    EOS_ID,
    PAD_ID,
    PAIR_BORDER,
    UNKNOWN,
    TokenIds,
    sentinel_piece,
)

_SPACE = "\u2581"
# SentencePiece's text for an unknown piece, and for a byte that is not part of a character.
_UNKNOWN_TEXT = " \u2047 "
REPLACEMENT = "\ufffd"
# Stands between the sides of a pair.
PAIR_BORDER_SIGN = "\u2192"


def piece(token: int, ids: TokenIds) -> str:
    """Returns the text of a piece as in the model, or of a sentinel that is not in the model."""
    if token == PAIR_BORDER:
        return PAIR_BORDER_SIGN
    if token < len(ids.pieces):
        return ids.pieces[token]
    if not ids.pieces:  # the vocabulary is not known
        return f"#{token}"
    return sentinel_piece(ids.size - 1 - token)


def is_text(token: int, ids: TokenIds) -> bool:
    """Returns False for padding, EOS, the border of a pair, sentinels and other control pieces;
    True for all else."""
    if token in (PAD_ID, EOS_ID, PAIR_BORDER) or token >= min(ids.first_sentinel, len(ids.pieces)):
        return False
    return ids.kinds[token] != CONTROL


def texts(tokens: Sequence[int], ids: TokenIds) -> list[str]:
    """Returns the text of each token; joined, they equal SentencePiece's decoded text.

    A character of several bytes is the text of its first byte, and the other bytes have none; a
    byte that is not part of a character becomes U+FFFD. Padding, EOS, sentinels and other control
    pieces have no text. Unlike SentencePiece, a space at the beginning is kept.
    """
    out = []
    at = 0
    while at < len(tokens):
        end = at
        while end < len(tokens) and is_text(tokens[end], ids) and ids.kinds[tokens[end]] == BYTE:
            end += 1
        if end > at:
            # A byte's piece is <0x41>.
            out += _characters(bytes(int(piece(token, ids)[3:5], 16) for token in tokens[at:end]))
            at = end
            continue
        token, at = tokens[at], at + 1
        if not is_text(token, ids):
            out.append("")
        elif ids.kinds[token] == UNKNOWN:
            out.append(_UNKNOWN_TEXT)
        else:
            out.append(ids.pieces[token].replace(_SPACE, " "))
    return out


def decode(tokens: Sequence[int], ids: TokenIds) -> str:
    """Returns the text of tokens, without a space at the beginning."""
    return "".join(texts(tokens, ids)).removeprefix(" ")


def _characters(data: bytes) -> list[str]:
    """Returns the text of each byte."""
    out: list[str] = []
    while len(out) < len(data):
        at = len(out)
        for size in range(1, 5):
            try:
                character = data[at : at + size].decode()
            except UnicodeDecodeError:
                continue
            out += [character, *[""] * (size - 1)]
            break
        else:
            out.append(REPLACEMENT)
    return out
