"""Checks a finished cache to the last byte: `python -m pipeline.verify --cache=DIR`.

Every file against its checksum, every record against its CRC, and the files against each other:
records, row index, lineage, counts, manifest, vocabulary, what stock seqio reads. It needs neither
the corpus nor a token for it. Each worker holds one shard's index and lineage and one record, so
memory does not grow with the cache; remote files are read once and not kept.
"""

import dataclasses
import hashlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tasks.cache import records
from tasks.cache.manifest import (
    LINEAGE_COLUMNS,
    MANIFEST,
    PLAN,
    ROW_INDEX,
    SHARD_KINDS,
    CacheManifest,
    FileEntry,
    Plan,
    Shard,
    shard_file,
)
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, UserError, positive, run
from tasks.vocabulary import EOS_ID, PAD_ID, VOCABULARY

if TYPE_CHECKING:
    import pyarrow as pa

REDO = "run pipeline.build with the same flags again, which redoes this shard alone"
FINISH = "run pipeline.build with the same flags again, which writes it anew"
UNTRUE = (
    "its checksum is right, so it was written like this: delete the shard's receipt, run "
    "pipeline.build with the same flags again, and report it if it comes back"
)
# Documents' digests are sorted by this many parts, so that one part fits in memory: 2**32
# documents, a hundred web crawls, give 64 parts of 1 GB.
_DIGEST_PARTS = 64
_BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 12  # of a TFRecord: its length and the length's checksum


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing wrong: the file's name in the cache, what it is, and what to do about it."""

    file: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.remedy}"


@dataclasses.dataclass
class Checked:
    """What a shard, or a split, turned out to hold.

    `digests` are 16 bytes a document: of its id, the last bit telling whether Palimpsest made it.
    """

    faults: list[Fault]
    size: int = 0
    rows: int = 0
    tokens: int = 0
    documents: int = 0
    dropped: int = 0
    digests: bytes = b""


def verify(folder: str, workers: int = 1) -> tuple[dict[str, Checked], list[Fault]]:
    """Returns (what each split holds, all faults, none for a good cache).

    Raises:
      UserError: there is no cache in `folder`.
      OSError: it cannot be read.
    """
    if not files.exists(files.join(folder, MANIFEST)) and files.exists(files.join(folder, PLAN)):
        return {}, [Fault(MANIFEST, "missing: the cache is not finished", FINISH)]
    try:
        manifest = CacheManifest.load(folder)
    except UserError as error:
        if not files.exists(files.join(folder, MANIFEST)):
            raise
        return {}, [Fault(MANIFEST, str(error), FINISH)]
    names = set(files.list_names(folder))
    faults = _check_head(folder, manifest, names)
    first_sentinel = manifest.plan.vocabulary.size - manifest.plan.vocabulary.sentinels
    jobs = [
        (folder, manifest.plan, split, index, shard, first_sentinel)
        for split, shards in manifest.splits.items()
        for index, shard in enumerate(shards)
    ]
    splits = {split: Checked([]) for split in manifest.splits}
    sizes = [sum(entry.bytes for entry in job[4].files.values()) for job in jobs]
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress.shown("verifying", sum(sizes), 0, "B") as bar,
    ):
        digests = _Digests(scratch)
        done = 0
        for job, size, checked in zip(jobs, sizes, _map(check_shard, jobs, workers), strict=True):
            _add(splits[job[2]], checked)
            faults += checked.faults
            digests.add(checked.digests)
            done += size
            bar.update(done, f"{len(faults)} faults")
        faults += digests.faults()
    return splits, faults


def _map(function: Callable, jobs: list, workers: int) -> Iterator[Checked]:
    if workers == 1:
        yield from map(function, jobs)
        return
    import multiprocessing

    pool: Executor
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, jobs)


def _add(total: Checked, more: Checked) -> None:
    for field in ("size", "rows", "tokens", "documents", "dropped"):
        setattr(total, field, getattr(total, field) + getattr(more, field))


def _check_head(folder: str, manifest: CacheManifest, names: set[str]) -> list[Fault]:
    """Checks what belongs to no shard, and that nothing else lies in the folder."""
    from pipeline.building import lifecycle
    from tasks import vocabulary

    plan = manifest.plan
    faults = []
    shards_there = {split: len(shards) for split, shards in manifest.splits.items()}
    if shards_there != plan.shards:
        faults.append(Fault(MANIFEST, f"it has {shards_there} shards, not {plan.shards}", FINISH))
    wanted = lifecycle.closing_files(manifest)
    for name, data in {**wanted, PLAN: lifecycle.as_json(dataclasses.asdict(plan))}.items():
        if name not in names:
            faults.append(Fault(name, "missing", FINISH))
        elif files.read_bytes(files.join(folder, name)) != data:
            what = "another plan than the manifest's" if name == PLAN else "not what belongs there"
            remedy = "restore it, or build into another folder" if name == PLAN else FINISH
            faults.append(Fault(name, what, remedy))
    if VOCABULARY not in names:
        faults.append(Fault(VOCABULARY, "missing", FINISH))
    else:
        model = files.read_bytes(files.join(folder, VOCABULARY))
        if hashlib.sha256(model).hexdigest() != plan.vocabulary.sha256:
            faults.append(Fault(VOCABULARY, "not the vocabulary that the rows are of", FINISH))
        elif vocabulary.from_bytes(model, plan.vocabulary.extra_ids).record != plan.vocabulary:
            faults.append(Fault(PLAN, "its sizes are not the vocabulary's", FINISH))
    known = {PLAN, VOCABULARY, *wanted}
    for split, shards in manifest.splits.items():
        for index, shard in enumerate(shards):
            known |= {*shard.files, shard_file(split, "receipt", index, len(shards))}
    for name in sorted(names - known):
        if name.startswith(files.PARTIAL):
            remedy = "run pipeline.build again, or delete it if no build is running"
            faults.append(Fault(name, "left by a build that was killed", remedy))
        else:
            faults.append(Fault(name, "no file of this cache", "move it elsewhere, or delete it"))
    return faults


def check_shard(job: tuple[str, Plan, str, int, Shard, int]) -> Checked:
    """Checks one shard; `job` is (folder, plan, split, index, its manifest entry, first sentinel).

    Raises:
      OSError: a file is there and cannot be read.
    """
    folder, plan, split, index, shard, first_sentinel = job
    named = {
        kind: shard_file(split, kind, index, plan.shards.get(split, 0)) for kind in SHARD_KINDS
    }
    checked = Checked([], size=sum(entry.bytes for entry in shard.files.values()))
    faults = checked.faults
    _check_receipt(folder, named["receipt"], shard, faults)
    expected = {named["tfrecord"], named["rows"], named["documents"]}
    expected |= {named["quarantine"]} if shard.dropped else set()
    if set(shard.files) != expected:
        faults.append(Fault(MANIFEST, f"{named['receipt']} lists other files there", FINISH))
        return checked
    content = {
        kind: _read(folder, name, shard.files[name], faults)
        for kind, name in named.items()
        if kind in ("rows", "documents", "quarantine") and name in shard.files
    }
    rows = _read_rows(folder, named["tfrecord"], shard.files[named["tfrecord"]], plan, faults)
    if faults:
        return checked

    def claim(kind: str, what: str, holds: Any) -> None:
        if not holds:
            faults.append(Fault(named[kind], what, UNTRUE))

    _check_index(content["rows"] or b"", rows, claim)
    _check_tokens(rows, plan, first_sentinel, claim)
    lineage = _lineage(content["documents"] or b"", claim)
    if lineage is None:
        return checked
    documents = _check_lineage(lineage, rows, plan, claim)
    dropped = _quarantined(content.get("quarantine") or b"", claim)
    counts = {
        "rows": len(rows.lengths),
        "tokens": int(rows.lengths.sum()),
        "documents": documents,
        "text_tokens": int(rows.text.sum()),
        "longest_row": int(rows.text.max(initial=0)),
    }
    for field, count in {**counts, "dropped": dict(dropped)}.items():
        there = getattr(shard, field)
        claim("receipt", f"it counts {there} {field}, the files hold {count}", there == count)
    checked.rows, checked.tokens, checked.documents = len(rows.lengths), counts["tokens"], documents
    checked.dropped = dropped.total()
    checked.digests = _digests(lineage, plan)
    return checked


def _check_receipt(folder: str, name: str, shard: Shard, faults: list[Fault]) -> None:
    path = files.join(folder, name)
    try:
        there = files.read_json(path)
    except FileNotFoundError:
        faults.append(Fault(name, "missing", REDO))
        return
    except UserError:
        faults.append(Fault(name, "not valid JSON", REDO))
        return
    if there != dataclasses.asdict(shard):
        fields = [
            key for key, value in dataclasses.asdict(shard).items() if there.get(key) != value
        ]
        what = f"it and {MANIFEST} differ in {', '.join(fields) or 'their fields'}"
        faults.append(Fault(name, what, "delete the receipt, then " + REDO))


class _Hashing:
    """Reads a file once, hashing what goes by."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = 0

    def read(self, count: int) -> bytes:
        """Returns the next `count` bytes, fewer at the end."""
        data = self._file.read(count)
        self._hash.update(data)
        self.bytes += len(data)
        return data

    def fault(self, name: str, entry: FileEntry, inside: str = "") -> Fault | None:
        """Returns what is wrong with the bytes, the rest of the file read too."""
        while self.read(_BLOCK_BYTES):
            pass
        inside = f" ({inside})" if inside else ""
        if self.bytes != entry.bytes:
            what = f"it has {self.bytes:,} bytes, not {entry.bytes:,}{inside}"
        elif self._hash.hexdigest() != entry.sha256:
            what = f"its bytes are not those that were written: another sha256{inside}"
        else:
            return Fault(name, inside.strip(" ()"), UNTRUE) if inside else None
        return Fault(name, what, REDO)


def _read(folder: str, name: str, entry: FileEntry, faults: list[Fault]) -> bytes | None:
    try:
        with files.open_read(files.join(folder, name)) as file:
            hashing = _Hashing(file)
            data = hashing.read(entry.bytes)
            fault = hashing.fault(name, entry)
    except FileNotFoundError:
        fault = Fault(name, "missing", REDO)
    faults += [fault] if fault else []
    return None if fault else data


@dataclasses.dataclass
class _Rows:
    """What the records of a shard say.

    Attributes:
      offsets: int64[rows] where each record's framing begins.
      lengths: int64[rows] its tokens.
      starts: int64[rows] how many documents begin in it.
      positions: int64[sum of starts] where in their rows.
      text: int64[rows] its tokens less separators.
      ends: int64[separators] places of the EOS tokens in the stream of all rows.
      least, most: the lowest and highest id.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    positions: np.ndarray
    text: np.ndarray
    ends: np.ndarray
    least: int
    most: int


def _read_rows(folder: str, name: str, entry: FileEntry, plan: Plan, faults: list[Fault]) -> _Rows:
    """Reads every record; a fault of the file is noted, with the first row that it shows in."""
    numbers: list[tuple[int, int, int, int]] = []
    positions = [np.zeros(0, np.int64)]
    ends = [np.zeros(0, np.int64)]
    least, most, before = EOS_ID, 0, 0
    inside = ""
    try:
        with files.open_read(files.join(folder, name)) as file:
            hashing = _Hashing(file)
            try:
                for offset, data in _records(hashing, entry.bytes):
                    row = records.decode_row(data)
                    separators = np.flatnonzero(row.targets == EOS_ID)
                    length = len(row.targets)
                    numbers.append((offset, length, len(row.document_starts), len(separators)))
                    positions.append(row.document_starts.astype(np.int64))
                    ends.append(separators + before)
                    before += length
                    if length:
                        least = min(least, int(row.targets.min()))
                        most = max(most, int(row.targets.max()))
            except records.CorruptRecord as error:
                inside = f"row {len(numbers)}: {error}"
            fault = hashing.fault(name, entry, inside)
    except FileNotFoundError:
        fault = Fault(name, "missing", REDO)
    faults += [fault] if fault else []
    offsets, lengths, starts, separated = np.array(numbers, np.int64).reshape(-1, 4).T
    return _Rows(
        offsets, lengths, starts, np.concatenate(positions), lengths - separated,
        np.concatenate(ends), least, most,
    )  # fmt: skip


def _records(file: _Hashing, size: int) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, data) of each record of a file of `size` bytes.

    Raises:
      CorruptRecord: its length or a checksum is wrong, or it is cut short.
    """
    while True:
        offset = file.bytes
        head = file.read(_HEAD_BYTES)
        if not head:
            return
        rest = int.from_bytes(head[:8], "little") + records.FRAMING_BYTES - len(head)
        # A damaged length may say anything; `unframe` finds that out from what there is.
        yield offset, records.unframe(head + file.read(max(0, min(rest, size - file.bytes))))


Claim = Callable[[str, str, Any], None]


def _check_index(data: bytes, rows: _Rows, claim: Claim) -> None:
    try:
        index = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError):
        index = None
    if index is None or index.dtype != ROW_INDEX or index.shape != rows.offsets.shape:
        claim("rows", "not an index of as many rows as the records", False)
        return
    before = np.cumsum(rows.starts) - rows.starts
    wanted = {"offset": rows.offsets, "tokens": rows.lengths, "documents": before}
    for field, values in wanted.items():
        wrong = np.flatnonzero(index[field].astype(np.int64) != values)
        first = f"row {wrong[0]} has another {field} in the records" if len(wrong) else ""
        claim("rows", first, not len(wrong))


def _check_tokens(rows: _Rows, plan: Plan, first_sentinel: int, claim: Claim) -> None:
    lengths = rows.lengths
    claim("tfrecord", "a row is empty", (lengths > 0).all())
    claim("tfrecord", f"a row is longer than {plan.row_tokens}", (lengths <= plan.row_tokens).all())
    if plan.packing == "concat":
        full = (lengths[:-1] == plan.row_tokens).all()
        claim("tfrecord", f"a row before the last has not {plan.row_tokens} tokens", full)
    claim("tfrecord", "it holds padding", not len(lengths) or rows.least > PAD_ID)
    claim(
        "tfrecord",
        f"it holds id {rows.most}, and ids from {first_sentinel} are no text of the vocabulary",
        rows.most < first_sentinel,
    )


def _lineage(data: bytes, claim: Claim) -> "pa.Table | None":
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        claim("documents", f"not parquet: {error}", False)
        return None
    if tuple(table.column_names) != LINEAGE_COLUMNS:
        claim("documents", f"it has the columns {', '.join(table.column_names)}", False)
        return None
    return table


def _check_lineage(lineage: "pa.Table", rows: _Rows, plan: Plan, claim: Claim) -> int:
    """Holds the lineage against the rows; returns the number of documents."""
    row, position, tokens, offset = (
        lineage.column(name).to_numpy().astype(np.int64) for name in LINEAGE_COLUMNS[1:]
    )
    documents = int((offset == 0).sum())
    if len(row) != len(rows.positions):
        what = f"it has {len(row):,} pieces, and {len(rows.positions):,} begin in the rows"
        claim("documents", what, False)
        return documents
    there = np.repeat(np.arange(len(rows.starts)), rows.starts)
    wrong = np.flatnonzero((row != there) | (position != rows.positions))
    first = f"piece {wrong[0]} begins elsewhere in the rows" if len(wrong) else ""
    claim("documents", first, not len(wrong))
    if len(wrong):
        return documents
    # Pieces follow each other without gap or overlap in the stream of all rows, whatever the
    # packing: rows are not padded.
    begins = (np.cumsum(rows.lengths) - rows.lengths)[row] + position
    expected = np.concatenate([[0], begins + tokens])
    whole = np.append(begins, rows.lengths.sum())
    wrong = np.flatnonzero(expected != whole)
    first = f"tokens before piece {wrong[0]} belong to no piece, or to two" if len(wrong) else ""
    claim("documents", first, not len(wrong))
    ends = _ends_of_documents(lineage, offset, tokens, begins, claim)
    if plan.separator == "none":
        ends = ends[:0]
    claim("tfrecord", "separators are not where documents end", np.array_equal(rows.ends, ends))
    return documents


def _ends_of_documents(
    lineage: "pa.Table", offset: np.ndarray, tokens: np.ndarray, begins: np.ndarray, claim: Claim
) -> np.ndarray:
    """Returns int64[documents]: the place of each document's last token, sorted.

    Checks on the way that the pieces of a document are whole: each begins where another ends.
    """
    last = np.ones(len(offset), bool)
    later = np.flatnonzero(offset)
    if len(later):
        names = lineage.column("id")
        cut = {names[number].as_py() for number in later.tolist()}
        pieces = [number for number, name in enumerate(names.to_pylist()) if name in cut]
        by_end: dict[tuple[str, int], list[int]] = {}
        for number in pieces:
            end = int(offset[number] + tokens[number])
            by_end.setdefault((names[number].as_py(), end), []).append(number)
        for number in later.tolist():
            before = by_end.get((names[number].as_py(), int(offset[number])))
            if not before:
                claim(
                    "documents", f"what lies before piece {number} of its document is lost", False
                )
                continue
            last[before.pop()] = False
    return np.sort((begins + tokens - 1)[last])


def _quarantined(data: bytes, claim: Claim) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            value = json.loads(line)
            counts[value["reason"]] += 1
        except (ValueError, KeyError, TypeError):
            claim("quarantine", f"line {number} is no entry of a document", False)
    return counts


def _digests(lineage: "pa.Table", plan: Plan) -> bytes:
    """Returns 16 bytes a document: see Checked."""
    import pyarrow.compute as pc

    heads = lineage.filter(pc.equal(lineage.column("document_offset"), 0)).column("id").to_pylist()
    names = {file["name"] for file in plan.corpus.get("files", ())}
    ids = np.frombuffer(
        b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in heads), "u1"
    ).reshape(-1, 16).copy()  # fmt: skip
    made = np.array([not names or name.rpartition(":")[0] in names for name in heads], "u1")
    ids[:, 15] = ids[:, 15] & 0xFE | made
    return ids.tobytes()


class _Digests:
    """Digests of documents, kept on disk in parts, so that each is sorted alone."""

    def __init__(self, scratch: str):
        self._paths = [os.path.join(scratch, str(part)) for part in range(_DIGEST_PARTS)]

    def add(self, digests: bytes) -> None:
        values = np.frombuffer(digests, "u1").reshape(-1, 16)
        for number in np.unique(values[:, 0] % _DIGEST_PARTS).tolist():
            chosen = values[values[:, 0] % _DIGEST_PARTS == number]
            with open(self._paths[number], "ab") as part:
                part.write(chosen.tobytes())

    def faults(self) -> Iterable[Fault]:
        """Documents that are there twice, where Palimpsest itself made their ids.

        An id of the corpus's own may be used twice there; that is not the cache's fault.
        """
        twice = 0
        for path in filter(os.path.exists, self._paths):
            values = np.fromfile(path, ">u8").reshape(-1, 2)
            values = values[np.lexsort(values.T)]
            same = (values[1:] == values[:-1]).all(1) & (values[1:, 1] & 1 == 1)
            twice += int(same.sum())
        if not twice:
            return []
        remedy = "build the cache into another folder, and report this"
        return [Fault(MANIFEST, f"{twice:,} documents are in the cache more than once", remedy)]


def main(argv: list[str]) -> int:
    """The command; returns 1 when there is a fault."""
    parser = Parser(prog="python -m pipeline.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--cache", required=True, help="the cache's folder: CACHE_DIR/TASK")
    parser.add_argument("--workers", type=positive, default=1, help="processes on this machine")
    flags = parser.parse_args(argv)
    splits, faults = verify(flags.cache, flags.workers)
    for fault in faults:
        print(fault)
    columns = ("documents", "tokens", "rows", "dropped", "size")
    print(f"{'':<16}" + "".join(f"{column:>16}" for column in columns))
    for split, held in splits.items():
        print(f"{split:<16}" + "".join(f"{getattr(held, column):>16,}" for column in columns))
    print(f"{flags.cache}: {len(faults)} faults" if faults else f"{flags.cache}: verified")
    return 1 if faults else 0


if __name__ == "__main__":
    run(main)
