"""Tokenizes and writes batches of documents (texts or pairs) and quarantines unusable ones.

A pair with a side that has too many bytes or tokens is cut, left out or split, as the plan says. If
both sides are split, stretches are matched in order, and the side with fewer stretches repeats its
last one; a short side is in every part. Long texts are already split when read.
"""

import dataclasses
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.building import lost_text
from pipeline.building.rows import sums
from pipeline.building.write import ShardWriter
from pipeline.exclusion.filter import Filter
from pipeline.exclusion.lists import EXCLUDED
from pipeline.tokenizer import tokenize
from pipeline.tokenizer.spelling import Speller
from tasks import arrow
from tasks.cache.filtered import FILTERED
from tasks.cache.manifest import (
    CUT,
    KEEP,
    QUARANTINE,
    SENTINELS,
    SPECIAL_TOKENS,
    SPLIT,
    TEXT,
    Plan,
)
from tasks.cache.pack import Documents, Pairs
from tasks.document_kind import SIDES, DocumentKind
from tasks.reading import long_documents
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import Vocabulary

# Reasons to quarantine a document, other than problems with reading it.
SENTINEL = "contains a sentinel such as <extra_id_0>"  # objectives add such tokens themselves
SPECIAL = "contains the special token {}"  # it would end or pad the text
# Pattern of a reason -> flags that keep its documents.
KEPT_BY = {
    re.compile("empty targets"): "--empty_targets=keep",
    re.compile(re.escape(SENTINEL)): "--sentinels=keep (pairs) or --sentinels=text",
    re.compile(SPECIAL.format(".*")): "--special_tokens=text",
}
# Edits that --sentinels and --special_tokens choose.
_EDITS = {SENTINELS: {KEEP: "kept sentinels", TEXT: "sentinels as text"},
          SPECIAL_TOKENS: {TEXT: "special tokens as text"}}  # fmt: skip
# Nothing remains after normalisation.
EMPTY = {"text": "empty", **{side: f"empty {side}" for side in SIDES}}
LONG = {side: f"{side} too long" for side in SIDES}
_NOT_FAULTY = frozenset((EMPTY["text"], *LONG.values()))


def is_fault(reason: str) -> bool:
    """Returns whether a reason means a fault of the corpus, not an empty document or a choice."""
    return reason not in _NOT_FAULTY and not reason.startswith((EXCLUDED, FILTERED))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the columns of a batch; 0 means none."""

    tokens: dict[str, int]  # maximum tokens of each column, excluding EOS
    bytes: int = 0  # maximum UTF-8 bytes to tokenize
    too_long: str = ""  # treatment of longer documents, one of TOO_LONG; "" without limits
    may_be_empty: tuple[str, ...] = ()  # names of columns

    @classmethod
    def of(cls, plan: Plan, max_bytes: int) -> "Limits":
        """Returns the limits of a plan, whose token limits include EOS."""
        if not plan.pairs:
            return cls(dict.fromkeys(plan.unit.columns, 0))
        most = {"inputs": plan.pairs.max_inputs, "targets": plan.pairs.max_targets}
        tokens = {side: limit - 1 if limit else 0 for side, limit in most.items()}
        empty = (SIDES[1],) if plan.pairs.empty_targets == KEEP else ()
        return cls(tokens, max_bytes, plan.pairs.too_long, empty)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A vocabulary and what applies it to texts; `speller` is set if the plan has a `Spelling`."""

    vocabulary: Vocabulary
    tokenizer: tokenize.Tokenizer
    limits: Limits
    speller: Speller | None = None


class _Column(NamedTuple):
    """The tokens of a column of a batch."""

    tokens: np.ndarray  # int32, all documents concatenated
    lengths: np.ndarray  # int64 [stretches], tokens per stretch
    stretches: np.ndarray  # int64 [documents], stretches per document, 1 unless split
    spelt: np.ndarray  # int64 [documents], the first special token that it contains; -1 for none
    long: np.ndarray  # bool [documents], is too long
    bytes: np.ndarray  # int64 [documents], UTF-8 bytes
    sizes: lost_text.Sizes
    failures: dict[int, str]  # index of a document -> why it cannot be encoded
    kept: dict[str, np.ndarray]  # SENTINELS or SPECIAL_TOKENS -> bool [documents], kept as chosen

    @property
    def totals(self) -> np.ndarray:
        return sums(self.lengths, self.stretches)


def write(
    batch: pa.RecordBatch,
    writer: ShardWriter,
    reader: Reader,
    excluding: Filter | None = None,
) -> Counter[str]:
    """Writes a batch; `excluding` drops parts of split pairs. Returns counts for metrics."""
    limits = reader.limits
    columns = {
        name: _tokenized(batch.column(name), reader, most) for name, most in limits.tokens.items()
    }
    reasons, found = _reasons(batch, columns, reader)
    kept = reasons == None  # noqa: E711
    ids, places = batch.column("id"), batch.column("place")
    for number in np.flatnonzero(~kept).tolist():
        at = places[number].as_py()
        writer.quarantine(ids[number].as_py(), at, reasons[number], found.get(number))
    for name, choice in reader.speller.choices.items() if reader.speller else ():
        edited = np.logical_or.reduce([column.kept[name] for column in columns.values()]) & kept
        if edited.any():
            writer.edits[_EDITS[name][choice]] += int(edited.sum())
    text_bytes = int(sum(column.bytes[kept].sum() for column in columns.values()))
    cut = {
        name: int((each.long & kept).sum()) * (limits.too_long == CUT)
        for name, each in columns.items()
    }
    split = np.maximum.reduce([column.stretches for column in columns.values()])[kept]
    chosen = {name: _chosen(each, kept, split) for name, each in columns.items()}
    names = _numbered(ids if kept.all() else ids.filter(arrow.of_mask(kept)), split)
    documents_R, left_out = np.repeat(np.flatnonzero(kept), split), 0
    if excluding and (split > 1).any():
        of_parts = np.repeat(np.array(places.to_pylist(), object)[kept], split)
        there = np.ones(len(names), bool)
        for row, reason in excluding.reasons(names.to_pylist()).items():
            there[row] = False
            writer.quarantine(names[row].as_py(), of_parts[row], reason)
        left_out = int((~there).sum())
        names = names.filter(arrow.of_mask(there))
        chosen = {name: _of_rows(*each, there) for name, each in chosen.items()}
        documents_R = documents_R[there]
    for name, each in columns.items():
        writer.lose(
            name, lost_text.of_rows(each.sizes, chosen[name], documents_R, reader.vocabulary)
        )
    if writer.unit is DocumentKind.PAIR:
        made: Documents | Pairs = Pairs(names, *chosen["inputs"], *chosen["targets"])
    else:
        made = Documents(names, *chosen["text"])
    # Reading splits long texts and numbers their parts from 1.
    firsts = (arrow.numbers(batch.column("part")) == 1) & kept
    writer.add(made, text_bytes, int((split > 1).sum() + firsts.sum()), cut)
    return Counter(
        documents=len(names),
        quarantined=int((~kept).sum()) + left_out,
        tokens=sum(len(tokens) for tokens, _ in chosen.values()),
        text_bytes=text_bytes,
    )


def _reasons(
    batch: pa.RecordBatch, columns: dict[str, _Column], reader: Reader
) -> tuple[np.ndarray, dict[int, dict[str, object]]]:
    """Returns (object [documents]: why each document is unusable, or None; tokens and places).

    The latter has, by document, the special token that a document spells, and its place.
    """
    problems = batch.column("problem")
    reasons = np.full(batch.num_rows, None, object)
    vocabulary, limits, found = reader.vocabulary, reader.limits, dict[int, dict[str, object]]()
    if problems.null_count < len(problems):
        reasons[:] = problems.to_pylist()
    for name, each in columns.items():
        new = reasons == None  # noqa: E711
        for reason, holds in (
            (LONG.get(name), each.long & (limits.too_long == QUARANTINE)),
            (SENTINEL, each.spelt >= 0),
            (
                EMPTY[name],
                (each.totals == 0) & (each.spelt < 0) & (name not in limits.may_be_empty),
            ),
        ):
            holds = holds & new
            reasons[holds], new[holds] = reason, False
            for number in np.flatnonzero(holds).tolist() if reason is SENTINEL else ():
                token = int(each.spelt[number])
                piece = vocabulary.piece(token).removeprefix(SPACE)
                place = batch.column(name)[number].as_py().find(piece)
                found[number] = {"token": piece, "character": place} if place >= 0 else {}
                if token < vocabulary.first_sentinel:
                    reasons[number] = SPECIAL.format(piece)
        for number, failure in each.failures.items():
            if reasons[number] in (None, EMPTY[name]):
                reasons[number] = failure
    return reasons, found


_Tokens = tuple[np.ndarray, np.ndarray]  # all ids, and the number of ids per stretch


def _of_rows(tokens: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> _Tokens:
    if rows.all():
        return tokens, lengths
    return tokens[np.repeat(rows, lengths)], lengths[rows]


def _tokenized(texts: pa.Array, reader: Reader, most: int) -> _Column:
    """Tokenizes a column; if `most` is not 0, cuts or splits its texts to that many tokens."""
    limits, tokenizer, kept = reader.limits, reader.tokenizer, dict[str, np.ndarray]()
    texts = texts.fill_null("") if texts.null_count else texts
    sizes = tokenize.text_bytes(texts)
    long = sizes > (limits.bytes or np.inf)
    parts = np.ones(len(texts), np.int64)
    if long.any():
        parted = [
            _parts(text.as_py(), limits) if is_long else [text.as_py()]
            for text, is_long in zip(texts, long.tolist(), strict=True)
        ]
        parts = np.array(list(map(len, parted)), np.int64)
        texts = pa.array([part for each in parted for part in each], texts.type)
        sizes = sums(tokenize.text_bytes(texts), parts)
    tokens, lengths = tokenizer.encode(texts)
    of_parts = np.repeat(np.arange(len(parts)), parts)
    failures = {int(of_parts[number]): why for number, why in tokenizer.failures.items()}
    keeps = False
    if reader.speller:
        tokens, lengths, here, why = reader.speller(texts, tokens, lengths)
        failures |= {int(of_parts[number]): text for number, text in why.items()}
        kept = {name: sums(each, parts) > 0 for name, each in here.items()}
        keeps = reader.speller.choices[SENTINELS] == KEEP
    tokens, lengths, spelt = tokenize.without_special(reader.vocabulary, tokens, lengths, keeps)
    if len(limits.tokens) > 1:  # the next column overwrites the tokenizer's buffer
        tokens, lengths = tokens.copy(), lengths.copy()
    measure = tokenizer.normalised_bytes
    of_text = lost_text.of_texts(texts, tokens, lengths, reader.vocabulary, measure)
    lost = sums(of_text, parts)
    whole = None
    if len(parts) < len(lengths) or (most and (lengths > most).any()):
        whole = lost_text.counted(tokens, sums(lengths, parts), reader.vocabulary)
    if len(parts) < len(lengths):
        spelt = np.maximum.reduceat(spelt, np.cumsum(parts) - parts)
        # Drop stretches without tokens, except the first one of a side that has no tokens at all.
        filled = lengths > 0
        filled[(np.cumsum(parts) - parts)[sums(lengths, parts) == 0]] = True
        lengths, parts = lengths[filled], sums(filled, parts)
    if most and (lengths > most).any():
        long = long | (sums(lengths > most, parts) > 0)
        if limits.too_long == SPLIT:
            counts = np.maximum(-(-lengths // most), 1)
            last = lengths - (counts - 1) * most
            parts = sums(counts, parts)
            lengths = np.full(int(counts.sum()), most, np.int64)
            lengths[np.cumsum(counts) - 1] = last
        else:
            starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = tokens[np.arange(len(tokens)) - starts < most]
            lengths = np.minimum(lengths, most)
    measured = lost_text.Sizes(sizes, lost, whole)
    return _Column(tokens, lengths, parts, spelt, long, sizes, measured, failures, kept)


def _parts(text: str, limits: Limits) -> list[str]:
    """Returns the parts of an overlong text to tokenize; [""] if its pair is left out."""
    if limits.too_long == QUARANTINE:
        return [""]
    parts = long_documents.split(long_documents.chunked(text.encode()), limits.bytes)
    if limits.too_long == CUT:
        return [next(parts).decode()]
    return [part.decode() for part in parts if part.strip()] or [""]


def _numbered(ids: pa.Array, split: np.ndarray) -> pa.Array:
    """Returns the ids of the `split` pairs made from each pair."""
    if (split == 1).all():
        return ids
    names = [
        name if number == 1 else f"{name}#part{number}"
        for name, count in zip(ids.to_pylist(), split.tolist(), strict=True)
        for number in range(1, count + 1)
    ]
    return arrow.of_names(names)


def _chosen(column: _Column, kept: np.ndarray, split: np.ndarray) -> _Tokens:
    """Returns the kept documents' (tokens, lengths), each repeated or cut into `split` parts."""
    if (column.stretches == 1).all() and (split == 1).all():
        return _of_rows(column.tokens, column.lengths, kept)
    counts = column.stretches[kept]
    firsts = (np.cumsum(column.stretches) - column.stretches)[kept]
    number = np.arange(int(split.sum())) - np.repeat(np.cumsum(split) - split, split)
    taken = np.repeat(firsts, split) + np.minimum(number, np.repeat(counts - 1, split))
    lengths = column.lengths[taken]
    begins = (np.cumsum(column.lengths) - column.lengths)[taken]
    shifts = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return column.tokens[np.arange(int(lengths.sum())) + shifts], lengths
