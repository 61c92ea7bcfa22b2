"""Tokenizes and writes batches of pairs, and leaves out those that cannot be used.

A side that is too long, in bytes or in tokens, is cut at its end, or its pair is left out or split
into several, as the plan says. The first of these has the first stretch of the long side and all of
the other one, the second has the second stretch, and so on; of two long sides the stretches go
together, and the side with fewer repeats its last. So every token is in a pair.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.building.write import ShardWriter
from pipeline.excluding.filter import Filter
from pipeline.tokenizer import tokenize
from tasks.cache.manifest import CUT, QUARANTINE, SPLIT, PairLimits
from tasks.cache.pack import Pairs
from tasks.reading import long_documents
from tasks.unit import SIDES
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
      too_long: what becomes of pairs with longer sides, one of TOO_LONG.
    """

    tokens: dict[str, int]
    bytes: int
    too_long: str

    @classmethod
    def of(cls, pairs: PairLimits, max_bytes: int) -> "Limits":
        """Returns the limits of a plan, whose numbers of tokens include an EOS."""
        most = {"inputs": pairs.max_inputs, "targets": pairs.max_targets}
        tokens = {side: limit - 1 if limit else 0 for side, limit in most.items()}
        return cls(tokens, max_bytes, pairs.too_long)


def spelt_reason(vocabulary: Vocabulary) -> str:
    """Returns the reason to quarantine a text that spells one of `Vocabulary.reserved`."""
    if vocabulary.is_sentencepiece:
        return SENTINEL
    return SPECIAL.format(vocabulary.piece(vocabulary.special.eos))


class _Side(NamedTuple):
    """One side of a batch.

    Attributes:
      tokens: int32, those of all pairs, concatenated.
      lengths: int64 [stretches], how many each stretch has.
      stretches: int64 [pairs], how many stretches each pair has: 1 unless it is split.
      spelt, long: bool [pairs], whether it spells a special token, and whether it is too long.
      failures: number of a pair -> why a user's class cannot encode the side.
      bytes: int64 [pairs], bytes of its text.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stretches: np.ndarray
    spelt: np.ndarray
    long: np.ndarray
    bytes: np.ndarray
    failures: dict[int, str]

    @property
    def totals(self) -> np.ndarray:
        """Number of tokens of each pair, int64 [pairs]."""
        return _sums(self.lengths, self.stretches)


def write(
    batch: pa.RecordBatch,
    writer: ShardWriter,
    vocabulary: Vocabulary,
    tokenizer: tokenize.Tokenizer,
    limits: Limits,
    excluding: Filter | None = None,
) -> Counter[str]:
    """Writes a batch of `tasks.reading.pairs`; returns counts for the job's metrics.

    `excluding` leaves out parts of split pairs; of whole pairs, the batch has no listed ones.
    """
    sides = {
        name: _tokenized(batch.column(name), vocabulary, tokenizer, limits, limits.tokens[name])
        for name in SIDES
    }
    reasons = np.full(batch.num_rows, None, object)
    for name, side in sides.items():
        empty = (side.totals == 0) & ~side.spelt
        for reason, holds in (
            (LONG[name], side.long & (limits.too_long == QUARANTINE)),
            (spelt_reason(vocabulary), side.spelt),
            (EMPTY[name], empty),
        ):
            reasons[holds & (reasons == None)] = reason  # noqa: E711
        for number, failure in side.failures.items():
            if reasons[number] in (None, EMPTY[name]):
                reasons[number] = failure
    problems = np.array(batch.column("problem").to_pylist(), object)
    reasons = np.where(problems == None, reasons, problems)  # noqa: E711
    kept = reasons == None  # noqa: E711
    ids, places = batch.column("id"), batch.column("place")
    for number in np.flatnonzero(~kept).tolist():
        writer.quarantine(ids[number].as_py(), places[number].as_py(), reasons[number])
    text_bytes = int(sum(side.bytes[kept].sum() for side in sides.values()))
    cut = [int((side.long & kept).sum()) * (limits.too_long == CUT) for side in sides.values()]
    split = np.maximum(*(side.stretches for side in sides.values()))[kept]
    chosen = {name: _chosen(side, kept, split) for name, side in sides.items()}
    names = _numbered(ids.filter(pa.array(kept)), split)
    left_out = 0
    if excluding and (split > 1).any():
        of_parts = np.repeat(np.array(places.to_pylist(), object)[kept], split)
        there = _unlisted(names, of_parts, excluding, writer)
        left_out = int((~there).sum())
        names = names.filter(pa.array(there))
        chosen = {name: _of_rows(*side, there) for name, side in chosen.items()}
    made = Pairs(names, *chosen["inputs"], *chosen["targets"])
    writer.add_pairs(made, text_bytes, cut[0], cut[1], split=int((split > 1).sum()))
    return Counter(
        documents=len(names),
        quarantined=int((~kept).sum()) + left_out,
        tokens=sum(len(tokens) for tokens, _ in chosen.values()),
        text_bytes=text_bytes,
    )


def _unlisted(
    names: pa.Array, places: np.ndarray, excluding: Filter, writer: ShardWriter
) -> np.ndarray:
    """Returns bool[names], which parts of pairs no list has; `writer` records the others."""
    there = np.ones(len(names), bool)
    for row, reason in excluding.reasons(names.to_pylist()).items():
        there[row] = False
        writer.quarantine(names[row].as_py(), places[row], reason)
    return there


def _of_rows(
    tokens: np.ndarray, lengths: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and lengths of those rows for which bool[rows] holds."""
    return tokens[np.repeat(rows, lengths)], lengths[rows]


def _tokenized(
    texts: pa.Array,
    vocabulary: Vocabulary,
    tokenizer: tokenize.Tokenizer,
    limits: Limits,
    most: int,
) -> _Side:
    """Tokenizes one side, cut or split to `most` tokens if that is not 0."""
    texts = texts.fill_null("") if texts.null_count else texts
    sizes = tokenize.text_bytes(texts)
    long = sizes > limits.bytes
    parts = np.ones(len(texts), np.int64)
    if long.any():
        parted = [
            _parts(text.as_py(), limits) if is_long else [text.as_py()]
            for text, is_long in zip(texts, long.tolist(), strict=True)
        ]
        parts = np.array(list(map(len, parted)), np.int64)
        texts = pa.array([part for each in parted for part in each], texts.type)
        sizes = _sums(tokenize.text_bytes(texts), parts)
    tokens, lengths = tokenizer.encode(texts)
    of_parts = np.repeat(np.arange(len(parts)), parts)
    failures = {int(of_parts[number]): why for number, why in tokenizer.failures.items()}
    tokens, lengths, spelt = tokenize.without_sentinels(vocabulary, tokens, lengths)
    # The tokenizer overwrites its buffer for the other side.
    tokens, lengths, spelt = tokens.copy(), lengths.copy(), _sums(spelt, parts) > 0
    if len(parts) < len(lengths):
        lengths, parts = _without_empty(lengths, parts)
    if most and (lengths > most).any():
        long = long | (_sums(lengths > most, parts) > 0)
        if limits.too_long == SPLIT:
            counts = np.maximum(-(-lengths // most), 1)
            last = lengths - (counts - 1) * most
            parts = _sums(counts, parts)
            lengths = np.full(int(counts.sum()), most, np.int64)
            lengths[np.cumsum(counts) - 1] = last
        else:
            starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = tokens[np.arange(len(tokens)) - starts < most]
            lengths = np.minimum(lengths, most)
    return _Side(tokens, lengths, parts, spelt, long, sizes, failures)


def _parts(text: str, limits: Limits) -> list[str]:
    """Returns what is tokenized of a text of too many bytes: "" if its pair is left out anyway."""
    if limits.too_long == QUARANTINE:
        return [""]
    parts = long_documents.split(long_documents.chunked(text.encode()), limits.bytes)
    if limits.too_long == CUT:
        return [next(parts).decode()]
    return [part.decode() for part in parts if part.strip()] or [""]


def _without_empty(lengths: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `lengths` and `parts` without empty parts; a side of only empty parts keeps one.

    Parts are empty where normalisation deletes every character.
    """
    kept = lengths > 0
    kept[(np.cumsum(parts) - parts)[_sums(lengths, parts) == 0]] = True
    return lengths[kept], _sums(kept, parts)


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the sum of each of consecutive groups of `counts` values, one or more, int64."""
    values = np.asarray(values, np.int64)
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(values) else values


def _numbered(ids: pa.Array, split: np.ndarray) -> pa.Array:
    """Returns the ids of pairs that become `split` pairs each: ID, ID#part2, and so on."""
    if (split == 1).all():
        return ids
    names = [
        name if number == 1 else f"{name}#part{number}"
        for name, count in zip(ids.to_pylist(), split.tolist(), strict=True)
        for number in range(1, count + 1)
    ]
    return pa.array(names, pa.string())


def _chosen(side: _Side, kept: np.ndarray, split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, lengths) of the pairs that are kept, of which `split` each are made."""
    if (side.stretches == 1).all() and (split == 1).all():
        return _of_rows(side.tokens, side.lengths, kept)
    counts = side.stretches[kept]
    firsts = (np.cumsum(side.stretches) - side.stretches)[kept]
    number = np.arange(int(split.sum())) - np.repeat(np.cumsum(split) - split, split)
    taken = np.repeat(firsts, split) + np.minimum(number, np.repeat(counts - 1, split))
    lengths = side.lengths[taken]
    begins = (np.cumsum(side.lengths) - side.lengths)[taken]
    shifts = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return side.tokens[np.arange(int(lengths.sum())) + shifts], lengths
