"""The format of an exclude list: sorted hashes of ids, with reason and kept twin.

A list is an Arrow IPC file, so it is memory-mapped and a lookup reads a few pages. Rows are sorted
by (high, low, place, paragraph):

    high, low    uint64, halves of the 128-bit BLAKE2b of the document's id
    place        uint64, 0 for every document with this id, else a hash of one document's place,
                 "file:row": ids may repeat in a corpus
    paragraph    int32, -1 for the whole document, else the number of the line to cut, from 0
    reason       uint8, index into the header's `reasons`
    twin         string, id of the document kept instead, or of the example found in it
    similarity   float32, estimated Jaccard similarity to the twin, or NaN

The header, JSON in the schema's metadata, has reasons, counts and origin. The last batch is empty
and carries the seal, the SHA-256 of header and entries. A text file with one id per line also
serves as a list; its reason is LISTED.
"""

import bisect
import dataclasses
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from tasks.cache.filtered import ExcludeRecord
from tasks.storage import files
from tasks.terminal.command_line import UserError

FORMAT = 1
# Prefix of list reasons in receipts and reports: such documents are not faulty.
EXCLUDED = "excluded: "
EXACT, NEAR, CONTAMINATED, LISTED = (
    EXCLUDED + each for each in ("exact duplicate", "near duplicate", "contaminated", "listed")
)
# Kinds of lists, for `ExcludeRecord.kind`.
DUPLICATES, IDS = "duplicates", "ids"

_MAGIC = b"ARROW1"
_HEADER, _SEAL = b"palimpsest_exclude_list", b"sha256"
_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()), ("low", pa.uint64()), ("place", pa.uint64()),
        ("paragraph", pa.int32()), ("reason", pa.uint8()), ("twin", pa.large_string()),
        ("similarity", pa.float32()),
    ]
)  # fmt: skip
COPY = "exclude-"  # prefix of the names of copies in caches
WHOLE = -1  # `paragraph` of an entry for a whole document
_BATCH = 1 << 20  # rows written at a time for a list of ids


class Entry(NamedTuple):
    """An entry of a list; `paragraph` is WHOLE for a document."""

    paragraph: int
    reason: str
    twin: str


def id_digests(ids: Iterable[str]) -> np.ndarray:
    """Returns uint64[ids, 2], halves of the BLAKE2b of each id."""
    data = b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in ids)
    return np.frombuffer(data, ">u8").reshape(-1, 2).astype(np.uint64)


def place_hash(place: str) -> int:
    """Returns the hash of a place "file:row", never 0."""
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest) or 1


def copy_name(sha256: str) -> str:
    """Returns the name of a list's copy in a cache."""
    return f"{COPY}{sha256[:16]}.arrow"


def base_id(name: str, part: int) -> str:
    """Returns a document's id, given the id and number of one of its parts."""
    return name.removesuffix(f"#part{part}") if part > 1 else name


def write(file: IO[bytes], header: dict[str, Any], batches: Iterable[Mapping[str, Any]]) -> None:
    """Writes ordered batches of entries, by column, and a seal to an open binary file."""
    text = json.dumps({"format": FORMAT, "sealed": True, **header}, sort_keys=True).encode()
    schema, digest = _SCHEMA.with_metadata({_HEADER: text}), hashlib.sha256(text)
    with pa.ipc.new_file(file, schema) as writer:
        for columns in batches:
            arrays = [pa.array(columns[each.name], each.type) for each in _SCHEMA]
            batch = pa.record_batch(arrays, schema=schema)
            _update(digest, batch)
            writer.write_batch(batch)
        nothing = pa.record_batch([[]] * len(schema), schema=schema)
        writer.write_batch(nothing, custom_metadata={_SEAL: digest.hexdigest()})


def _update(digest: "hashlib._Hash", batch: pa.RecordBatch) -> None:
    for column in batch.columns[:-2] + batch.columns[-1:]:
        digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    twins = batch.column("twin")
    bounds = np.frombuffer(twins.buffers()[1], np.int64)[twins.offset :][: len(twins) + 1]
    digest.update(np.diff(bounds).tobytes())
    if data := twins.buffers()[2]:
        digest.update(memoryview(data)[bounds[0] : bounds[-1]])


class ExcludeList:
    """An opened list; raises a UserError for other files and versions."""

    def __init__(self, path: str, name: str = ""):
        self.path, self._name = path, name or path
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(path))
            self._text = (self._reader.schema.metadata or {})[_HEADER]
            if not self._reader.schema.equals(_SCHEMA):
                raise ValueError("it has other columns")
            self.header: dict[str, Any] = json.loads(self._text)
            self.reasons: list[str] = self.header["reasons"]
            version = self.header["format"]
            batches = [self._reader.get_batch(n) for n in range(self._reader.num_record_batches)]
            self._batches = [batch for batch in batches if len(batch)]
            self._high = [batch.column("high").to_numpy() for batch in self._batches]
            self._first = [int(high[0]) for high in self._high]
        except FileNotFoundError:
            raise
        except Exception as error:  # Arrow and JSON raise many kinds of errors for damage
            raise UserError(
                f"{self._name} is not an exclude list, or is damaged: make one with pipeline.dedup "
                "or give a text file with one id per line"
            ) from error
        if version != FORMAT:
            raise UserError(f"{self._name} has format {version}; this version reads {FORMAT}")

    def check(self) -> None:
        """Reads the whole list; raises a UserError if it does not match its seal."""
        if not self.header.get("sealed"):
            raise UserError(f"{self._name} is from a version before 0.2.0: make it again")
        digest = hashlib.sha256(self._text)
        try:
            last = self._reader.num_record_batches - 1
            end = self._reader.get_batch_with_custom_metadata(last).custom_metadata or {}
            seal = dict(end)[_SEAL]
            for batch in self._batches:
                batch.validate(full=True)
                _update(digest, batch)
            sound = seal == digest.hexdigest().encode()
        except Exception:  # see above
            sound = False
        if not sound:
            raise UserError(
                f"{self._name} is damaged: its entries are not those that were written; restore "
                "it, or make it again with pipeline.dedup"
            )

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            for row in batch.to_pylist():
                yield {**row, "reason": self.reasons[row["reason"]]}

    @property
    def has_paragraphs(self) -> bool:
        return bool(self.header["counts"]["paragraphs"])

    def hits(self, digests: np.ndarray) -> np.ndarray:
        """Returns int64, rows of `digests` (see `id_digests`) that the list may contain."""
        if not self._batches:
            return np.zeros(0, np.int64)
        high = digests[:, 0]
        # Equal keys are never in two batches.
        batch = np.searchsorted(np.array(self._first, np.uint64), high, side="right") - 1
        found = []
        for number in np.unique(batch[batch >= 0]).tolist():
            rows = np.flatnonzero(batch == number)
            keys = self._high[number]
            at = np.minimum(np.searchsorted(keys, high[rows]), len(keys) - 1)
            found.append(rows[keys[at] == high[rows]])
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def entries(self, digest: np.ndarray, place: str | None = None) -> list[Entry]:
        """Returns the entries of an id at a place, None for any, given its digest, uint64[2]."""
        high, low = digest.tolist()
        number = bisect.bisect_right(self._first, high) - 1
        if number < 0:
            return []
        batch, keys = self._batches[number], self._high[number]
        begin = int(np.searchsorted(keys, np.uint64(high)))
        end = int(np.searchsorted(keys, np.uint64(high), "right"))
        wanted = None if place is None else {0, place_hash(place)}
        return [
            Entry(row["paragraph"], self.reasons[row["reason"]], row["twin"])
            for row in batch.slice(begin, end - begin).to_pylist()
            if row["low"] == low and (wanted is None or row["place"] in wanted)
        ]


@dataclasses.dataclass(frozen=True)
class Given:
    """A list given to a command."""

    record: ExcludeRecord
    path: str  # path of a local copy
    header: dict[str, Any]
    named: str
    is_text: bool = False  # true for a text file of ids


def given(text: str | None, scratch: str) -> list[Given]:
    """Returns the lists of --exclude, separated by commas; see `given_at`."""
    return [given_at(path.strip(), scratch) for path in (text or "").split(",") if path.strip()]


def given_at(path: str, scratch: str) -> Given:
    """Returns the list at `path`; a list that is made or fetched goes to the folder `scratch`."""
    try:
        with files.open_read(path) as file:
            is_list = file.read(len(_MAGIC)) == _MAGIC
    except FileNotFoundError as error:
        raise UserError(f"--exclude={path}: there is no such file") from error
    except IsADirectoryError as error:
        raise UserError(
            f"--exclude={path} is a folder: name the exclude list in it, or a text file of ids"
        ) from error
    local = files.local_path(path)
    if not is_list or files.is_remote(path):
        handle, local = tempfile.mkstemp(dir=scratch)
        os.close(handle)
        data = files.read_bytes(path) if is_list else _of_ids(path)
        files.write_bytes(local, data)
    opened = ExcludeList(local, path)
    opened.check()
    kind, counts = opened.header["kind"], opened.header["counts"]
    sizes = (counts["documents"], counts["paragraphs"])
    record = ExcludeRecord(files.sha256(local), kind, *sizes)
    return Given(record, local, opened.header, path, is_text=not is_list)


def ids_in(path: str) -> list[str]:
    """Returns the sorted ids of a text file, one per line; blank lines are skipped."""
    return sorted({line for line in files.read_lines(path) if line.strip()})


def _of_ids(path: str) -> bytes:
    names = ids_in(path)
    if not names:
        raise UserError(f"--exclude={path} names no document: give one id per line")
    digests = id_digests(names)
    digests = np.unique(digests, axis=0)  # sorted by high, then low
    same = {"place": 0, "paragraph": WHOLE, "reason": 0, "twin": "", "similarity": np.nan}

    def columns(begin: int) -> dict[str, Any]:
        some = digests[begin : begin + _BATCH]
        others = {name: [value] * len(some) for name, value in same.items()}
        return {"high": some[:, 0], "low": some[:, 1], **others}

    out = io.BytesIO()
    counts = {"documents": len(digests), "paragraphs": 0, "places": 0}
    header = {"kind": IDS, "reasons": [LISTED], "counts": counts}
    write(out, header, map(columns, range(0, len(digests), _BATCH)))
    return out.getvalue()
