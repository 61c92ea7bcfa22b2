"""Byte-level pieces: GPT-2's byte alphabet, and the vocabulary of bytes alone."""

import functools
import json

# ByT5's ids: padding, EOS and unknown, then the bytes. Source: google-research/byt5, and seqio's
# ByteVocabulary.
_SPECIAL = ("<pad>", "</s>", "<unk>")


@functools.cache
def alphabet() -> dict[str, int]:
    """Returns character -> byte of GPT-2's alphabet.

    Printable Latin-1 characters stand for themselves; other bytes are numbered from U+0100.
    Source: openai/gpt-2, `encoder.py`, bytes_to_unicode.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {
        **{chr(byte): byte for byte in shown},
        **{chr(0x100 + number): byte for number, byte in enumerate(others)},
    }


def raw(piece: str) -> bytes:
    """Returns the bytes of a piece; characters outside the alphabet are encoded in UTF-8."""
    known = alphabet()
    return b"".join(
        bytes([known[char]]) if char in known else char.encode("utf-8", "replace") for char in piece
    )


@functools.cache
def byte_vocabulary() -> bytes:
    """Returns a tokenizer.json with ByT5's ids: byte b is id b + 3."""
    vocab = {piece: number for number, piece in enumerate(_SPECIAL)}
    vocab |= {char: len(_SPECIAL) + byte for char, byte in alphabet().items()}
    rules = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    value = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**rules, "use_regex": False},
        "decoder": {**rules, "use_regex": False},
        "model": {"type": "BPE", "unk_token": _SPECIAL[2], "vocab": vocab, "merges": []},
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
