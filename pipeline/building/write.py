"""Output shards: atomically written files, then a receipt with their checksums.

Files without a receipt (`tasks.cache.receipts`) are redone.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import types
from collections import Counter
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from pipeline.building.lost_text import Lost
from pipeline.building.rows import framed, text_tokens
from tasks import arrow
from tasks.cache import manifest, plan_check, receipts
from tasks.cache.pack import Documents, Pairs, Rows, packer
from tasks.document_kind import SIDES, DocumentKind
from tasks.storage import files
from tasks.terminal.command_line import UserError

# Number of documents per reason with an excerpt in the quarantine file.
_SAMPLES = 3
# Lineage rows per Parquet row group, fixed so that bytes do not depend on batch sizes.
_LINEAGE_GROUP = 1 << 16
_LINEAGE = pa.schema(
    zip(
        manifest.LINEAGE_COLUMNS,
        (pa.string(), pa.int64(), pa.int32(), pa.int64(), pa.int64()),
        strict=True,
    )
)


class ShardWriter:
    """Writes one shard; the end of the `with` block finishes it, and an error removes it.

    Nothing is left of a shard whose folder got another plan, by a takedown or an extension, before
    its receipt was written. `fingerprint` is the plan's, which workers cannot compute.
    """

    def __init__(
        self, folder: str, plan: manifest.Plan, split: str, index: int, fingerprint: str = ""
    ):
        self._folder, self._fingerprint = folder, fingerprint or plan.fingerprint
        self._guard = plan_check.guard(folder, self._fingerprint)
        self._name = lambda kind: manifest.shard_file(split, kind, index, plan.shards[split])
        self.unit = plan.unit
        self._index_type = (
            manifest.PAIR_INDEX if plan.unit is DocumentKind.PAIR else manifest.ROW_INDEX
        )
        special = plan.vocabulary.special_ids
        self._unknown = special.of_unknown_text
        self._unspoken = (-1 if special.pad is None else special.pad), special.eos
        self._packer = packer(plan.packing, plan.row_tokens, plan.separator, special.eos)
        names = (field.name for field in dataclasses.fields(manifest.PairCounts))
        self._pair_counts = dict.fromkeys(names, 0)
        self._index: list[np.ndarray] = []
        self._lineage: list[pa.Table] = []
        self._files: dict[str, _HashedFile] = {}
        self._counts: dict[str, int] = dict.fromkeys(
            ("rows", "tokens", "documents", "text_bytes", "text_tokens", "longest_row",
             "split_documents"), 0
        )  # fmt: skip
        self._pieces = 0
        self._dropped: dict[str, int] = {}
        self.cut_paragraphs = 0
        self.edits: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    def __enter__(self) -> "ShardWriter":
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._records = self._open("tfrecord")
            file = self._open("documents")
            self._documents = parquet.ParquetWriter(file, _LINEAGE, compression="zstd")
            self._stack.push(self._abandon)
            self._stack = self._stack.pop_all()
        return self

    def _abandon(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the Parquet writer on an error, so that it does not write when deleted."""
        if kind:
            for file in self._files.values():
                file.discard()
            with contextlib.suppress(Exception):
                self._documents.close()

    def add(
        self,
        documents: Documents | Pairs,
        text_bytes: int,
        split: int = 0,
        cut: Mapping[str, int] = types.MappingProxyType({}),
    ) -> None:
        """Writes tokenized documents with `text_bytes` of text.

        `split`: number of split documents that begin here; `cut`: number of pairs cut, by side.
        """
        if not len(documents.ids):
            return
        self._counts["documents"] += len(documents.ids)
        self._counts["text_bytes"] += text_bytes
        self._counts["split_documents"] += split
        for side in SIDES:
            self._pair_counts[f"cut_{side}"] += cut.get(side, 0)
        self._write(self._packer.add(documents))

    def lose(self, column: str, lost: Lost) -> None:
        """Counts text of a column's documents that the vocabulary cannot spell."""
        counts = {manifest.BYTES: lost.lost, manifest.ALONE: lost.rows}
        self._lost.update({f"{column} {what}": count for what, count in counts.items()})
        if self.unit is DocumentKind.PAIR:
            self._pair_counts[f"{column}_bytes"] += lost.bytes

    def quarantine(
        self, name: str | None, location: str, reason: str, value: Any = None, text: str = ""
    ) -> None:
        """Records a document left out of the cache; keeps the first few texts per reason."""
        if "quarantine" not in self._files:
            self._open("quarantine")
        entry = {"id": name, "location": location, "reason": reason}
        if value is not None:
            entry["value"] = value
        if text and self._dropped.get(reason, 0) < _SAMPLES:
            entry["text"] = text
        line = json.dumps(entry, ensure_ascii=False)
        self._files["quarantine"].write(line.encode() + b"\n")
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        try:
            self._finish()
        except UserError:  # such as a new plan's, whose files stay
            self._guard.take_back()
            raise

    def _finish(self) -> None:
        with self._stack:
            self._write(self._packer.finish())
            self._write_lineage(at_least=1)
            self._documents.close()
            index = np.concatenate([np.zeros(0, self._index_type), *self._index])
            np.save(self._open("rows"), index, allow_pickle=False)
            self._guard.check()  # before any of the files gets its name
        lost = dict(sorted((+self._lost).items()))
        is_pair = self.unit is DocumentKind.PAIR
        of_tokens = [f"{column} {manifest.TOKENS}" for column in self.unit.columns]
        shard = manifest.Shard(
            files={self._name(kind): file.entry() for kind, file in sorted(self._files.items())},
            dropped=dict(sorted(self._dropped.items())),
            pairs=manifest.PairCounts(**self._pair_counts) if is_pair else None,
            adopted=None,
            cut_paragraphs=self.cut_paragraphs or None,
            edits=dict(sorted(self.edits.items())) or None,
            unknown_tokens=sum(lost.get(name, 0) for name in of_tokens) or None,
            lost=lost or None,
            **self._counts,
        )
        path = files.join(self._folder, self._name("receipt"))
        receipts.write_receipt(path, shard, self._fingerprint, self._guard)

    def _open(self, kind: str) -> "_HashedFile":
        path = files.join(self._folder, self._name(kind))
        # The receipt comes last.
        whole = files.atomic_write(path, lasting=False, guard=self._guard)
        file = _HashedFile(self._stack.enter_context(whole))
        self._files[kind] = file
        return file

    def _write(self, rows: Rows) -> None:
        if not len(rows.lengths):
            return
        starts = np.bincount(rows.row, minlength=len(rows.lengths))
        text = text_tokens(rows.tokens, rows.lengths, *self._unspoken)
        self._count_unknown(self.unit.columns[-1], rows.tokens)
        tokens = rows.lengths
        index = np.zeros(len(rows.lengths), self._index_type)
        if rows.inputs is None or rows.inputs_lengths is None:
            data, bounds = framed(rows.tokens, rows.lengths, rows.position, starts)
        else:
            sizes = {"inputs": rows.inputs_lengths, "targets": rows.lengths}
            data, bounds = framed(rows.tokens, rows.lengths, rows.inputs, sizes["inputs"], "inputs")
            tokens = rows.piece_tokens
            index["inputs"] = sizes["inputs"]
            text_of_inputs = text_tokens(rows.inputs, sizes["inputs"], *self._unspoken)
            text = text + text_of_inputs
            self._count_unknown("inputs", rows.inputs)
            counts = self._pair_counts
            counts["inputs_tokens"] += int(text_of_inputs.sum())
            for side, lengths in sizes.items():
                counts[f"longest_{side}"] = max(counts[f"longest_{side}"], int(lengths.max()))
        index["offset"] = self._records.bytes + bounds[:-1]
        index["tokens"] = tokens
        index["documents"] = self._pieces + np.cumsum(starts) - starts
        self._index.append(index)
        self._records.write(data)
        places = (self._counts["rows"] + rows.row, rows.position.astype(np.int32))
        numbers = map(arrow.of_numbers, (*places, rows.piece_tokens, rows.document_offset))
        self._lineage.append(pa.table([rows.ids, *numbers], schema=_LINEAGE))
        self._write_lineage(at_least=_LINEAGE_GROUP)
        self._pieces += len(rows.ids)
        self._counts["rows"] += len(tokens)
        self._counts["tokens"] += int(tokens.sum())
        self._counts["text_tokens"] += int(text.sum())
        self._counts["longest_row"] = max(self._counts["longest_row"], int(text.max()))

    def _count_unknown(self, column: str, tokens: np.ndarray) -> None:
        self._lost[f"{column} {manifest.TOKENS}"] += int(np.count_nonzero(tokens == self._unknown))

    def _write_lineage(self, at_least: int) -> None:
        if sum(map(len, self._lineage)) < at_least:
            return
        waiting = pa.concat_tables(self._lineage).combine_chunks()
        while len(waiting) >= at_least:
            self._documents.write_table(waiting[:_LINEAGE_GROUP])
            waiting = waiting[_LINEAGE_GROUP:]
        self._lineage = [waiting]


class _HashedFile(io.RawIOBase):
    """Counts and hashes bytes on their way to `file`, before a disk can damage them."""

    def __init__(self, file: IO[bytes]):
        self._file: IO[bytes] | None = file
        self._hash = hashlib.sha256()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._file:
            self._file.write(view)
        self._hash.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def discard(self) -> None:
        self._file = None

    def entry(self) -> manifest.FileEntry:
        return manifest.FileEntry(self.bytes, self._hash.hexdigest())
