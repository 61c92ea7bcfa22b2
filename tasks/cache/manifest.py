"""The manifest of a cache: its plan, its shards and their checksums.

A cache is one folder:

    train.tfrecord-00003-of-00016     rows, readable by stock seqio
    train.rows-00003-of-00016.npy     index: byte offset and number of tokens of each row
    train.documents-00003-of-00016.parquet   lineage: position of each document
    train.quarantine-00003-of-00016.jsonl    documents left out, with the reason (only if any)
    train.receipt-00003-of-00016.json        written last: sizes, checksums and counts of the above
    info.train.json stats.train.json COMPLETED   for stock seqio
    sentencepiece.model               the vocabulary, so that a cache is self-contained
    plan.json                         written first: the cache to be built
    manifest.json                     written last: the cache that was built
"""

import dataclasses
import hashlib
import itertools
import json
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VocabularyRecord

FORMAT = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
PACKINGS = ("concat", "best_fit")
SEPARATORS = ("none", "eos")

# Longer documents are split: SentencePiece needs up to 150 bytes of memory per byte of text.
LONGEST_DOCUMENT_BYTES = 256 << 10

# The row index, one element per row. `offset`: bytes from the start of the shard to the record's
# framing; `tokens`: length of `targets`; `documents`: number of pieces of documents that begin in
# earlier rows of the shard, which is the first row of the lineage table that belongs to this one.
ROW_INDEX = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("documents", "<u4")])

# Columns of the lineage table, one row per piece of a document. A piece is the whole document,
# except that best_fit cuts documents longer than a row. `id`: the document's id in its corpus;
# `row`, `position`: where the piece begins; `tokens`: its length, including the separator;
# `document_offset`: number of tokens of the document before the piece.
LINEAGE_COLUMNS = ("id", "row", "position", "tokens", "document_offset")


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size of a file of the cache, in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished shard of a cache.

    Attributes:
      files: file name -> its size and checksum.
      rows: number of rows.
      tokens: number of tokens, including separators.
      documents: number of documents, counting each part of a split document.
      text_bytes: UTF-8 bytes of the documents that were kept.
      dropped: reason -> number of documents left out.
      text_tokens: number of tokens without separators.
      longest_row: largest number of `text_tokens` in a row.
      split_documents: number of documents that were too long and were split.
    """

    files: dict[str, FileEntry]
    rows: int
    tokens: int
    documents: int
    text_bytes: int
    dropped: dict[str, int]
    text_tokens: int = 0
    longest_row: int = 0
    split_documents: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that determines the bytes of a cache's shards: equal plans write equal bytes.

    `corpus` is the resolved corpus: its spec, pinned revision, column and files with their sizes
    and checksums or etags.
    """

    task: str
    corpus: dict[str, Any]
    vocabulary: VocabularyRecord
    packing: str
    row_tokens: int
    separator: str
    shards: dict[str, int]
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan without the task's name, so that equal tasks can share a cache."""
        value = dataclasses.asdict(self)
        del value["task"]
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    @property
    def generations(self) -> list[list[str]]:
        """Names of the corpus's files, by build: the first build, then each extension."""
        names = [file["name"] for file in self.corpus.get("files", ())]
        ends = list(itertools.accumulate(self.corpus.get("generations", [len(names)])))
        return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def difference(self, other: "Plan") -> list[str]:
        """Returns the fields that differ, each as "field: ours, there: theirs"."""
        return [
            f"{name}: {_short(mine)}, there: {_short(theirs)}"
            for name, mine, theirs in _leaves(dataclasses.asdict(self), dataclasses.asdict(other))
        ]


def _leaves(mine: Any, theirs: Any, path: str = ""):
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            yield from _leaves(mine.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif mine != theirs:
        yield path, mine, theirs


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclasses.dataclass(frozen=True)
class CacheManifest:
    """A finished cache: its plan, its shards by split, and the software versions that wrote it."""

    plan: Plan
    splits: dict[str, tuple[Shard, ...]]
    software: dict[str, str]

    @classmethod
    def load(cls, folder: str) -> "CacheManifest":
        """Reads manifest.json.

        Raises:
          UserError: there is no finished cache in `folder`, or one of another format.
        """
        path = files.join(folder, MANIFEST)
        if not files.exists(path):
            state = (
                "is unfinished: run pipeline.build again"
                if files.exists(files.join(folder, PLAN))
                else "holds no cache: build one with pipeline.build"
            )
            raise UserError(f"{folder} {state} (there is no {MANIFEST})")
        value = files.read_json(path)
        try:
            return cls(
                plan=plan_from_dict(value["plan"]),
                splits={
                    split: tuple(shard_from_dict(shard) for shard in shards)
                    for split, shards in value["splits"].items()
                },
                software=value["software"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a manifest of this version ({error})") from error

    def total(self, split: str, field: str) -> int:
        """Sums an integer field ("rows", "tokens", "documents") over a split's shards."""
        return sum(getattr(shard, field) for shard in self.splits[split])

    def dropped(self, split: str) -> dict[str, int]:
        """Returns the number of documents left out of a split, by reason."""
        counts: dict[str, int] = {}
        for shard in self.splits[split]:
            for reason, count in shard.dropped.items():
                counts[reason] = counts.get(reason, 0) + count
        return counts


def plan_from_dict(value: dict[str, Any]) -> Plan:
    """Inverse of dataclasses.asdict.

    Raises:
      UserError: the plan was written by another version of the format.
    """
    if value.get("format") != FORMAT:
        raise UserError(
            f"the cache has format {value.get('format')}, this version reads {FORMAT}: "
            "build it again into another folder"
        )
    return Plan(**{**value, "vocabulary": VocabularyRecord(**value["vocabulary"])})


def shard_from_dict(value: dict[str, Any]) -> Shard:
    """Inverse of dataclasses.asdict."""
    entries = {name: FileEntry(**entry) for name, entry in value["files"].items()}
    return Shard(**{**value, "files": entries})


# The files of a shard, in the order in which they are finished; quarantine is optional.
SHARD_KINDS = ("tfrecord", "rows", "documents", "quarantine", "receipt")


def shard_file(split: str, kind: str, index: int, count: int) -> str:
    """Returns the name of a file of a shard; `kind` is one of SHARD_KINDS."""
    suffix = {"rows": ".npy", "documents": ".parquet", "quarantine": ".jsonl", "receipt": ".json"}
    return f"{split}.{kind}-{index:05d}-of-{count:05d}{suffix.get(kind, '')}"
