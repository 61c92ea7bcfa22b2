"""Tokenization of batches of texts, with an audit of the fast tokenizer."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.tokenizer import byte_pairs, fast_tokenizer, tokenizer_file, word_tokenizer
from tasks import arrow
from tasks.terminal.command_line import UserError
from tasks.vocabularies import tokenizer_json
from tasks.vocabularies.registered import RegisteredCodec
from tasks.vocabularies.sentencepiece_model import NEW_LAW, OLD_LAW, RELEASES, installed
from tasks.vocabulary import Vocabulary

FAST = "fast"
SENTENCEPIECE = "sentencepiece"
LIBRARY = "library"  # SentencePiece, or `tokenizers` for a tokenizer.json
ENGINES = (FAST, LIBRARY, SENTENCEPIECE)

# Bytes of text per library call. SentencePiece returns about 36 bytes of Python objects per token;
# larger chunks need more memory and are not faster.
_CHUNK_BYTES = 1 << 16
# One byte in 256 is also encoded by the library and compared. This costs 2% of the time,
# because SentencePiece is a sixth as fast as the fast tokenizer; with `tokenizers` it costs 5%.
_AUDIT_INTERVAL = 256
# Only the beginning of a longer text is compared, to limit the library's memory.
_AUDITED_BYTES = 64 << 10
# Why FAST does not support a class from --task_module.
_CLASS = "only its own code knows its ids"
_WITHOUT_BEAM = ", without Beam, as it needs protobuf 7"

Fast = fast_tokenizer.FastTokenizer | word_tokenizer.WordTokenizer | byte_pairs.ByteTokenizer


class Tokenizer:
    """Tokenizer of a vocabulary with one of ENGINES; all return the library's ids.

    A unigram model of SentencePiece is encoded by `law`. If the installed library has another, only
    FAST can, and is not audited; raises a UserError if it cannot either.
    """

    def __init__(self, vocabulary: Vocabulary, engine: str = FAST, law: str = OLD_LAW):
        self._vocabulary = vocabulary
        self._fast: Fast | None = None
        self.refusal = ""  # why FAST leaves the vocabulary to its library
        self._audits = not other_law(vocabulary, law)
        # Index of a text in the last `encode` call -> why a user's class cannot encode it; such a
        # text has no ids.
        self.failures: dict[int, str] = {}
        self.documents = {"encoded": 0, "left to the library": 0, "audited": 0}
        self._seen = self._audited = 0
        if engine == SENTENCEPIECE and not vocabulary.is_sentencepiece:
            raise UserError(
                f"--tokenizer={engine}: {vocabulary.name} is not a SentencePiece model; use "
                f"--tokenizer={LIBRARY}"
            )
        codec = vocabulary.codec
        # Another instance of a user's class encodes some texts again: resuming and verifying need
        # ids that depend only on the text.
        self._again = codec.another() if isinstance(codec, RegisteredCodec) else None
        if engine == FAST:
            try:
                self._fast = fast(vocabulary, law)
            except fast_tokenizer.Unsupported as error:
                self.refusal = str(error)
        if not self._fast:
            check_law(vocabulary, law, engine, self.refusal)

    @property
    def normalised_bytes(self) -> Callable[[np.ndarray], int] | None:
        """The method of FAST for a SentencePiece model, which measures text; else None."""
        found = getattr(self._fast, "normalised_bytes", None)
        return found if self._vocabulary.is_sentencepiece else None

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int32[sum of lengths] ids of all texts, int64[texts] number of ids in each).

        The next call may overwrite the ids. `texts` has no nulls. EOS is not added. Raises a
        UserError if the audit finds a difference, or a user's class returns something other than
        ids.
        """
        self.documents["encoded"] += len(texts)
        if self._again:
            return self._by_class(texts)
        if not self._fast:
            self.documents["left to the library"] += len(texts)
            return self._by_library(texts)
        refused = self._fast.refused
        tokens, lengths = self._fast.encode(texts)
        self.documents["left to the library"] += self._fast.refused - refused
        if self._audits:
            self._audit(texts, tokens, lengths)
        return tokens, lengths

    def _by_library(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        tokens = [np.zeros(0, np.int32)]
        for chunk in _chunks(texts):
            tokens += self._vocabulary.encode(chunk.to_pylist())
        lengths = np.fromiter(map(len, tokens[1:]), np.int64, len(texts))
        return np.concatenate(tokens), lengths

    def _by_class(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        codec: Any = self._vocabulary.codec
        self.documents["left to the library"] += len(texts)
        found = [self._vocabulary.try_encode(text.as_py()) for text in texts]
        self.failures = {number: why for number, why in enumerate(found) if isinstance(why, str)}
        tokens = [np.zeros(0, np.int32) if isinstance(ids, str) else ids for ids in found]
        for number, _ in self._due(texts):
            text, ids = texts[number].as_py(), found[number]
            again = codec.try_encode(text, self._again)
            if type(again) is not type(ids) or not np.array_equal(again, ids):
                start = text[:60].replace("\n", " ")
                raise UserError(
                    f"{codec.library} encodes the text {start!r} differently the second time: its "
                    "ids must depend on nothing but the text"
                )
        lengths = np.fromiter(map(len, tokens), np.int64, len(texts))
        return np.concatenate([np.zeros(0, np.int32), *tokens]), lengths

    def _due(self, texts: pa.Array) -> Iterator[tuple[int, int]]:
        """Yields (index, bytes) of texts to audit: one in _AUDIT_INTERVAL of all bytes."""
        sizes = text_bytes(texts)
        before = self._seen + np.cumsum(sizes) - sizes
        self._seen += int(sizes.sum())
        at = 0
        while True:
            due = np.searchsorted(before[at:], self._audited * _AUDIT_INTERVAL) + at
            if due >= len(texts):
                return
            at = int(due)
            yield at, int(sizes[at])
            self.documents["audited"] += 1
            self._audited += min(max(int(sizes[at]), 1), _AUDITED_BYTES)
            at += 1

    def _audit(self, texts: pa.Array, tokens: np.ndarray, lengths: np.ndarray) -> None:
        ends = np.cumsum(lengths)
        for at, size in self._due(texts):
            text = texts[at].as_py()
            found = tokens[ends[at] - lengths[at] : ends[at]]
            if size > _AUDITED_BYTES:
                text, kept = text[: _AUDITED_BYTES // 4], tokens.copy()
                assert self._fast
                found = self._fast.encode(arrow.of_texts([text]))[0].copy()
                tokens[:] = kept  # in the shared buffer
            if not np.array_equal(found, self._vocabulary.encode([text])[0]):
                start = text[:60].replace("\n", " ")
                engine = SENTENCEPIECE if self._vocabulary.is_sentencepiece else LIBRARY
                raise UserError(
                    f"the fast tokenizer differs from {self._vocabulary.codec.library} on the text "
                    f"{start!r}: use --tokenizer={engine}, and please report this text and the "
                    "vocabulary"
                )


def other_law(vocabulary: Vocabulary, law: str) -> str:
    """Returns why the installed SentencePiece cannot encode by `law`, "" if it can."""
    if not vocabulary.is_unigram:
        return ""
    version, own = installed()
    return "" if own == law else f"sentencepiece {version} encodes by law {own}, not {law}"


def check_law(vocabulary: Vocabulary, law: str, engine: str, refusal: str = "") -> None:
    """Raises a UserError if the library must encode but has another law; `refusal` is FAST's."""
    if why := other_law(vocabulary, law):
        reason, fast = (f" leaves it to the library ({refusal})", "") if refusal else ("", FAST)
        raise UserError(
            f"--tokenizer={engine}{reason}: {why}: give --sentencepiece_law={installed()[1]}"
            f"{fast and f' or --tokenizer={fast}'}, or an environment with '{RELEASES[law]}'"
            f"{_WITHOUT_BEAM if law == NEW_LAW else ''}"
        )


def fast(vocabulary: Vocabulary, law: str = OLD_LAW) -> Fast:
    """Returns the fast tokenizer of a vocabulary; raises Unsupported if there is none."""
    if vocabulary.is_registered:
        raise fast_tokenizer.Unsupported(_CLASS)
    if vocabulary.is_sentencepiece:
        return fast_tokenizer.from_model(vocabulary.model, vocabulary.processor, law)
    assert isinstance(vocabulary.codec, tokenizer_json.TokenizersCodec)
    return tokenizer_file.tokenizer(vocabulary.model, vocabulary.codec)


def refusal(vocabulary: Vocabulary) -> str:
    """Returns why FAST leaves a vocabulary to its library, "" if it does not; makes no tables."""
    if vocabulary.is_registered:
        return _CLASS
    if isinstance(vocabulary.codec, tokenizer_json.TokenizersCodec):
        contents = tokenizer_json.parsed(vocabulary.model, vocabulary.name)
        try:
            tokenizer_file.rules(contents, vocabulary.codec.tokenizer.normalizer)
        except fast_tokenizer.Unsupported as error:
            return str(error)
    return ""


def without_special(
    vocabulary: Vocabulary, tokens: np.ndarray, lengths: np.ndarray, keeps_sentinels: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Empties texts with `reserved` ids, except sentinels if `keeps_sentinels`.

    Returns (tokens, lengths, int64[texts]: the first such id, -1 in other texts).
    """
    spelt = np.full(len(lengths), -1)
    if vocabulary.is_sentencepiece:  # no text spells its control pieces, and comparing is faster
        if keeps_sentinels or tokens.max(initial=0) < vocabulary.first_sentinel:
            return tokens, lengths, spelt
        places = np.flatnonzero(tokens >= vocabulary.first_sentinel)
    else:
        places = np.flatnonzero(vocabulary.reserved[tokens])
        if keeps_sentinels:
            places = places[tokens[places] < vocabulary.first_sentinel]
    if not len(places):
        return tokens, lengths, spelt
    places = places[::-1]  # of several, the first is written last
    spelt[np.searchsorted(np.cumsum(lengths), places, side="right")] = tokens[places]
    kept = np.repeat(spelt < 0, lengths)
    return tokens[kept], np.where(spelt < 0, lengths, 0), spelt


def text_bytes(texts: pa.Array) -> np.ndarray:
    """Returns int64[texts], the UTF-8 bytes of each text."""
    return np.diff(word_tokenizer.buffers(texts)[1])


def _chunks(texts: pa.Array) -> Iterator[pa.Array]:
    ends = np.cumsum(text_bytes(texts))
    begin = 0
    while begin < len(texts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _CHUNK_BYTES, side="right")))
        yield texts[begin:end]
        begin = end
