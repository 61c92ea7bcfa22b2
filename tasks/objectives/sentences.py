"""Finds sentence starts in windows of tokens, by rules for English and Romanian.

A sentence ends with a word that ends in a full stop, question mark, exclamation mark or ellipsis,
if the next word begins with a capital or a digit. Abbreviations such as titles, initials and
letters with full stops ("U.S.", "S.U.A.") do not end one. The rules read a vocabulary's pieces, so
a cache need not mark sentences; in a vocabulary without capitals, all letters count as capitals.

Dimensions: W windows, N tokens per window, C candidates, P pieces.
"""

import functools

import numpy as np

from tasks.objectives import noise
from tasks.objectives.noise import Array
from tasks.vocabulary import BYTE, T5_IDS, UNK_ID, UNKNOWN, TokenIds

_TERMINALS = ".!?…"
_CLOSERS = "\"'”’»)]}"
_OPENERS = "\"'„“”‘’«([{—–-•*¿¡"
# Titles and similar words, which do not end a sentence; lower case, without full stops.
_TITLES = """mr mrs ms messrs mx dr prof rev hon st mt ft gen col lt sgt capt cmdr adm gov sen rep
    pres approx vs cf viz eg ie al dept univ dl d-l dna d-na dlui dnei dv ing av acad arh ec drd
    lect conf asist cpt plt subl sf pt cca aprox ex tel jud mun"""
# Abbreviations before a number.
_NUMBERED = """no nos nr art alin lit pag pg pp cap ch chap vol fig figs tab eq sec bl sc ap et str
    bd pct op ed jan feb mar apr jun jul aug sep sept oct nov dec ian iun iul noi mil mld"""
# Classes of a last word, by whether it ends a sentence, and of the next word's first character.
_NO_END, _END, _END_UNLESS_NUMBER = 0, 1, 2
_NOTHING, _CAPITAL, _DIGIT, _SMALL = 0, 1, 2, 3
# Number of pieces read from a word's end, and of tokens read after it.
_WORD_PIECES, _NEXT_PIECES = 8, 4


def word_ends_sentence(word: str) -> int:
    """Returns _NO_END, _END, or _END_UNLESS_NUMBER (an end unless a number follows)."""
    core = word.rstrip(_CLOSERS)
    if not core or core[-1] not in _TERMINALS:
        return _NO_END
    if core[-1] != "." or core.endswith(".."):
        return _END
    body = core[:-1].lstrip(_OPENERS)
    plain = body.lower()
    # Initials and letters with full stops between them; words of one letter end no sentence.
    spelt = all(len(part) == 1 and part.isalpha() for part in body.split("."))
    if spelt or plain in _words(_TITLES):
        return _NO_END
    return _END_UNLESS_NUMBER if plain in _words(_NUMBERED) else _END


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _beginning(text: str, cased: bool) -> int:
    """Classifies a piece's first character after quotes, brackets and dashes."""
    first = text.lstrip(_OPENERS)[:1]
    if not first:
        return _NOTHING
    if first.isdigit():
        return _DIGIT
    return _SMALL if cased and first.islower() else _CAPITAL


def _shown(text: str | bytes) -> str:
    """Returns the text that a piece adds to a word; parts of characters are replaced."""
    return (text if isinstance(text, str) else text.decode(errors="replace")).replace(" ", "")


class _Marks:
    """Facts about a vocabulary's pieces, by id."""

    def __init__(self, ids: TokenIds) -> None:
        first = ids.first_sentinel
        pieces, kinds, texts = ids.pieces[:first], ids.kinds[:first], ids.texts[:first]
        silent = UNK_ID if ids.special == T5_IDS else -1
        self.text = [
            "" if number <= silent or kind in (BYTE, UNKNOWN) else _shown(text)
            for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        ]
        self.text += [""] * (ids.size + 1 - len(self.text))  # the last one pads words
        cased = any(text != text.lower() for text in self.text)
        # A word that ends with the piece may end a sentence.
        self.last = np.array([text[-1:] in (*_TERMINALS, *_CLOSERS) for text in self.text])
        self.begins = np.array([_beginning(text, cased) for text in self.text])
        # A new sentence follows the piece.
        self.breaks = np.array(["\n" in text for text in self.text])
        self.breaks[ids.special.eos] = True
        self.breaks[: len(pieces)] |= np.array([piece == "<0x0A>" for piece in pieces])
        self._words: dict[bytes, int] = {}

    def end_of(self, tokens_P: Array) -> int:
        """Returns `word_ends_sentence` of a word's pieces, left-padded with the number of ids."""
        key = tokens_P.tobytes()
        if key not in self._words:
            if len(self._words) > 1 << 18:
                self._words.clear()
            self._words[key] = word_ends_sentence("".join(self.text[token] for token in tokens_P))
        return self._words[key]


@functools.lru_cache(maxsize=8)
def _marks(ids: TokenIds) -> _Marks:
    return _Marks(ids)


def sentence_starts(tokens_WN: Array, lengths_W: Array, ids: TokenIds) -> Array:
    """Returns the tokens that begin a sentence, bool [W, N].

    These include a window's first token, and every token after an EOS or a line feed. `tokens_WN`
    is int32 [W, N], padded with 0; `lengths_W` is int64 [W].
    """
    marks, (windows, width) = _marks(ids), tokens_WN.shape
    tokens_WN = ids.text_ids[tokens_WN]
    starts_WN = np.zeros((windows, width), bool)
    starts_WN[:, 0] = True
    starts_WN[:, 1:] = marks.breaks[tokens_WN[:, :-1]]
    word_WN = ids.word_starts[tokens_WN]
    candidate_WN = np.zeros((windows, width), bool)
    candidate_WN[:, :-1] = marks.last[tokens_WN[:, :-1]] & word_WN[:, 1:]
    candidate_WN[:, :-1] &= tokens_WN[:, 1:] != ids.special.eos
    row_C, place_C = np.nonzero(candidate_WN)

    # The first of the next pieces that does not consist of quotes and dashes.
    next_CP = place_C[:, None] + 1 + np.arange(_NEXT_PIECES)
    there_CP = next_CP < width
    begins_CP = marks.begins[tokens_WN[row_C[:, None], np.minimum(next_CP, width - 1)]] * there_CP
    first_C = np.argmax(begins_CP > 0, axis=1)
    begins_C = begins_CP[np.arange(len(row_C)), first_C]
    possible_C = (begins_C == _CAPITAL) | (begins_C == _DIGIT)
    row_C, place_C, begins_C = row_C[possible_C], place_C[possible_C], begins_C[possible_C]

    # The pieces of the last word.
    begin_WN = np.maximum.accumulate(np.where(word_WN, np.arange(width), 0), axis=1)
    last_CP = place_C[:, None] - np.arange(_WORD_PIECES)[::-1]
    inside_CP = last_CP >= begin_WN[row_C, place_C][:, None]
    words_CP = np.where(inside_CP, tokens_WN[row_C[:, None], np.maximum(last_CP, 0)], ids.size)
    words_CP = np.ascontiguousarray(words_CP.astype(np.int32))
    ends_C = np.array([marks.end_of(tokens_P) for tokens_P in words_CP], np.int64)
    kept_C = (ends_C == _END) | ((ends_C == _END_UNLESS_NUMBER) & (begins_C != _DIGIT))
    starts_WN[row_C[kept_C], place_C[kept_C] + 1] = True
    return starts_WN & noise.within(lengths_W, width)
