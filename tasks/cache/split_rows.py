"""Reads the rows of one split of a cache, numbered across the whole split.

Dimensions: R distinct rows, S shards.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tasks.cache import records
from tasks.cache.manifest import MANIFEST, PAIR_INDEX, CacheManifest, Shard, shard_file
from tasks.cache.plan_check import PlanCheck
from tasks.cache.shards import ShardFiles, Shards
from tasks.storage import files
from tasks.terminal.command_line import UserError

Rows = records.Records | records.BareRows


class SplitRows:
    """The rows of one split of a cache, with random access from any thread.

    Files open on first read. Arguments and errors are as in `windows.Windows`; also raises
    UserError if another program's files have changed since they were adopted.
    """

    def __init__(
        self,
        folder: str,
        manifest: CacheManifest,
        split: str,
        local_dir: str | None,
        local_bytes: int,
    ):
        plan, shards = manifest.plan, manifest.splits[split]
        self._folder, self._split, self._plan = folder, split, plan
        self._is_pairs = plan.pairs is not None
        # Number of tokens in every row of a shard but the last, if our build wrote the rows as a
        # stream; other rows have theirs in the index.
        is_stream = not plan.rows_are_windows and not plan.adopted
        self.row_tokens = plan.row_tokens if is_stream else None
        self.count = 0
        self.files: list[ShardFiles] = []
        self._plan_check = PlanCheck(folder, plan)
        self.shards = Shards(self.files, local_dir, local_bytes, plan_check=self._plan_check)
        self.tokens = np.zeros(0, np.int64)  # of each shard, [S]
        self.first = np.zeros(1, np.int64)  # first row of each shard, then the row count, [S + 1]
        self.grow(shards)
        if plan.adopted:
            self._check_sizes()

    def grow(self, shards: Sequence[Shard]) -> None:
        """Adds the next shards of a split that is being built; other threads may be reading."""
        tokens = np.array([shard.tokens for shard in shards], np.int64)
        rows = np.array([shard.rows for shard in shards], np.int64)
        if self.row_tokens and (-(-tokens // self.row_tokens) != rows).any():
            raise damaged(self._folder, "the tokens of a shard do not fill its rows")
        added = [self._shard_files(self.count + place, each) for place, each in enumerate(shards)]
        self.shards.check_sizes(added)
        # Readers look up only earlier row numbers, which the longer arrays keep.
        self.files += added
        self.count = len(self.files)
        self.tokens = np.concatenate([self.tokens, tokens])
        self.first = np.concatenate([self.first, self.first[-1] + np.cumsum(rows)])

    def name(self, number: int, kind: str) -> str:
        return shard_file(self._split, kind, number, self._plan.shards[self._split])

    def shards_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.first, rows, side="right") - 1

    def _shard_files(self, number: int, shard: Shard) -> ShardFiles:
        records, index = (self.name(number, kind) for kind in ("tfrecord", "rows"))
        folder = self._folder
        if self._plan.adopted:
            records = next((name for name in shard.files if name != index), records)
            folder = self._plan.adopted.folder or folder
        for name in (records, index):
            if name not in shard.files:
                raise damaged(self._folder, f"shard {number} of {self._split} lacks {name}")
        return ShardFiles(
            files.join(folder, records), files.join(self._folder, index),
            shard.files[records], shard.files[index], shard.rows, self._plan.remedy,
        )  # fmt: skip

    def _check_sizes(self) -> None:
        """Checks that no file of another program has changed size since it was adopted."""
        assert self._plan.adopted
        sizes = files.list_sizes(self._plan.adopted.folder or self._folder)
        for shard in self.files:
            size, then = sizes.get(shard.records.rpartition("/")[2]), shard.records_entry.bytes
            if size != then:
                now = "is missing" if size is None else f"has {size:,} bytes"
                raise UserError(
                    f"{shard.records} {now}, but had {then:,} when it was adopted: "
                    f"{self._plan.remedy.redo}"
                )

    def from_index(
        self,
        shards_P: np.ndarray,
        values_P: np.ndarray,
        find: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Applies `find` to the row index and the values of each shard; returns int64."""
        found_P = np.empty(len(values_P), np.int64)
        shards = np.unique(shards_P).tolist()
        if shards:
            self.shards.soon(shards)
        for shard in shards:
            chosen = shards_P == shard
            with self.shards.reading(shard) as opened:
                found_P[chosen] = find(opened.rows, values_P[chosen])
        return found_P

    def sizes(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token counts of rows [first, last) and of their inputs (pairs), int64."""
        tokens, inputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for shard in range(self.count):
            begin = max(first - int(self.first[shard]), 0)
            end = min(last, int(self.first[shard + 1])) - int(self.first[shard])
            if begin < end:
                with self.shards.reading(shard) as opened:
                    tokens.append(opened.tokens[begin:end].astype(np.int64))
                    if opened.inputs is not None:
                        inputs.append(opened.inputs[begin:end].astype(np.int64))
        return np.concatenate(tokens), np.concatenate(inputs)

    def read(self, rows_R: np.ndarray) -> tuple[Rows, np.ndarray, np.ndarray]:
        """Reads rows of the split, given in ascending order; neighbouring rows in one read.

        Returns (the rows; their token counts, int64 [R]; for pairs the lengths of their inputs,
        int64 [R], else [0]).
        """
        shards_R = self.shards_of(rows_R)
        rows_R = rows_R - self.first[shards_R]
        runs = np.flatnonzero(
            (np.diff(rows_R, prepend=-2) != 1) | (np.diff(shards_R, prepend=-1) != 0)
        )
        shards, firsts = shards_R[runs].tolist(), rows_R[runs].tolist()
        counts = np.diff(runs, append=len(rows_R)).tolist()
        data: list[bytes] = []
        bounds: list[int] = []
        index: list[np.ndarray] = []
        size = run = 0
        if shards:
            self.shards.soon(list(dict.fromkeys(shards)))
        while run < len(shards):
            shard = shards[run]
            opened = self.shards.hold(shard)
            try:
                while run < len(shards) and shards[run] == shard:
                    row, count = firsts[run], counts[run]
                    begins, found = opened.read(row, row + count)
                    if self.row_tokens is None:
                        index.append(opened.rows[row : row + count])
                    shift = size - begins[0]
                    bounds += [begin + shift for begin in begins[:-1]]
                    data.append(found)
                    size += len(found)
                    run += 1
            except records.CorruptRecord as error:
                raise self._corrupt(shard, firsts[run] + error.record, error) from error
            finally:
                self.shards.release(opened)
        inputs_R = np.zeros(0, np.int64)
        if self.row_tokens:
            tokens_R = np.minimum(self.tokens[shards_R] - rows_R * self.row_tokens, self.row_tokens)
        else:
            index_R = np.concatenate(index or [np.zeros(0, PAIR_INDEX)])
            tokens_R = index_R["tokens"].astype(np.int64)
            if self._is_pairs:
                inputs_R = index_R["inputs"].astype(np.int64)
        joined, bounds_R1 = b"".join(data), np.array([*bounds, size], np.int64)
        read: Rows
        try:
            if self._is_pairs:
                read = records.PairRecords(joined, bounds_R1, inputs_R, tokens_R - inputs_R)
            elif self._plan.adopted and self._plan.adopted.token:
                kind = np.dtype(self._plan.adopted.token)
                read = records.BareRows(joined, bounds_R1, tokens_R, kind)
            else:
                read = records.Records(joined, bounds_R1, tokens_R)
        except records.CorruptRecord as error:
            row = int(rows_R[error.record])
            raise self._corrupt(int(shards_R[error.record]), row, error) from error
        return read, tokens_R, inputs_R

    def _corrupt(self, shard: int, row: int, why: object) -> UserError:
        return self._plan_check.error() or UserError(
            f"{self.files[shard].records} is corrupt in row {row}: {why}; {self._plan.remedy.redo}"
        )


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns the exclusive cumulative sum of lengths, then their sum, int64 [lengths + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def damaged(folder: str, why: str) -> UserError:
    return UserError(f"{files.join(folder, MANIFEST)} is damaged ({why}): run pipeline.build again")
