"""Cuts documents at the added tokens of a tokenizer.json, such as <unk>, before finding words.

`tokenizers` searches raw text for tokens with `normalized` false, then the normalised text between
them for the others. It encodes documents with tokens that strip white space or must be whole words.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.native.library import library, pointer
from pipeline.tokenizer import trie

# Instead of an added token's id, for a part that is text or is left to the library.
TEXT, REFUSED = -1, -2


class Added(NamedTuple):
    """Tokens found by one search."""

    tokens: np.ndarray  # int64[nodes] trie from token to id
    begins: np.ndarray  # bool[256] their first bytes
    # odd, begins_odd: the same for odd tokens, whose texts the library encodes.
    odd: np.ndarray
    begins_odd: np.ndarray


def passes(tokenizer: Any) -> tuple[list[Added], list[str]]:
    """Returns (successive searches, tokens that only the library finds) for a tokenizers.Tokenizer.

    The library may normalise before it searches for the latter.
    """
    decoder = tokenizer.get_added_tokens_decoder()
    every = [(token, id_) for id_, token in decoder.items() if token.content]
    raw = [(token, id_) for token, id_ in every if not token.normalized]
    after = [(token, id_) for token, id_ in every if token.normalized]
    if tokenizer.normalizer is None:
        return [_added(each) for each in (raw, after) if each], []
    return [_added(raw)] if raw else [], [token.content for token, _ in after]


def _added(tokens: list[tuple[Any, int]]) -> Added:
    odd = {
        token.content for token, _ in tokens if token.lstrip or token.rstrip or token.single_word
    }
    plain = ((token.content, id_) for token, id_ in tokens if token.content not in odd)
    return Added(*table(plain), *table((content, 0) for content in odd))


def table(tokens: Iterable[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (trie of tokens, bool [256] their first bytes)."""
    keys = [(content.encode(), id_) for content, id_ in tokens]
    begins = np.zeros(256, bool)
    begins[[key[0] for key, _ in keys]] = True
    return trie.build(keys), begins


class Parts(NamedTuple):
    """Consecutive parts of documents in one byte buffer."""

    offsets: np.ndarray  # int64[parts + 1]
    given: np.ndarray  # int32[parts] token ids; TEXT or REFUSED for other parts
    owners: np.ndarray  # int64[parts] document of each part; every document has a part


def cut(each: Sequence[Added], data: np.ndarray, offsets: np.ndarray) -> Parts:
    """Returns the parts of documents data[offsets[i] : offsets[i + 1]]."""
    count = len(offsets) - 1
    found = Parts(offsets, np.full(count, TEXT, np.int32), np.arange(count))
    for added in each:
        found = _cut(added, data, found)
    return found


def _cut(added: Added, data: np.ndarray, found: Parts) -> Parts:
    tables = (ctypes.c_void_p * len(added))(*(pointer(table).value for table in added))
    count, room = len(found.given), 2 * len(found.given) + 64
    search = library().cut_at_tokens
    search.restype = ctypes.c_int64
    while True:
        ends, owners = np.empty(room + 1, np.int64), np.empty(room, np.int64)
        given = np.empty(room, np.int32)
        ends[0] = found.offsets[0]
        made = search(
            tables, pointer(data), *map(pointer, found), ctypes.c_int64(count), pointer(ends[1:]),
            pointer(given), pointer(owners), ctypes.c_int64(room),
        )  # fmt: skip
        if made <= room:
            return Parts(ends[: made + 1], given[:made], owners[:made])
        room = made
