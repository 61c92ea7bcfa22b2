"""Added tokens of a tokenizer.json, such as <unk>, at which documents are cut before their words.

`tokenizers` looks for those of text as it is (`normalized` false), then for the others in what is
left between them, normalised. Each stretch in between is then a text of its own. A token that takes
the white space beside it, or that must be a word, is odd: documents that hold it are left to the
library.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pipeline.tokenizer import pretokenize_kernels, trie


class Added(NamedTuple):
    """Tokens that are searched at once.

    Attributes:
      tokens: int64[nodes] trie token -> id.
      begins: bool[256] their first bytes.
      odd, begins_odd: the same of tokens with which a text is left to the library.
    """

    tokens: np.ndarray
    begins: np.ndarray
    odd: np.ndarray
    begins_odd: np.ndarray


class Passes(NamedTuple):
    """The added tokens of a tokenizer.json.

    Attributes:
      passes: those at which documents are cut, one search after the other.
      refused: those that the library must look for, since texts may be normalised before.
    """

    passes: list[Added]
    refused: list[str]


def passes(tokenizer: Any) -> Passes:
    """Returns the added tokens of a tokenizers.Tokenizer."""
    every = [(token, id_) for id_, token in tokenizer.get_added_tokens_decoder().items()]
    every = [(token, id_) for token, id_ in every if token.content]
    raw = [(token, id_) for token, id_ in every if not token.normalized]
    after = [(token, id_) for token, id_ in every if token.normalized]
    if tokenizer.normalizer is None:
        return Passes([_added(each) for each in (raw, after) if each], [])
    return Passes([_added(raw)] if raw else [], [token.content for token, _ in after])


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
    """Parts of documents, which follow each other in the same bytes.

    Attributes:
      offsets: int64[parts + 1] their borders.
      given: int32[parts] ids of tokens, and cut_kernels.TEXT or REFUSED for the others.
      owners: int64[parts] the document of each; every document has a part.
    """

    offsets: np.ndarray
    given: np.ndarray
    owners: np.ndarray


def cut(each: list[Added], data: np.ndarray, offsets: np.ndarray) -> Parts:
    """Returns the parts of documents data[offsets[i] : offsets[i + 1]]."""
    count = len(offsets) - 1
    found = Parts(offsets, np.full(count, pretokenize_kernels.TEXT, np.int32), np.arange(count))
    for added in each:
        found = _cut(added, data, found)
    return found


def _cut(added: Added, data: np.ndarray, found: Parts) -> Parts:
    room = 2 * len(found.given) + 64
    while True:
        ends, owners = np.empty(room + 1, np.int64), np.empty(room, np.int64)
        given = np.empty(room, np.int32)
        ends[0] = found.offsets[0]
        count = pretokenize_kernels.parts(added, data, *found, ends[1:], given, owners)
        if count >= 0:
            return Parts(ends[: count + 1], given[:count], owners[:count])
        room *= 4
