"""Opens a cache's shards for concurrent reading; copies shards of a remote cache.

Open shards and the bytes of copies are limited: the least recently used are closed or deleted,
except while being read. Copies are atomic and match the manifest's sizes and checksums.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import resource
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

from tasks.cache import copies
from tasks.cache.manifest import FileEntry, Remedy
from tasks.cache.plan_check import PlanCheck
from tasks.cache.records import CorruptRecord
from tasks.cache.row_index import read_row_index
from tasks.storage import files, retries
from tasks.terminal import command_line
from tasks.terminal.command_line import UserError

# Number of parallel copies.
_COPIERS = 4
# All objects that open shards; each shard takes two descriptors.
_live: "weakref.WeakSet[Shards]" = weakref.WeakSet()
_live_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ShardFiles:
    """Paths or URLs, sizes and checksums of a shard's records and row index."""

    records: str
    index: str
    records_entry: FileEntry
    index_entry: FileEntry
    rows: int
    remedy: Remedy

    @property
    def entries(self) -> dict[str, FileEntry]:
        return {self.records: self.records_entry, self.index: self.index_entry}

    @property
    def bytes(self) -> int:
        return self.records_entry.bytes + self.index_entry.bytes


class OpenShard:
    """An open shard: memory-mapped index and records; raises UserError if missing or different."""

    def __init__(self, shard: ShardFiles, records: str, index: str):
        self.rows = rows = read_row_index(index, shard.rows, shard.remedy, name=shard.index)
        self.offsets, self.tokens = rows["offset"], rows["tokens"]
        # Number of input ids of each pair; None in shards of text.
        self.inputs = rows["inputs"] if "inputs" in (rows.dtype.names or ()) else None
        self._size = shard.records_entry.bytes
        try:
            self._file = os.open(records, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise UserError(f"{shard.records} is missing: {shard.remedy.again}") from error
        self.close = weakref.finalize(self, os.close, self._file)
        self.close.atexit = False  # threads may still read
        # A different size may be damage, which is reported with its row when it is read; only a
        # takedown also changes the index.
        changed = os.fstat(self._file).st_size != self._size
        if changed and files.sha256(index) != shard.index_entry.sha256:
            self.close()
            raise UserError(
                f"{shard.records} was rewritten after the manifest was read, as a takedown does: "
                "wait until that build has finished, and start again"
            )
        self.readers = 0

    def read(self, first: int, last: int) -> tuple[list[int], bytes]:
        """Reads rows [first, last); raises CorruptRecord if the file or index does not hold them.

        Returns (byte offsets of the rows, then the end of the last; the bytes of their records).
        """
        bounds = self.offsets[first : last + 1].tolist()
        if last == len(self.offsets):
            bounds.append(self._size)
        begin, size = bounds[0], bounds[-1] - bounds[0]
        if size < 0 or bounds[-1] > self._size:
            raise CorruptRecord(f"the index places it at bytes {begin:,} to {bounds[-1]:,}")
        data = os.pread(self._file, size, begin)
        while len(data) < size:
            more = os.pread(self._file, size - len(data), begin + len(data))
            if not more:
                row = sum(bound - begin <= len(data) for bound in bounds[1:])
                raise CorruptRecord("the file ends inside it", row)
            data += more
        return bounds, data


class Shards:
    """The shards of a split, opened and copied on demand.

    Methods take indices into the list of shards, which may grow. Copies of a remote cache are in
    `local_dir`, where the next process finds them, or else in a temporary folder, which is deleted
    when the process ends. Raises UserError if a shard is larger than `local_bytes`.
    """

    def __init__(
        self,
        shards: Sequence[ShardFiles],
        local_dir: str | None = None,
        local_bytes: int = 50 << 30,  # maximum total size of the copies
        # Maximum; 0: an eighth of the process's descriptors. Once all objects together have twice
        # the maximum, each keeps an equal part.
        open_shards: int = 0,
        plan_check: PlanCheck | None = None,
    ):
        self._shards = shards
        self._local_dir, self._local_bytes = local_dir, local_bytes
        self._plan_check = plan_check
        self._open_shards = open_shards or max(
            8, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        )
        self.check_sizes(shards)
        # Guards everything below. Open shards and copies are in order of use, the latest last.
        self._changed = threading.Condition()
        self._open: collections.OrderedDict[int, OpenShard] = collections.OrderedDict()
        self._copies: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._opening: set[int] = set()
        self._waiting = 0
        self._folder = ""
        self._found: set[int] = set()  # copies by an earlier process, not yet verified
        self._prefetching = threading.Lock()
        with _live_lock:
            _live.add(self)

    @property
    def _remote(self) -> bool:
        return bool(self._shards) and files.is_remote(self._shards[0].records)

    def check_sizes(self, shards: Sequence[ShardFiles]) -> None:
        largest = max(shards, key=lambda shard: shard.bytes, default=None)
        if largest and files.is_remote(largest.records) and largest.bytes > self._local_bytes:
            raise UserError(
                f"{largest.records} and its index have {largest.bytes:,} bytes, but local copies "
                f"may take only {self._local_bytes:,}: set --data.local_bytes to at least "
                f"{largest.bytes}, better many times as much"
            )

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[OpenShard]:
        """Yields a shard; the block protects it from being closed or deleted."""
        shard = self.hold(number)
        try:
            yield shard
        finally:
            self.release(shard)

    def hold(self, number: int) -> OpenShard:
        """Opens a shard like `reading`; the caller must `release` it before holding another."""
        with self._changed:
            while True:
                shard = self._open.get(number)
                if shard is not None:
                    shard.readers += 1
                    self._open.move_to_end(number)
                    if self._remote:
                        self._copies.move_to_end(number)
                    return shard
                if number not in self._opening:
                    break
                self._wait()
            self._opening.add(number)
        opened = None
        try:
            opened = self._opened(number)
        finally:
            with self._changed:
                self._opening.discard(number)
                if opened is not None:
                    opened.readers = 1
                    self._open[number] = opened
                self._changed.notify_all()
        self._close_surplus(self._open_shards)
        with _live_lock:
            live = [*_live]
        if sum(len(each._open) for each in live) > 2 * self._open_shards:
            for each in live:
                each._close_surplus(2 * self._open_shards // len(live))
        return opened

    def _close_surplus(self, most: int) -> None:
        """Closes the idle shards that were read longest ago, down to a number of open ones."""
        with self._changed:
            idle = [key for key, shard in self._open.items() if not shard.readers]
            for key in idle[: max(0, len(self._open) - most)]:
                self._open.pop(key).close()

    def release(self, shard: OpenShard) -> None:
        with self._changed:
            shard.readers -= 1
            if self._waiting and not shard.readers:
                self._changed.notify_all()

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Copies shards of a remote cache in the background, a few in parallel, in the given order.

        Existing copies count as just used. An error is logged, and raised when the shard is read.
        """
        if not self._remote:
            return
        numbers = list(numbers)

        def touch(number: int) -> None:
            try:
                self.release(self.hold(number))
            except Exception as error:
                name = self._shards[number].records
                logging.getLogger(__name__).warning(
                    "%s was not copied in advance: %s", name, retries.describe(error)
                )

        def copy() -> None:
            with self._prefetching:
                missing = self.missing(numbers)
                for number in numbers:
                    if number not in missing:
                        touch(number)
                copies.in_threads(touch, missing, _COPIERS)

        copies.background(copy)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        with self._changed:
            return [number for number in numbers if self._remote and number not in self._copies]

    def soon(self, numbers: Sequence[int]) -> None:
        """Starts copying shards that will soon be read, if all of them fit."""
        missing = self.missing(numbers)[1:]  # the reader copies the first
        needed = sum(self._shards[number].bytes for number in numbers)
        if missing and 2 * needed < self._local_bytes:
            self.prefetch(missing)

    def _wait(self) -> None:
        self._waiting += 1
        self._changed.wait()
        self._waiting -= 1

    def _opened(self, number: int) -> OpenShard:
        try:
            with command_line.storage_named():
                return self._found_or_copied(number)
        except UserError as error:
            if self._plan_check and (reason := self._plan_check.error()):
                raise reason from error
            raise

    def _in_place(self, shard: ShardFiles) -> OpenShard:
        """Opens a shard of a local cache; after a takedown, only if it is unchanged."""
        records, index = files.local_path(shard.records), files.local_path(shard.index)
        opened = OpenShard(shard, records, index)
        if self._plan_check and self._plan_check.replaced:
            for path, entry in shard.entries.items():
                if not copies.holds(files.local_path(path), entry):
                    opened.close()
                    raise UserError(
                        f"{path} was rewritten after the manifest was read: wait until that "
                        "build has finished, and start again"
                    )
        return opened

    def _found_or_copied(self, number: int) -> OpenShard:
        shard = self._shards[number]
        if not self._remote:
            return self._in_place(shard)
        with self._changed:
            self._folder = self._folder or self._take_folder()
            there = number in self._copies
            if there:
                self._copies.move_to_end(number)
            else:
                self._make_room(shard.bytes)
                self._copies[number] = shard.bytes
            unknown = number in self._found
            self._found.discard(number)
        paths = self._copy_paths(number)
        if not there or unknown:
            try:
                for (url, entry), path in zip(shard.entries.items(), paths, strict=True):
                    if not (unknown and copies.holds(path, entry)):
                        copies.copy(url, entry, path, shard.remedy)
            except BaseException:
                with self._changed:
                    self._remove_copy(number)
                raise
        return OpenShard(shard, *paths)

    def _take_folder(self) -> str:
        """Locks a folder for the copies, and registers copies already there."""
        entries = (pair for shard in self._shards for pair in shard.entries.items())
        sizes = {path.rpartition("/")[2]: entry.bytes for path, entry in entries}
        self._folder, there = copies.own_folder(self, self._local_dir, sizes)
        for number, shard in enumerate(self._shards):
            paths = self._copy_paths(number)
            if {os.path.basename(path) for path in paths} <= there:
                self._copies[number] = shard.bytes
                self._found.add(number)
            else:
                for path in paths:
                    files.remove(path)
        self._make_room(0)
        return self._folder

    def _make_room(self, needed: int) -> None:
        """Deletes copies until `needed` bytes are free; waits while all copies are being read."""
        while sum(self._copies.values()) + needed > self._local_bytes:
            for number in self._copies:
                shard = self._open.get(number)
                if number not in self._opening and not (shard and shard.readers):
                    # Close it first: a deleted file takes up space until it is closed.
                    if shard:
                        self._open.pop(number).close()
                    self._remove_copy(number)
                    break
            else:
                self._wait()

    def _remove_copy(self, number: int) -> None:
        del self._copies[number]
        self._found.discard(number)
        for path in self._copy_paths(number):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _copy_paths(self, number: int) -> tuple[str, ...]:
        names = (path.rpartition("/")[2] for path in self._shards[number].entries)
        return tuple(os.path.join(self._folder, name) for name in names)
