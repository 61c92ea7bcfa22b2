"""Verifies one shard: checksums, records, row index, lineage, counts and quarantine.

Memory holds one shard's index and lineage and a megabyte of records.
"""

import dataclasses
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from pipeline.exclusion.filter import Filter
from pipeline.exclusion.traces import Traces
from pipeline.verification import decoding
from pipeline.verification.decoding import Rows
from tasks.cache import manifest, records
from tasks.cache.manifest import KEEP, LINEAGE_COLUMNS, MANIFEST, FileEntry, Plan, Shard
from tasks.reading.corpus import is_place
from tasks.storage import files
from tasks.terminal.command_line import UserError

_REDO = "run pipeline.build again with the same flags to redo this shard alone"
# For a bucket, builds compare sizes only.
_DELETE = "delete it, then " + _REDO
FINISH = "run pipeline.build again with the same flags to rewrite it"
_WRITTEN_WRONG = (
    "its checksum is right, so it was written this way: delete the shard's receipt, run "
    "pipeline.build again with the same flags, and report a bug if the fault reappears"
)
EXCLUDE = "run pipeline.build with --exclude and that list"
# Builds of this version look into shards of others.
HAS_LIST = (
    "run pipeline.build again with the same flags; if the fault reappears, delete the shard's "
    "receipt, run it once more, and report a bug"
)
_BLOCK_BYTES = 1 << 20
# Bytes that are read at a time where no number is given.
_MOST_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: the file's name in the cache, what is wrong, and the remedy."""

    file: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.remedy}"


class Present(NamedTuple):
    """A listed document that the shard with the lineage `file` holds."""

    list: int
    entry: int
    id: str
    file: str


@dataclasses.dataclass
class Checked:
    """Faults and contents of a shard or split, and 16-byte `digests` of ids made by Palimpsest.

    `present` and `removed` are entries of exclude lists, by the number of the list among the
    cache's own and the given ones.
    """

    faults: list[Fault]
    size: int = 0
    rows: int = 0
    tokens: int = 0
    documents: int = 0
    dropped: int = 0
    digests: bytes = b""
    present: list[Present] = dataclasses.field(default_factory=list)
    removed: set[tuple[int, int]] = dataclasses.field(default_factory=set)


class ShardChecker:
    """Checks shards of one cache, with paths of its `own` exclude lists and of `given` ones."""

    def __init__(self, folder: str, plan: Plan, own: Sequence[str] = (), given: Sequence[str] = ()):
        self._folder, self._plan = folder, plan
        self._own, self._given = Filter.of_files(own), Filter.of_files(given)
        self._lists = Filter.of_files([*own, *given])
        self._has_all_lists = len(own) == len(plan.exclude or ())
        self._end = plan.vocabulary.size - plan.vocabulary.sentinels
        if plan.spelling and plan.spelling.sentinels == KEEP:
            self._end = plan.vocabulary.size

    def __call__(self, split: str, index: int, shard: Shard) -> Checked:
        """Checks shard `index` of `split`; a file that cannot be read raises an OSError."""
        folder, plan = self._folder, self._plan
        count = plan.shards.get(split, 0)
        named = {
            kind: manifest.shard_file(split, kind, index, count) for kind in manifest.SHARD_KINDS
        }
        checked = Checked([], size=sum(entry.bytes for entry in shard.files.values()))
        faults = checked.faults
        _check_receipt(folder, named["receipt"], shard, plan, faults)
        if set(shard.files) != manifest.shard_files(split, index, count, bool(shard.dropped)):
            faults.append(
                Fault(MANIFEST, f"it lists the wrong files for {named['receipt']}", FINISH)
            )
            return checked
        content = {
            kind: _read(folder, name, shard.files[name], faults)
            for kind, name in named.items()
            if kind in ("rows", "documents", "quarantine") and name in shard.files
        }
        rows = _read_rows(folder, named["tfrecord"], shard.files[named["tfrecord"]], plan, faults)
        if faults:
            return checked

        def require(kind: str, what: str, holds: Any) -> None:
            if not holds:
                faults.append(Fault(named[kind], what, _WRITTEN_WRONG))

        _check_index(content["rows"] or b"", rows, plan, require)
        _check_tokens(rows, plan, self._end, require)
        lineage = _lineage(content["documents"] or b"", require)
        if lineage is None:
            return checked
        documents = _check_lineage(lineage, rows, plan, require)
        lines = _quarantined(content.get("quarantine") or b"", require)
        dropped = Counter(line["reason"] for line in lines)
        self._check_lists(lineage, lines, shard, named["documents"], checked)
        counts = {
            "rows": len(rows.lengths),
            "tokens": int(rows.lengths.sum()),
            "documents": documents,
            "text_tokens": int(rows.text.sum()),
            "longest_row": int(rows.text.max(initial=0)),
        }
        if shard.unknown_tokens is not None:
            counts["unknown_tokens"] = rows.unknown
        pairs = {
            "inputs_tokens": rows.inputs_text,
            "longest_inputs": int(rows.inputs.max(initial=0)),
            "longest_targets": int((rows.lengths - rows.inputs).max(initial=0)),
        }
        held_by: list[tuple[Any, dict[str, Any]]] = [(shard.pairs, pairs)] if shard.pairs else []
        for record, values in [*held_by, (shard, {**counts, "dropped": dict(dropped)})]:
            for field, held in values.items():
                recorded = getattr(record, field)
                what = f"it records {recorded} {field}, but the files hold {held}"
                require("receipt", what, recorded == held)
        checked.rows, checked.tokens = counts["rows"], counts["tokens"]
        checked.documents = documents
        checked.dropped = dropped.total()
        checked.digests = _digests(lineage, plan.file_names)
        return checked

    def _check_lists(
        self,
        lineage: pa.Table,
        quarantined: list[dict[str, Any]],
        shard: Shard,
        file: str,
        checked: Checked,
    ) -> None:
        """Looks for listed documents, and checks that listed paragraphs were cut."""
        if not self._lists:
            return
        names = lineage.column("id").to_pylist()
        firsts = np.flatnonzero(lineage.column("document_offset").to_numpy() == 0).tolist()
        traces = Traces(names, firsts, quarantined, self._plan.file_names)
        for found in traces.present(self._lists):
            checked.present.append(Present(found.list, found.entry, names[found.row], file))
        checked.removed = {(each.list, each.entry) for each in traces.removed(self._lists)}
        own = self._own.paragraphs(names, every_place=True)
        given = self._given.paragraphs(names, every_place=False)
        uncut = [row for row, numbers in sorted(given.items()) if numbers - own.get(row, set())]
        if uncut:
            some = [names[row] for row in uncut]
            checked.faults.append(listed(file, some, "documents with paragraphs", EXCLUDE))
        if not self._has_all_lists:
            return
        least, most = traces.cuts(self._own)
        cut = shard.cut_paragraphs or 0
        if not least <= cut <= most:
            what = f"{cut:,} paragraphs were cut from its documents; exclude lists have {least:,}"
            checked.faults.append(Fault(file, what, _WRITTEN_WRONG))


def listed(file: str, names: Sequence[str], what: str, remedy: str) -> Fault:
    """Returns the fault of a shard that holds listed documents."""
    some = ", ".join(names[:3]) + ("…" if len(names) > 3 else "")
    return Fault(file, f"it holds {len(names):,} {what} of an exclude list: {some}", remedy)


def _check_receipt(folder: str, name: str, shard: Shard, plan: Plan, faults: list[Fault]) -> None:
    path = files.join(folder, name)
    try:
        receipt = files.read_json(path)
    except FileNotFoundError:
        faults.append(Fault(name, "missing", _REDO))
        return
    except UserError:
        faults.append(Fault(name, "not valid JSON", _REDO))
        return
    expected = manifest.as_json(shard)
    there = receipt if isinstance(receipt, dict) else {}
    if there.pop("plan", plan.fingerprint) != plan.fingerprint:
        faults.append(Fault(name, "it names another plan than the cache's", _REDO))
    elif receipt != expected:
        fields = [key for key, value in expected.items() if there.get(key) != value]
        what = f"it and {MANIFEST} differ in {', '.join(fields) or 'their fields'}"
        faults.append(Fault(name, what, "delete the receipt, then " + _REDO))


class Hashed:
    """Counts and hashes a file while it is read."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash, self.bytes = file, hashlib.sha256(), 0

    def read(self, count: int | None = None) -> bytes:
        data = self._file.read(count or _MOST_BYTES)
        self._hash.update(data)
        self.bytes += len(data)
        return data

    def entry(self) -> FileEntry:
        return FileEntry(self.bytes, self._hash.hexdigest())


def _fault(file: Hashed, name: str, entry: FileEntry, inside: str = "") -> Fault | None:
    """Reads the rest; returns a fault if size, checksum or content (`inside`) is wrong."""
    while file.read(_BLOCK_BYTES):
        pass
    where = f" ({inside})" if inside else ""
    read = file.entry()
    if read.bytes != entry.bytes:
        what = f"it has {read.bytes:,} bytes, not {entry.bytes:,}{where}"
    elif read.sha256 != entry.sha256:
        what = f"its bytes were changed: the SHA-256 differs{where}"
    else:
        return Fault(name, inside, _WRITTEN_WRONG) if inside else None
    return Fault(name, what, _DELETE)


def _read(folder: str, name: str, entry: FileEntry, faults: list[Fault]) -> bytes | None:
    try:
        with files.open_read(files.join(folder, name)) as file:
            hashed = Hashed(file)
            data = hashed.read(entry.bytes)
            fault = _fault(hashed, name, entry)
    except FileNotFoundError:
        fault = Fault(name, "missing", _REDO)
    faults += [fault] if fault else []
    return None if fault else data


def _read_rows(folder: str, name: str, entry: FileEntry, plan: Plan, faults: list[Fault]) -> Rows:
    """Reads every record; appends a fault that names the first bad row to `faults`."""
    parts: list[Rows] = []
    inside = ""
    try:
        with files.open_read(files.join(folder, name)) as file:
            hashed = Hashed(file)
            try:
                for offset, data, bounds in decoding.blocks(hashed.read):
                    part = decoding.decoded(data, bounds, plan)
                    parts.append(dataclasses.replace(part, offsets=part.offsets + offset))
            except records.CorruptRecord as error:
                row = sum(len(part.offsets) for part in parts) + error.record
                inside = f"row {row}: {error}"
            fault = _fault(hashed, name, entry, inside)
    except FileNotFoundError:
        fault = Fault(name, "missing", _REDO)
    faults += [fault] if fault else []
    return decoding.joined(parts)


_Require = Callable[[str, str, Any], None]


def _check_index(data: bytes, rows: Rows, plan: Plan, require: _Require) -> None:
    try:
        index = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError):
        index = None
    kind = manifest.PAIR_INDEX if plan.pairs else manifest.ROW_INDEX
    if index is None or index.dtype != kind or index.shape != rows.offsets.shape:
        require("rows", "not an index of as many rows as there are records", False)
        return
    before = np.cumsum(rows.starts) - rows.starts
    wanted = {"offset": rows.offsets, "tokens": rows.lengths, "documents": before}
    if plan.pairs:
        wanted["inputs"] = rows.inputs
    for field, values in wanted.items():
        wrong = np.flatnonzero(index[field].astype(np.int64) != values)
        first = f"row {wrong[0]} has different {field} in the records" if len(wrong) else ""
        require("rows", first, not len(wrong))


def _check_tokens(rows: Rows, plan: Plan, end: int, require: _Require) -> None:
    lengths = rows.lengths
    require("tfrecord", "a row is empty", (lengths > 0).all())
    if plan.pairs:
        fewest = 0 if plan.pairs.empty_targets else 1
        sides = (("inputs", rows.inputs, 1, plan.pairs.max_inputs),
                 ("targets", lengths - rows.inputs, fewest, plan.pairs.max_targets))  # fmt: skip
        for side, tokens, least, most in sides:
            require("tfrecord", f"a row has no {side}", (tokens >= least).all())
            long = bool(most) and (tokens >= most).any()
            require("tfrecord", f"a row has {side} of {most} tokens or more", not long)
    else:
        fits = (lengths <= plan.row_tokens).all()
        require("tfrecord", f"a row is longer than {plan.row_tokens}", fits)
    if plan.packing == "concat":
        full = (lengths[:-1] == plan.row_tokens).all()
        require("tfrecord", f"a row before the last does not have {plan.row_tokens} tokens", full)
    padded = bool(len(lengths)) and plan.vocabulary.special_ids.zero_pads and rows.least == 0
    require("tfrecord", "it holds padding", not padded)
    require(
        "tfrecord",
        f"it holds id {rows.most}, but ids from {end} up are not allowed in texts",
        rows.most < end,
    )


def _lineage(data: bytes, require: _Require) -> pa.Table | None:
    try:
        lineage = parquet.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        require("documents", f"not parquet: {error}", False)
        return None
    if tuple(lineage.column_names) != LINEAGE_COLUMNS:
        require("documents", f"it has the columns {', '.join(lineage.column_names)}", False)
        return None
    return lineage


def _check_lineage(lineage: pa.Table, rows: Rows, plan: Plan, require: _Require) -> int:
    row, position, tokens, offset = (
        lineage.column(name).to_numpy().astype(np.int64) for name in LINEAGE_COLUMNS[1:]
    )
    documents = int((offset == 0).sum())
    if len(row) != len(rows.positions):
        what = f"it has {len(row):,} parts, but {len(rows.positions):,} begin in the rows"
        require("documents", what, False)
        return documents
    actual = np.repeat(np.arange(len(rows.starts)), rows.starts)
    wrong = np.flatnonzero((row != actual) | (position != rows.positions))
    first = f"part {wrong[0]} begins at a different place in the rows" if len(wrong) else ""
    require("documents", first, not len(wrong))
    if len(wrong):
        return documents
    if plan.rows_are_windows:
        whole = (position + tokens <= rows.lengths[row]).all()
        require(
            "documents", f"a part runs past the end of its row, which {plan.packing} forbids", whole
        )
    else:
        require("documents", "a document is cut into parts, which concat forbids", not offset.any())
    # Rows have no padding, so in the stream of all rows, parts follow each other without gaps or
    # overlaps, whatever the packing.
    begins = (np.cumsum(rows.lengths) - rows.lengths)[row] + position
    expected = np.concatenate([[0], begins + tokens])
    whole = np.append(begins, rows.lengths.sum())
    wrong = np.flatnonzero(expected != whole)
    first = f"tokens before part {wrong[0]} belong to no part, or to two" if len(wrong) else ""
    require("documents", first, not len(wrong))
    separators = rows.ends if plan.separator != "none" else rows.ends[:0]
    ends = _ends_of_documents(lineage, begins, separators, require)
    if plan.separator == "none":
        ends = ends[:0]
    if not plan.pairs:  # pairs may spell an EOS
        whole = np.array_equal(rows.ends, ends)
        require("tfrecord", "separators are not where documents end", whole)
    return documents


def _ends_of_documents(
    lineage: pa.Table, begins: np.ndarray, separators: np.ndarray, require: _Require
) -> np.ndarray:
    """Returns int64[documents], sorted positions of last tokens; checks that no part is missing.

    `separators` has the positions of separators. Of documents with one id, these tell which part
    that ends at an offset is the last one of its document.
    """
    tokens, offset = (
        lineage.column(name).to_numpy().astype(np.int64) for name in LINEAGE_COLUMNS[3:]
    )
    last = np.ones(len(offset), bool)
    later = np.flatnonzero(offset)
    if len(later):
        names = lineage.column("id")
        cut = {names[number].as_py() for number in later.tolist()}
        pieces = [number for number, name in enumerate(names.to_pylist()) if name in cut]
        by_end: dict[tuple[str, int], list[int]] = {}
        # Parts that go on are taken first.
        ended = set(pieces) & set(np.flatnonzero(np.isin(begins + tokens - 1, separators)).tolist())
        for number in sorted(pieces, key=lambda number: number not in ended):
            end = int(offset[number] + tokens[number])
            by_end.setdefault((names[number].as_py(), end), []).append(number)
        for number in later.tolist():
            before = by_end.get((names[number].as_py(), int(offset[number])))
            if not before:
                require(
                    "documents", f"the part of its document before part {number} is missing", False
                )
                continue
            last[before.pop()] = False
    return np.sort((begins + tokens - 1)[last])


def _quarantined(data: bytes, require: _Require) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            value = json.loads(line)
            found.append({**value, "id": value["id"] or "", "reason": str(value["reason"])})
        except (ValueError, KeyError, TypeError):
            require("quarantine", f"line {number} is not an entry", False)
    return found


def _digests(lineage: pa.Table, names: Collection[str]) -> bytes:
    """Returns the digests of Checked; `names` are the corpus files' names."""
    import pyarrow.compute as pc

    heads = lineage.column("id").filter(pc.equal(lineage.column("document_offset"), 0))
    if names:  # most ids from a corpus are not places in a file
        heads = heads.filter(pc.match_substring(heads, ":"))
    return b"".join(
        hashlib.blake2b(name.encode(), digest_size=16).digest()
        for name in heads.to_pylist()
        if not names or is_place(name, names)
    )
