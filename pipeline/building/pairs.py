"""Tokenizes and writes batches of pairs, and leaves out those that cannot be used.

A side that is too long, in bytes or in tokens, is cut at its end or makes the pair one that is left
out, as the plan says. A pair is never split into several: half of a question has no answer.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.building.write import ShardWriter
from pipeline.tokenizer import tokenize
from tasks.cache.manifest import PairLimits
from tasks.cache.pack import Pairs
from tasks.reading import long_documents
from tasks.reading.pairs import SIDES
from tasks.vocabulary import Vocabulary

# Reasons to quarantine a pair besides the problems of reading it.
SENTINEL = "contains a sentinel such as <extra_id_0>"  # which objectives could not tell from theirs
SPECIAL = "contains a special token such as {}"  # which would end the text, or pad it
EMPTY = {side: f"empty {side}" for side in SIDES}  # nothing is left after normalisation
LONG = {side: f"{side} too long" for side in SIDES}
# None of these is a fault of the corpus.
NOT_FAULTY = frozenset((*EMPTY.values(), *LONG.values()))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a side.

    Attributes:
      tokens: most tokens of each side without EOS, by side; 0 for no limit.
      bytes: most bytes of UTF-8 that are tokenized.
      cut: whether longer sides are cut; if not, their pairs are left out.
    """

    tokens: dict[str, int]
    bytes: int
    cut: bool

    @classmethod
    def of(cls, pairs: PairLimits, max_bytes: int) -> "Limits":
        """Returns the limits of a plan, whose numbers of tokens include an EOS."""
        most = {"inputs": pairs.max_inputs, "targets": pairs.max_targets}
        tokens = {side: limit - 1 if limit else 0 for side, limit in most.items()}
        return cls(tokens, max_bytes, pairs.too_long == "cut")


def spelt_reason(vocabulary: Vocabulary) -> str:
    """Returns the reason to quarantine a text that spells one of `Vocabulary.reserved`."""
    if vocabulary.is_sentencepiece:
        return SENTINEL
    return SPECIAL.format(vocabulary.piece(vocabulary.special.eos))


class _Side(NamedTuple):
    """One side of a batch: its tokens, how many each pair has, and bool [pairs] facts."""

    tokens: np.ndarray
    lengths: np.ndarray
    spelt: np.ndarray
    long: np.ndarray
    bytes: np.ndarray


def write(
    batch: pa.RecordBatch,
    writer: ShardWriter,
    vocabulary: Vocabulary,
    tokenizer: tokenize.Tokenizer,
    limits: Limits,
) -> Counter[str]:
    """Writes a batch of `tasks.reading.pairs`; returns counts for the job's metrics."""
    sides = {
        name: _tokenized(batch.column(name), vocabulary, tokenizer, limits, limits.tokens[name])
        for name in SIDES
    }
    reasons = np.full(batch.num_rows, None, object)
    for name, side in sides.items():
        empty = (side.lengths == 0) & ~side.spelt
        for reason, holds in (
            (LONG[name], side.long if not limits.cut else np.zeros_like(side.long)),
            (spelt_reason(vocabulary), side.spelt),
            (EMPTY[name], empty),
        ):
            reasons[holds & (reasons == None)] = reason  # noqa: E711
    problems = np.array(batch.column("problem").to_pylist(), object)
    reasons = np.where(problems == None, reasons, problems)  # noqa: E711
    kept = reasons == None  # noqa: E711
    ids, places = batch.column("id"), batch.column("place")
    for number in np.flatnonzero(~kept).tolist():
        writer.quarantine(ids[number].as_py(), places[number].as_py(), reasons[number])
    chosen = {name: _chosen(side, kept) for name, side in sides.items()}
    text_bytes = int(sum(side.bytes[kept].sum() for side in sides.values()))
    writer.add_pairs(
        Pairs(ids.filter(pa.array(kept)), *chosen["inputs"], *chosen["targets"]),
        text_bytes,
        *(int((side.long & kept).sum()) for side in sides.values()),
    )
    return Counter(
        documents=int(kept.sum()),
        quarantined=int((~kept).sum()),
        tokens=sum(len(tokens) for tokens, _ in chosen.values()),
        text_bytes=text_bytes,
    )


def _tokenized(
    texts: pa.Array,
    vocabulary: Vocabulary,
    tokenizer: tokenize.Tokenizer,
    limits: Limits,
    most: int,
) -> _Side:
    """Tokenizes one side, cut to `most` tokens if that is not 0."""
    texts = texts.fill_null("") if texts.null_count else texts
    long = tokenize.text_bytes(texts) > limits.bytes
    if long.any():
        texts = pa.array(
            [_beginning(text.as_py(), limits) if cut else text.as_py()
             for text, cut in zip(texts, long.tolist(), strict=True)],
            texts.type,
        )  # fmt: skip
    tokens, lengths = tokenizer.encode(texts)
    tokens, lengths, spelt = tokenize.without_sentinels(vocabulary, tokens, lengths)
    if most and (lengths > most).any():
        long = long | (lengths > most)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = tokens[np.arange(len(tokens)) - starts < most]
        lengths = np.minimum(lengths, most)
    # The tokenizer overwrites its buffer for the other side.
    return _Side(tokens.copy(), lengths.copy(), spelt, long, tokenize.text_bytes(texts))


def _beginning(text: str, limits: Limits) -> str:
    """Returns the beginning of a text of too many bytes; "" if its pair is left out anyway."""
    if not limits.cut:
        return ""
    return next(long_documents.split(long_documents.chunked(text.encode()), limits.bytes)).decode()


def _chosen(side: _Side, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, lengths) of the pairs that are kept."""
    return side.tokens[np.repeat(kept, side.lengths)], side.lengths[kept]
