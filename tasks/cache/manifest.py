"""The manifest of a cache: its plan, its shards and their checksums.

A cache is one folder:

    train.tfrecord-00003-of-00016     rows, readable by stock seqio
    train.rows-00003-of-00016.npy     index: byte offset and number of tokens of each row
    train.documents-00003-of-00016.parquet   lineage: position of each document
    train.quarantine-00003-of-00016.jsonl    rejected documents and reasons (if any)
    train.receipt-00003-of-00016.json        written last: sizes, checksums and counts of the above,
                                             and the plan's fingerprint
    info.train.json stats.train.json COMPLETED   for stock seqio
    sentencepiece.model or tokenizer.json    the vocabulary: a cache is self-contained
    exclude-SHA256.arrow              lists of excluded documents (if any)
    plan.json                         written before the first shard: the cache to be built
    .plan-SHA256                      its name is the plan's fingerprint; empty, or, while receipts
                                      are renamed, the fingerprint of the plan before
    .before-SHA256                    folder with an earlier manifest and lineage, after a takedown
    manifest.json                     written last: the cache that was built
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tasks import annexes
from tasks.cache.adopted import PROGRAMS, RAGGED_INDEX, AdoptedCounts, Adoption
from tasks.cache.checked_json import (
    RESTORE,
    check_count,
    check_form,
    check_keys,
    checked,
    differences,
    wrong,
)
from tasks.cache.checked_json import as_json as as_json
from tasks.cache.filtered import ExcludeRecord, FilterRecord
from tasks.document_kind import DocumentKind
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import NEW_LAW, OLD_LAW
from tasks.vocabulary import VOCABULARY_FILES, VocabularyRecord

FORMAT = 1
PLAN = "plan.json"
PLAN_MARK = ".plan-"
MANIFEST = "manifest.json"
# List of a task's languages, each with its own cache; see `language_set`.
LANGUAGES = "languages.json"
# Not a way to pack texts: a row is a pair of inputs and targets.
PAIRS = "pairs"
TEXT_PACKINGS = ("concat", "best_fit")
# Rows of any length, each one window; only other programs write them.
ROWS = "rows"
# Keys of `Shard.lost`, after a column's name.
TOKENS, BYTES, ALONE = "tokens", "bytes", "documents"
PACKINGS = (*TEXT_PACKINGS, PAIRS, ROWS)
SEPARATORS = ("none", "eos")

# Row index, one element per row. `offset`: bytes from the start of the shard to the record's
# framing; `tokens`: length of `targets`; `documents`: number of document pieces that begin in
# earlier rows of the shard, i.e. the index of this row's first entry in the lineage table.
ROW_INDEX = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("documents", "<u4")])
# Row index of pairs: `tokens` counts both sides, `inputs` only the inputs.
PAIR_INDEX = np.dtype([*ROW_INDEX.descr, ("inputs", "<u4")])
INDICES = (ROW_INDEX, PAIR_INDEX, RAGGED_INDEX)
# Treatment of a pair with a side longer than allowed.
TOO_LONG = QUARANTINE, CUT, SPLIT = "quarantine", "cut", "split"

# Treatment of a text that spells a sentinel or another special token: left out; kept, with the
# sentinel's id; or kept, with the token as plain text.
KEEP, TEXT = "keep", "text"
SENTINELS, SPECIAL_TOKENS = "sentinels", "special_tokens"
SPELLINGS = {SENTINELS: (QUARANTINE, KEEP, TEXT), SPECIAL_TOKENS: (QUARANTINE, TEXT)}

# Columns of the lineage table, one row per document piece. A piece is the whole document, except
# that best_fit cuts documents longer than a row. `id`: the document's id in its corpus; `row`,
# `position`: where the piece begins; `tokens`: its length, including the separator;
# `document_offset`: number of the document's tokens before the piece.
LINEAGE_COLUMNS = ("id", "row", "position", "tokens", "document_offset")


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size of a cache file in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class PairCounts:
    """Counts for a shard of pairs, in tokens without EOS, which readers add.

    `cut_inputs` and `cut_targets` count the pairs in which that side was cut.
    """

    inputs_tokens: int
    longest_inputs: int
    longest_targets: int
    cut_inputs: int
    cut_targets: int
    # UTF-8 bytes of the kept text; None in caches of older releases.
    inputs_bytes: int | None = None
    targets_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class PairLimits:
    """Maximum tokens per side of a pair, with EOS (0: no limit); `too_long` is one of TOO_LONG."""

    max_inputs: int
    max_targets: int
    too_long: str
    empty_targets: str | None = None  # KEEP; None if pairs without targets are left out


@dataclasses.dataclass(frozen=True)
class Spelling:
    """Treatment of texts that spell a sentinel or a special token, as in SPELLINGS."""

    sentinels: str
    special_tokens: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished shard of a cache."""

    files: dict[str, FileEntry]  # file name -> its size and checksum
    rows: int
    tokens: int  # number of tokens, including separators
    documents: int  # number of documents, counting each part of a split document
    text_bytes: int  # UTF-8 bytes of the kept documents
    dropped: dict[str, int]  # reason -> number of rejected documents
    text_tokens: int  # number of tokens without separators
    longest_row: int  # maximum number of `text_tokens` in a row
    split_documents: int  # number of documents split because of their length
    pairs: PairCounts | None = None  # counts of pairs; None for texts
    adopted: AdoptedCounts | None = None  # counts for another program's file; None for ours
    cut_paragraphs: int | None = None  # number of paragraphs cut from documents; None if none
    edits: dict[str, int] | None = None  # edit made by filters -> number of times; None if none
    unknown_tokens: int | None = None  # None if none, and in caches of older releases
    # What the vocabulary cannot spell, under "COLUMN WHAT": unknown TOKENS, the BYTES of text that
    # they stand for, and the documents that hold them ALONE; None if there is nothing.
    lost: dict[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Advice on a missing file (`again`) or a damaged one (`redo`, placed after its name)."""

    again: str
    redo: str


_BUILT = Remedy(
    "run pipeline.build again",
    "delete the file and run pipeline.build again, which redoes only that shard",
)
_ADOPTED = Remedy(
    "restore it, or adopt the cache again",
    "restore the file, or adopt the cache again if it was changed on purpose",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that determines the bytes of a cache's shards: equal plans write equal bytes."""

    task: str
    # Spec, pinned revision, column and files with their sizes and checksums or etags.
    corpus: dict[str, Any]
    vocabulary: VocabularyRecord
    packing: str
    row_tokens: int  # maximum row length; 0 for pairs, whose rows are as long as the pair
    separator: str
    shards: dict[str, int]
    format: int = FORMAT
    pairs: PairLimits | None = None  # limits of pairs; None for texts
    adopted: Adoption | None = None  # set if another program wrote the cache
    # Lists of documents to leave out, in the given order; None if none.
    exclude: tuple[ExcludeRecord, ...] | None = None
    filters: tuple[FilterRecord, ...] | None = None  # rules that judge documents; None if none
    spelling: Spelling | None = None  # None if texts that spell special tokens are left out
    # NEW_LAW if a unigram vocabulary was encoded by it; None for OLD_LAW and other vocabularies.
    sentencepiece_law: str | None = None

    @property
    def unit(self) -> DocumentKind:
        return DocumentKind.PAIR if self.packing == PAIRS else DocumentKind.TEXT

    @property
    def law(self) -> str:
        """The law that encodes a unigram vocabulary, one of sentencepiece_model.LAWS."""
        return self.sentencepiece_law or OLD_LAW

    @property
    def remedy(self) -> Remedy:
        return _ADOPTED if self.adopted else _BUILT

    @property
    def rows_are_windows(self) -> bool:
        """True if a window is a row; False if windows are cut from a stream of rows."""
        return self.packing != "concat"

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the bytes of the shards.

        Excludes the task's name (so that equal tasks share a cache), the note on files left out of
        the corpus, and the location of another program's records.
        """
        value = as_json(self)
        del value["task"]
        value["corpus"].pop("left_out", None)
        value.get("adopted", {}).pop("folder", None)
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def file_names(self) -> frozenset[str]:
        """Names of the corpus's files."""
        return frozenset(file["name"] for file in self.corpus.get("files", ()))

    @property
    def generations(self) -> list[list[str]]:
        """Names of the corpus's files, grouped by build: the first build, then each extension."""
        names = [file["name"] for file in self.corpus.get("files", ())]
        ends = list(itertools.accumulate(self.corpus.get("generations", [len(names)])))
        return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def difference(self, other: "Plan") -> list[str]:
        return differences(as_json(self), as_json(other))


def cache_names(cache_dir: str) -> list[str]:
    """Returns the names of the finished caches in `cache_dir`."""
    names = files.list_names(cache_dir) if cache_dir else []
    return [name for name in names if files.exists(files.join(cache_dir, name, MANIFEST))]


def _holds(folder: str) -> str:
    if caches := cache_names(folder):
        some = ", ".join(caches[:5]) + (f" and {len(caches) - 5:,} more" * (len(caches) > 5))
        return f"is not a cache but holds {some}: name one, such as {files.join(folder, caches[0])}"
    for name in files.list_names(folder):
        if name == LANGUAGES:
            return "lists languages, each with its own cache beside it: name one of those"
        if name.startswith("info.") or name.endswith(".idx"):
            program = "seqio" if name.startswith("info.") else "Megatron"
            return f"is a cache of {program}{annexes.advice('foreign_cache')}"
    return "holds no cache: build one with pipeline.build"


@dataclasses.dataclass(frozen=True)
class CacheManifest:
    """A finished cache: its plan, its shards by split, and the software versions that wrote it.

    During a build it has only the first shards of each split (`following`).
    """

    plan: Plan
    splits: Mapping[str, Sequence[Shard]]
    software: dict[str, str]

    @classmethod
    def load(cls, folder: str, check: bool = True) -> "CacheManifest":
        """Reads manifest.json; raises UserError if it is missing, damaged or in a different format.

        `check` also verifies that its parts agree and that it was not edited.
        """
        path = files.join(folder, MANIFEST)
        if not files.exists(path):
            planned = files.exists(files.join(folder, PLAN))
            state = "is unfinished: run pipeline.build again" if planned else _holds(folder)
            raise UserError(f"{folder} {state} (there is no {MANIFEST})")
        value = files.read_json(path)
        seal = value.pop(_SEAL, None) if isinstance(value, dict) else None
        try:
            check_keys(value, "the manifest", {"plan", "splits", "software"})
            plan, splits = plan_from_dict(value["plan"]), {}
            for split, shards in check_form(value["splits"], dict, "splits", "an object").items():
                check_form(shards, list, f"splits.{split}", "a list of shards")
                names = (f"{split} shard {index}" for index in itertools.count())
                splits[split] = tuple(map(shard_from_dict, shards, names))
            manifest = cls(
                plan, splits, check_form(value["software"], dict, "software", "an object")
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        for problem in manifest.contradictions() if check else ():
            raise UserError(f"{path}: {problem}; {RESTORE}")
        if check and seal != sealed(value)[_SEAL]:
            raise UserError(f"{path} is not what was written: {RESTORE}")
        return manifest

    def content(self) -> bytes:
        """Returns the content of manifest.json, with a SHA-256 of everything else in it."""
        return files.json_bytes(sealed(as_json(self)))

    def contradictions(self) -> Iterator[str]:
        counts = {split: len(shards) for split, shards in self.splits.items()}
        if counts != self.plan.shards:
            yield f"it has {counts} shards, but its plan has {self.plan.shards}"
            return
        for split, shards in self.splits.items():
            for index, shard in enumerate(shards):
                if problem := self.problem(split, index, shard):
                    yield f"{split} shard {index} {problem}"

    def problem(self, split: str, index: int, shard: Shard) -> str:
        """Returns how a shard contradicts the plan; "" if it does not."""
        if (self.plan.adopted is None) != (shard.adopted is None):
            return "is not from the same program as its plan"
        count = self.plan.shards[split]
        if self.plan.adopted:
            has = shard_file(split, "rows", index, count) in shard.files and len(shard.files) == 2
        else:
            has = set(shard.files) == shard_files(split, index, count, bool(shard.dropped))
        return self._contradiction(shard) if has else "lists the files of another shard, or too few"

    def _contradiction(self, shard: Shard) -> str:
        rows, tokens = shard.rows, shard.tokens
        if (self.plan.pairs is None) != (shard.pairs is None):
            return "has counts of pairs, or lacks them, unlike its plan"
        width = self.plan.row_tokens
        if shard.pairs:
            width = shard.pairs.longest_inputs + shard.pairs.longest_targets
        # All rows but the last are full, or each row holds at least one token.
        least = (rows - 1) * width + 1 if self.plan.packing == "concat" and rows else rows
        if shard.adopted:
            least = 0
        if not least <= tokens <= rows * width:
            return f"has {tokens:,} tokens, which do not make {rows:,} rows of {width}"
        limits = {"text_tokens": tokens, "documents": tokens, "longest_row": width}
        for name, most in {**limits, "split_documents": shard.documents}.items():
            if shard.adopted and name == "documents":  # may be empty
                continue
            if getattr(shard, name) > most:
                return f"has {name} {getattr(shard, name):,}, which can be at most {most:,}"
        return ""

    def total(self, split: str, field: str) -> int:
        """Sums an integer field ("rows", "tokens", "documents") over a split's shards."""
        return sum(getattr(shard, field) or 0 for shard in self.splits[split])

    def dropped(self, split: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for shard in self.splits[split]:
            counts.update(shard.dropped)
        return dict(counts)


_SEAL = "sha256"


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Adds a SHA-256 of all fields, serialised compactly for speed, to a JSON object."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return {**value, _SEAL: hashlib.sha256(text.encode()).hexdigest()}


def plan_from_dict(value: Any) -> Plan:
    """Parses a plan; raises UserError if it is damaged, edited or in a different format version."""
    check_form(value, dict, "the plan", "an object")
    if value.get("format") != FORMAT:
        raise UserError(
            f"the cache has format {value.get('format')}, but this version reads {FORMAT}: "
            "build it again into another folder"
        )
    plan = checked(Plan, value, "the plan", "{key}")
    _check_corpus(plan.corpus)
    for name, known in (("packing", PACKINGS), ("separator", SEPARATORS)):
        if value[name] not in known:
            raise wrong(name, value[name], "one of " + ", ".join(known))
    is_pairs = plan.packing == PAIRS
    check_count(plan.row_tokens, "row_tokens", least=0 if is_pairs or "adopted" in value else 1)
    if is_pairs != (plan.pairs is not None):
        raise wrong("pairs", value.get("pairs"), "present if, and only if, the packing is pairs")
    for split, count in plan.shards.items():
        check_count(count, f"shards.{split}", least=1)
    if plan.pairs and plan.pairs.too_long not in TOO_LONG:
        raise wrong("pairs.too_long", plan.pairs.too_long, f"one of {', '.join(TOO_LONG)}")
    if plan.pairs and plan.pairs.empty_targets not in (None, KEEP):
        raise wrong("pairs.empty_targets", plan.pairs.empty_targets, KEEP)
    for name, choices in SPELLINGS.items() if plan.spelling else ():
        if (choice := getattr(plan.spelling, name)) not in choices:
            raise wrong(f"spelling.{name}", choice, f"one of {', '.join(choices)}")
    if plan.sentencepiece_law not in (None, NEW_LAW):
        raise wrong("sentencepiece_law", plan.sentencepiece_law, f"absent or {NEW_LAW}")
    if plan.adopted and plan.adopted.program not in PROGRAMS:
        raise wrong("adopted.program", plan.adopted.program, f"one of {', '.join(PROGRAMS)}")
    if (file := plan.vocabulary.file) not in (None, *VOCABULARY_FILES):
        raise wrong("vocabulary.file", file, "one of " + ", ".join(VOCABULARY_FILES))
    return plan


def _check_corpus(corpus: dict[str, Any]) -> None:
    names = corpus.get("files", [])
    check_form(corpus.get("spec", ""), str, "corpus.spec", "a corpus SPEC")
    for file in check_form(names, list, "corpus.files", "a list of files"):
        if not (isinstance(file, dict) and isinstance(file.get("name"), str)):
            raise wrong("corpus.files", file, "files that each have a name")
    ends = corpus.get("generations", [len(names)])
    for count in check_form(ends, list, "corpus.generations", "a list of counts"):
        check_count(count, "corpus.generations")
    if sum(ends) != len(names):
        raise wrong("corpus.generations", ends, f"counts that add up to {len(names):,} files")


def shard_from_dict(value: Any, name: str = "the shard") -> Shard:
    """Parses a shard; raises UserError if it is damaged or edited. `name` is for messages."""
    shard = checked(Shard, value, name, "{key} of {name}")
    for field in ("dropped", "edits"):
        for what, count in (getattr(shard, field) or {}).items():
            check_count(count, f"{field} {what} of {name}", least=1)
    return shard


# Files of a shard, in the order they are finished; quarantine is optional.
SHARD_KINDS = ("tfrecord", "rows", "documents", "quarantine", "receipt")


def shard_file(split: str, kind: str, index: int, count: int) -> str:
    """Returns the name of a shard's file; `kind` is one of SHARD_KINDS."""
    suffix = {"rows": ".npy", "documents": ".parquet", "quarantine": ".jsonl", "receipt": ".json"}
    return f"{split}.{kind}-{index:05d}-of-{count:05d}{suffix.get(kind, '')}"


def shard_files(split: str, index: int, count: int, quarantined: bool) -> set[str]:
    """Returns the names of a shard's files, without the receipt."""
    kinds = ("tfrecord", "rows", "documents", *(("quarantine",) if quarantined else ()))
    return {shard_file(split, kind, index, count) for kind in kinds}
