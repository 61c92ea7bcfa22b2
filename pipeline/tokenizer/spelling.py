"""Texts that spell sentinels or special tokens, such as </s>: kept, as --sentinels says."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.tokenizer import tokenize
from tasks.cache.manifest import KEEP, SENTINELS, SPECIAL_TOKENS, TEXT, Spelling
from tasks.terminal.command_line import UserError
from tasks.vocabularies import byte_level, spelt
from tasks.vocabularies.pieces import CONTROL, UNKNOWN
from tasks.vocabularies.sentencepiece_model import OLD_LAW
from tasks.vocabulary import Vocabulary, encode_with_sentinels

_SENTINEL = "<extra_id_"


class Spelt(NamedTuple):
    """The ids of texts; `kept` says for each of SENTINELS and SPECIAL_TOKENS which texts have it.

    `failures` are texts without ids, by index, and why.
    """

    tokens: np.ndarray  # int32
    lengths: np.ndarray  # int64 [texts]
    kept: dict[str, np.ndarray]  # name -> bool [texts]
    failures: dict[int, str]


class Speller:
    """Encodes texts that spell sentinels or special tokens as the plan's `Spelling` says."""

    def __init__(self, vocabulary: Vocabulary, choice: Spelling, engine: str, law: str = OLD_LAW):
        ids = plain_ids(vocabulary, choice)
        self._plain = vocabulary
        if len(ids):
            model = spelt.without(vocabulary.model, ids.tolist())
            self._plain = Vocabulary(model, vocabulary.record, vocabulary.name)
        self.choices = {SENTINELS: choice.sentinels, SPECIAL_TOKENS: choice.special_tokens}
        self._keeps = choice.sentinels == KEEP
        self._tokenizer = tokenize.Tokenizer(self._plain, engine, law)
        self._is_plain = np.zeros(vocabulary.size, bool)
        self._is_plain[ids] = True
        self._first_sentinel = vocabulary.first_sentinel

    def __call__(self, texts: pa.Array, tokens: np.ndarray, lengths: np.ndarray) -> Spelt:
        """Returns the ids of texts, given those that the vocabulary's tokenizer returned."""
        kept = {name: np.zeros(len(texts), bool) for name in (SENTINELS, SPECIAL_TOKENS)}
        failures: dict[int, str] = {}
        changed: dict[int, np.ndarray] = {}
        ends = np.cumsum(lengths)
        places = np.flatnonzero(self._is_plain[tokens])
        owners = np.unique(np.searchsorted(ends, places, side="right"))
        if len(owners):
            found, sizes = self._tokenizer.encode(texts.take(pa.array(owners)))
            bounds = np.cumsum(sizes) - sizes
            for owner, begin, size in zip(owners.tolist(), bounds, sizes, strict=True):
                before = tokens[ends[owner] - lengths[owner] : ends[owner]]
                after = found[begin : begin + size].copy()
                if not np.array_equal(before, after):
                    changed[owner] = after
                    sentinel = (before[self._is_plain[before]] >= self._first_sentinel).any()
                    kept[SENTINELS if sentinel else SPECIAL_TOKENS][owner] = True
        spells = pc.match_substring(texts, _SENTINEL) if self._keeps else pa.array([], pa.bool_())
        for number in np.flatnonzero(spells.to_numpy(zero_copy_only=False)).tolist():
            try:
                ids = encode_with_sentinels(self._plain, texts[number].as_py(), self._encode)
            except UserError as error:
                ids, failures[number] = np.zeros(0, np.int32), str(error)
            changed[number] = ids
            kept[SENTINELS][number] = (ids >= self._first_sentinel).any()
        if changed:
            parts = np.split(tokens, ends[:-1])
            parts = [changed.get(number, part) for number, part in enumerate(parts)]
            tokens = np.concatenate(parts)
            lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return Spelt(tokens, lengths, kept, failures)

    def _encode(self, text: str) -> np.ndarray:
        return self._tokenizer.encode(pa.array([text]))[0]


def plain_ids(vocabulary: Vocabulary, choice: Spelling) -> np.ndarray:
    """Returns the ids of tokens that become plain text, int64."""
    kinds, every = np.array(vocabulary.ids.kinds), np.arange(vocabulary.record.pieces)
    kinds = kinds[: len(every)]
    is_sentinel, found = every >= vocabulary.first_sentinel, np.zeros(len(every), bool)
    if choice.special_tokens == TEXT and not vocabulary.is_sentencepiece:
        found |= np.isin(kinds, (CONTROL, UNKNOWN)) & ~is_sentinel
    if choice.sentinels == TEXT:
        found |= is_sentinel
    return np.flatnonzero(found)


def check(vocabulary: Vocabulary, choice: Spelling, is_pairs: bool) -> None:
    """Raises a UserError if a choice cannot be made for a vocabulary, or has no effect."""
    if vocabulary.is_registered:
        raise UserError(
            "--sentinels and --special_tokens are for SentencePiece and tokenizer.json: only its "
            "own code knows how a class of --task_module spells its tokens"
        )
    if choice.sentinels == KEEP and not is_pairs:
        raise UserError(
            "--sentinels=keep is for pairs: the objective of a task that reads texts adds sentinels"
        )
    if choice.sentinels == KEEP and not vocabulary.record.sentinels:
        raise UserError("--sentinels=keep: the vocabulary has no sentinels; add --extra_ids=100")
    own_sentinels = vocabulary.first_sentinel < vocabulary.record.pieces
    is_plain = vocabulary.is_sentencepiece or vocabulary.model == byte_level.byte_vocabulary()
    for name, idle in (
        (SENTINELS, choice.sentinels == TEXT and not own_sentinels),
        (SPECIAL_TOKENS, choice.special_tokens == TEXT and is_plain),
    ):
        if idle:
            raise UserError(
                f"--{name}=text has no effect: the vocabulary already encodes them as plain text"
            )
