"""Scans record files: checks, counts and indexes every row."""

import dataclasses
import struct
from collections.abc import Callable

import numpy as np

from pipeline.verification.shard import Hashed
from tasks.cache import records
from tasks.cache.adopted import RAGGED_INDEX, AdoptedCounts
from tasks.cache.manifest import PAIR_INDEX, FileEntry, PairCounts
from tasks.cache.records import CorruptRecord, loops
from tasks.storage import files
from tasks.terminal.command_line import UserError

_LENGTH = struct.Struct("<Q")
_LENGTH_BYTES, _HEAD_BYTES = 8, 12
# Ids are int32.
MOST_IDS = 2**31
_RESTORE = "restore it from a copy, or make the cache again"


@dataclasses.dataclass(frozen=True)
class Scan:
    """A record file's content, indexed by PAIR_INDEX or RAGGED_INDEX [rows]."""

    entry: FileEntry
    index: np.ndarray
    counts: AdoptedCounts
    pairs: PairCounts | None
    documents: int = 0


@dataclasses.dataclass(frozen=True)
class Found:
    """Another program's cache."""

    program: str  # one of `tasks.cache.adopted.PROGRAMS`
    files: dict[str, tuple[str, ...]]  # split -> ordered names of its record files
    examples: dict[str, int]  # split -> number of rows, if the program states it
    is_pairs: bool
    # (record file, number of ids, id of EOS) -> its content; runs in other processes.
    scan: Callable[[str, int, int], Scan]
    token: str = ""  # NumPy name of the token type; "" for records
    unread: tuple[str, ...] = ()  # names of unread features
    version: str = ""
    # Properties that cannot be determined.
    unknown: tuple[str, ...] = ("corpus", "borders of documents", "text")


class Collector:
    """Rows of a file, collected block by block."""

    def __init__(self, path: str, size: int, is_pairs: bool):
        self._path, self._size, self.is_pairs = path, size, is_pairs
        self._index: list[np.ndarray] = [np.zeros(0, PAIR_INDEX if is_pairs else RAGGED_INDEX)]
        self.rows = self._tokens = self._inputs = self._zeros = self._ids = self._empty = 0
        self._ends = {"inputs": 0, "targets": 0}
        self._longest = {"inputs": 0, "targets": 0}

    def ids(self, lowest: int, highest: int, low_row: int, high_row: int, zeros: int) -> None:
        """Counts a block's ids, given extremes and their rows; raises a UserError if invalid."""
        for wrong, token, row in (
            (lowest < 0, lowest, low_row),
            (highest >= self._size, highest, high_row),
        ):
            if wrong:
                raise self.refused(
                    row,
                    f"it has the id {token}, but the vocabulary has ids 0 to {self._size - 1}: "
                    "give the --vocabulary and --extra_ids that the cache was made with",
                )
        self._ids = max(self._ids, highest + 1)
        self._zeros += zeros

    def side(self, name: str, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Counts a side, given int64 [rows] lengths and EOS counts; returns the lengths to read."""
        read = lengths - ends if self.is_pairs else lengths
        self._ends[name] += int(ends.sum())
        self._longest[name] = max(self._longest[name], int(read.max(initial=0)))
        return read

    def add(self, offsets: np.ndarray, targets: np.ndarray, inputs: np.ndarray | None) -> None:
        """Adds a block's rows: byte offsets in the file and numbers of ids, int64 [rows]."""
        index = np.zeros(len(offsets), self._index[0].dtype)
        tokens = targets if inputs is None else targets + inputs
        index["offset"], index["tokens"] = offsets, tokens
        if inputs is None:
            index["begin"] = self._tokens + np.cumsum(tokens) - tokens
        else:
            index["inputs"] = inputs
            index["documents"] = self.rows + np.arange(len(offsets))
            self._inputs += int(inputs.sum())
        self._index.append(index)
        self.rows += len(offsets)
        self._tokens += int(tokens.sum())
        self._empty += int((targets == 0).sum())

    def refused(self, row: int, why: str) -> UserError:
        return UserError(f"{self._path}, row {self.rows + row:,}: {why}")

    def finish(self, entry: FileEntry, documents: int = 0) -> Scan:
        """Returns the content of the file with size and checksum `entry`."""
        longest, ends = self._longest, self._ends
        counts = AdoptedCounts(self._empty, self._zeros, self._ids, ends["inputs"], ends["targets"])
        pairs = None
        if self.is_pairs:
            pairs = PairCounts(self._inputs, longest["inputs"], longest["targets"], 0, 0)
        return Scan(entry, np.concatenate(self._index), counts, pairs, documents)


def scan_records(path: str, size: int, is_pairs: bool, inputs_refused: bool, eos: int) -> Scan:
    """Scans TFRecords of tf.train.Examples with `targets` and, for pairs, `inputs`.

    A UserError names the row of a bad record, an id beyond `size`, or forbidden inputs.
    """
    rows = Collector(path, size, is_pairs)
    left, start = b"", 0
    with files.open_read(path) as file:
        hashed = Hashed(file)
        while block := hashed.read():
            data = left + block
            try:
                bounds = _bounds(data)
                _scan_block(rows, data[: bounds[-1]], bounds, start, inputs_refused, eos)
            except CorruptRecord as error:
                raise rows.refused(error.record, f"{error}; {_RESTORE}") from error
            left, start = data[bounds[-1] :], start + int(bounds[-1])
    if left:
        raise UserError(f"{path} ends in row {rows.rows:,}: it was cut short; {_RESTORE}")
    return rows.finish(hashed.entry())


def _bounds(data: bytes) -> np.ndarray:
    """Returns int64 bounds of the whole records in `data`."""
    bounds, at, size = [0], 0, len(data)
    while at + _HEAD_BYTES <= size:
        (length,) = _LENGTH.unpack_from(data, at)
        crc = int.from_bytes(data[at + _LENGTH_BYTES : at + _HEAD_BYTES], "little")
        if crc != records.length_crc(length):
            reason = "the checksum of the record's length does not match"
            if len(bounds) == 1:
                reason += ", so the file may not hold TFRecords"
            raise CorruptRecord(reason, len(bounds) - 1)
        at += length + records.FRAMING_BYTES
        if at > size:
            break
        bounds.append(at)
    return np.array(bounds, np.int64)


def _scan_block(
    rows: Collector, data: bytes, bounds: np.ndarray, start: int, inputs_refused: bool, eos: int
) -> None:
    records.check_framing(data, bounds)
    raw, offsets = np.frombuffer(data, np.uint8), start + bounds[:-1]
    begins, ends = bounds[:-1] + _HEAD_BYTES, bounds[1:] - (records.FRAMING_BYTES - _HEAD_BYTES)
    compiled = loops()

    def side(name: str) -> np.ndarray:
        try:
            found, *lists = records.find_lists(raw, begins, ends, name.encode())
        except CorruptRecord as error:
            if name == "targets":
                raise
            advice = "and the first row has inputs: give --read=targets to leave all of them out"
            raise rows.refused(error.record, f"{error}, {advice}") from error
        rows.ids(*map(int, compiled.extremes(found, *lists[:2])))
        return rows.side(name, lists[2], compiled.ending_in(found, *lists[:2], eos))

    if inputs_refused:
        found = compiled.lists_of(raw, begins, ends, np.frombuffer(b"inputs", np.uint8))
        for row in np.flatnonzero((found[2] > 0) | (found[0] == compiled.IN_PIECES)).tolist():
            raise rows.refused(
                row,
                "it has inputs, but the first row has none: give --read=pairs, or --read=targets "
                "to leave all inputs out",
            )
    rows.add(offsets, side("targets"), side("inputs") if rows.is_pairs else None)


def scan_tokens(
    path: str, size: int, kind: np.dtype, lengths: np.ndarray, documents: int, eos: int
) -> Scan:
    """Scans a file of tokens of type `kind`, which `lengths`, int64 [rows], must fill.

    Raises a UserError for a file of a different size, and for ids outside the vocabulary's `size`,
    whose row it names.
    """
    rows = Collector(path, size, is_pairs=False)
    ends = np.cumsum(lengths)
    total, at, left = int(lengths.sum()), 0, b""
    last = np.zeros(len(lengths), bool)
    with files.open_read(path) as file:
        hashed = Hashed(file)
        while block := hashed.read():
            data = left + block
            whole = len(data) // kind.itemsize
            left = data[whole * kind.itemsize :]
            if not whole:
                continue
            tokens = np.frombuffer(data, kind, whole)
            low, high = int(tokens.argmin()), int(tokens.argmax())
            low_row, high_row = np.searchsorted(ends, [at + low, at + high], side="right").tolist()
            zeros = int((tokens == 0).sum())
            rows.ids(int(tokens[low]), int(tokens[high]), low_row, high_row, zeros)
            first, stop = np.searchsorted(ends, [at, at + whole], side="right")
            inside = ends[first : stop + 1] - 1 - at
            here = (inside >= 0) & (inside < whole)
            last[first : stop + 1][here] = tokens[inside[here]] == eos
            at += whole
    if at != total or left:
        raise UserError(
            f"{path} has {hashed.bytes:,} bytes, but its index says {total * kind.itemsize:,}: it "
            f"was cut short or changed; {_RESTORE}"
        )
    lengths = rows.side("targets", lengths, last & (lengths > 0))
    rows.add((ends - lengths) * kind.itemsize, lengths, None)
    return rows.finish(hashed.entry(), documents)
