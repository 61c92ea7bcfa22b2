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
    file         uint32, index of the document's file in the list's origins
    row          uint64, its row or byte there
    part         int32, number of the part of a split document that is meant, 0 for all of it

The header, JSON in the schema's metadata, has reasons and counts. The origins, compressed JSON
beside it, are the corpora that the list was made from, with their files. The last batch is empty
and carries the seal, the SHA-256 of header and entries. A text file with one id per line also
serves as a list; its reason is LISTED. It has no origins, and neither have lists of version 0.2.0:
they lack the last three columns, and name every document with a listed id.
"""

import bisect
import dataclasses
import functools
import hashlib
import io
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.exclusion.origins import File, Origin
from tasks.cache.filtered import ExcludeRecord
from tasks.storage import files
from tasks.terminal.command_line import UserError

FORMATS = (1, 2)  # without and with origins
# Prefix of list reasons in receipts and reports: such documents are not faulty.
EXCLUDED = "excluded: "
EXACT, NEAR, CONTAMINATED, LISTED = (
    EXCLUDED + each for each in ("exact duplicate", "near duplicate", "contaminated", "listed")
)
# Kinds of lists, for `ExcludeRecord.kind`.
DUPLICATES, IDS = "duplicates", "ids"

_MAGIC = b"ARROW1"
_HEADER, _ORIGINS, _SEAL = b"palimpsest_exclude_list", b"palimpsest_origins", b"sha256"
_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()), ("low", pa.uint64()), ("place", pa.uint64()),
        ("paragraph", pa.int32()), ("reason", pa.uint8()), ("twin", pa.large_string()),
        ("similarity", pa.float32()),
    ]
)  # fmt: skip
_OF_FILES = pa.schema([*_SCHEMA, ("file", pa.uint32()), ("row", pa.uint64()), ("part", pa.int32())])
# Header entries: SHA-256 of the origins; SHA-256 and number of entries of the list as it was given.
_CHECKSUM, OF, OF_ENTRIES = "origins", "of", "of_entries"
COPY = "exclude-"  # prefix of the names of copies in caches
OF_LANGUAGES = "lists.json"  # in the folder of a task of several languages: its lists
WHOLE = -1  # `paragraph` of an entry for a whole document
_BATCH = 1 << 20  # rows written at a time for a list of ids


class Entry(NamedTuple):
    """An entry of a list, row `number` of it; `paragraph` is WHOLE for a document."""

    number: int
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


def write(
    file: IO[bytes],
    header: dict[str, Any],
    batches: Iterable[Mapping[str, Any]],
    origins: Sequence[Origin] = (),
) -> None:
    """Writes ordered batches of entries, by column, and a seal to an open binary file."""
    base, values = _SCHEMA, {"format": FORMATS[bool(origins)], "sealed": True, **header}
    metadata: dict[bytes, bytes] = {}
    if origins:
        base, data = _OF_FILES, _packed(origins)
        metadata[_ORIGINS], values[_CHECKSUM] = data, hashlib.sha256(data).hexdigest()
    text = metadata[_HEADER] = json.dumps(values, sort_keys=True).encode()
    schema, digest = base.with_metadata(metadata), hashlib.sha256(text)
    with pa.ipc.new_file(file, schema) as writer:
        for columns in batches:
            arrays = [pa.array(columns[each.name], each.type) for each in base]
            batch = pa.record_batch(arrays, schema=schema)
            _update(digest, batch)
            writer.write_batch(batch)
        nothing = pa.record_batch([[]] * len(schema), schema=schema)
        writer.write_batch(nothing, custom_metadata={_SEAL: digest.hexdigest()})


def _packed(origins: Sequence[Origin]) -> bytes:
    text = json.dumps([origin.as_json() for origin in origins], sort_keys=True)
    return zlib.compress(text.encode())


def _update(digest: "hashlib._Hash", batch: pa.RecordBatch) -> None:
    for name in batch.schema.names:
        if name != "twin":
            digest.update(batch.column(name).to_numpy(zero_copy_only=False).tobytes())
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
            self._metadata = self._reader.schema.metadata or {}
            self._text = self._metadata[_HEADER]
            expected = _OF_FILES if _ORIGINS in self._metadata else _SCHEMA
            if not self._reader.schema.equals(expected):
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
                f"{self._name} is not an exclude list, or is damaged: search again "
                "or give a text file with one id per line"
            ) from error
        if version not in FORMATS:
            raise UserError(f"{self._name} has format {version}; this version reads {FORMATS[-1]}")

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
            if _ORIGINS in self._metadata:
                checksum = hashlib.sha256(self._metadata[_ORIGINS]).hexdigest()
                sound = sound and self.header[_CHECKSUM] == checksum
        except Exception:  # see above
            sound = False
        if not sound:
            raise UserError(
                f"{self._name} is damaged: its entries are not those that were written; restore "
                "it, or make it again"
            )

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            for row in batch.to_pylist():
                yield {**row, "reason": self.reasons[row["reason"]]}

    @functools.cached_property
    def origins(self) -> list[Origin]:
        """The corpora that the list was made from; [] if it does not say."""
        data = self._metadata.get(_ORIGINS)
        found = json.loads(zlib.decompress(data)) if data else []
        return [Origin.from_json(each) for each in found]

    @functools.cached_property
    def files(self) -> list[File]:
        """The files of all origins, in the order that the column `file` counts."""
        return [file for origin in self.origins for file in origin.files]

    @property
    def batches(self) -> list[pa.RecordBatch]:
        return self._batches

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
        """Returns the entries of an id, given its digest, uint64[2], and a place.

        None stands for any place. "" leaves out entries for one of several documents of this id.
        """
        high, low = digest.tolist()
        number = bisect.bisect_right(self._first, high) - 1
        if number < 0:
            return []
        batch, keys = self._batches[number], self._high[number]
        begin = int(np.searchsorted(keys, np.uint64(high)))
        end = int(np.searchsorted(keys, np.uint64(high), "right"))
        wanted = None if place is None else {0, place_hash(place)}
        before = sum(map(len, self._batches[:number])) + begin
        return [
            Entry(at, row["paragraph"], self.reasons[row["reason"]], row["twin"])
            for at, row in enumerate(batch.slice(begin, end - begin).to_pylist(), before)
            if row["low"] == low
            and (wanted is None or row["place"] in wanted)
            and (not place or self._is_in(row, place))
        ]

    def _is_in(self, row: Mapping[str, Any], place: str) -> bool:
        """Returns whether a place is in the file of an entry; always, if the list has no files."""
        name = self.files[row["file"]].name if "file" in row else ""
        return not name or place.rpartition(":")[0] == name


@dataclasses.dataclass(frozen=True)
class Given:
    """A list given to a command, as one corpus sees it (`pipeline.exclusion.targets`)."""

    record: ExcludeRecord
    path: str  # path of a local copy
    header: dict[str, Any]
    named: str
    lines: Mapping[str, str] | None = None  # line of a text file -> id of a document
    again: bool = False  # in force already, and not given to this command

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of documents and of paragraphs."""
        return self.record.documents, self.record.paragraphs

    @property
    def original(self) -> str:
        """The SHA-256 of the list as it was given."""
        return self.header.get(OF, self.record.sha256)


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
        local = scratch_file(scratch)
        data = files.read_bytes(path) if is_list else _of_ids(path)
        files.write_bytes(local, data)
    opened = ExcludeList(local, path)
    opened.check()
    if is_list:
        return Given(record_of(local, opened), local, opened.header, path)
    if blank := sum(bool(line) and not line.strip() for line in files.read_lines(path)):
        lines = f"{blank:,} line{'s' * (blank > 1)}"
        note = f"--exclude={path}: skipped {lines} of white space alone, which no list can name"
        print(note, file=sys.stderr)
    named = {line: line for line in ids_in(path)}
    return Given(record_of(local, opened), local, opened.header, path, named)


def scratch_file(folder: str) -> str:
    handle, path = tempfile.mkstemp(dir=folder)
    os.close(handle)
    return path


def record_of(path: str, opened: ExcludeList) -> ExcludeRecord:
    counts = opened.header["counts"]
    sizes = (counts["documents"], counts["paragraphs"])
    return ExcludeRecord(files.sha256(path), opened.header["kind"], *sizes)


def ids_in(path: str) -> list[str]:
    """Returns the sorted ids of a text file, one per line; blank lines are skipped."""
    return sorted({line for line in files.read_lines(path) if line.strip()})


def _of_ids(path: str) -> bytes:
    names = ids_in(path)
    if not names:
        raise UserError(f"--exclude={path} names no document: give one id per line")
    return of_ids(names)


def of_ids(names: Iterable[str], **more: Any) -> bytes:
    """Returns a list of ids, with more entries in its header."""
    digests = id_digests(names)
    digests = np.unique(digests, axis=0)  # sorted by high, then low
    same = {"place": 0, "paragraph": WHOLE, "reason": 0, "twin": "", "similarity": np.nan}
    columns: dict[str, Any] = {name: [value] * len(digests) for name, value in same.items()}
    columns |= {"high": digests[:, 0], "low": digests[:, 1]}
    out = io.BytesIO()
    counts = {"documents": len(digests), "paragraphs": 0, "places": 0}
    header = {"kind": IDS, "reasons": [LISTED], "counts": counts, **more}
    write(out, header, in_batches(columns))
    return out.getvalue()


def in_batches(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ordered columns in batches; equal keys are in one."""
    high = np.asarray(columns["high"])
    begin = 0
    while begin < len(high):
        end = int(np.searchsorted(high, high[min(begin + _BATCH, len(high)) - 1], side="right"))
        yield {name: values[begin:end] for name, values in columns.items()}
        begin = end
