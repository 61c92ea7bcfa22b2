"""Reads a cache as windows of tokens, with random access; verifies every record's checksum.

With `concat` packing a shard is one stream of tokens, cut into windows of any length; training
leaves out a shard's last window if it is shorter. With `best_fit` a window is a row.

Dimensions: W windows, P parts of windows (a part lies in one row), R rows (each is read once).
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from tasks.cache import records
from tasks.cache.manifest import CacheManifest, Shard, shard_file
from tasks.cache.shards import ShardFiles, Shards
from tasks.storage import files
from tasks.terminal.command_line import UserError

_LOCAL_BYTES = 50 << 30


@dataclasses.dataclass(frozen=True)
class Place:
    """Location of a window in a cache.

    Attributes:
      shard: index of the shard in its split.
      path: TFRecords of the shard.
      documents: lineage table of the shard.
      row: row of the shard in which the window begins.
      position: token of that row at which the window begins.
      tokens: length of the window, which continues in the following rows; with best_fit the window
        is the row.
    """

    shard: int
    path: str
    documents: str
    row: int
    position: int
    tokens: int


class Windows:
    """The windows of one split of a cache, with `len()` and random access from any thread.

    Files are opened when they are first read. Index and records stay in files, so that only the
    windows of a call are in memory.

    Args:
      folder: the cache, local or any fsspec URL; shards of a remote cache are copied when they are
        first read.
      manifest: manifest of the cache.
      split: "train", "validation", ….
      window_tokens: tokens of a window.
      keep_tails: True to include a shard's unfinished last window, as in evaluation; False to leave
        it out, as in training.
      local_dir: folder for copies of a remote cache; the system's temporary folder if None.
      local_bytes: largest total size of the copies; the least recently read are deleted.

    Raises:
      UserError: the cache has no such split, it is packed best_fit into rows longer than a window,
        or a shard of a remote cache is larger than `local_bytes`.
    """

    def __init__(
        self,
        folder: str,
        manifest: CacheManifest,
        split: str,
        window_tokens: int,
        keep_tails: bool = False,
        local_dir: str | None = None,
        local_bytes: int = _LOCAL_BYTES,
    ):
        _keep_freed_memory()
        plan = manifest.plan
        if split not in manifest.splits:
            raise UserError(f"{folder} has no split {split}; it has {', '.join(manifest.splits)}")
        if plan.packing == "best_fit" and plan.row_tokens > window_tokens:
            raise UserError(
                f"{folder} is packed best_fit into rows of {plan.row_tokens} tokens, and these "
                f"lengths need windows of {window_tokens}: build it with "
                f"--row_tokens={window_tokens}, or use --packing=concat, which fits any length"
            )
        self.window_tokens = window_tokens
        self._folder, self._split = folder, split
        self._row_tokens = plan.row_tokens if plan.packing == "concat" else None
        shards = manifest.splits[split]
        self._count = len(shards)
        self._files = [self._shard_files(number, shard) for number, shard in enumerate(shards)]
        self._shards = Shards(self._files, local_dir, local_bytes)
        self._tokens = np.array([shard.tokens for shard in shards], np.int64)
        rows = np.array([shard.rows for shard in shards], np.int64)
        # Rows are numbered through the whole split, like windows.
        self._first_row = np.concatenate([[0], np.cumsum(rows)])
        if self._row_tokens is None:
            per_shard = rows
        elif keep_tails:
            per_shard = -(-self._tokens // window_tokens)
        else:
            per_shard = self._tokens // window_tokens
        self._first = np.concatenate([[0], np.cumsum(per_shard)])

    def _shard_files(self, number: int, shard: Shard) -> ShardFiles:
        records, index = (self._name(number, kind) for kind in ("tfrecord", "rows"))
        return ShardFiles(
            files.join(self._folder, records), files.join(self._folder, index),
            shard.files[records], shard.files[index], shard.rows,
        )  # fmt: skip

    def _name(self, number: int, kind: str) -> str:
        return shard_file(self._split, kind, number, self._count)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def bytes(self) -> int:
        """Total size of all shards and their row indices, the space that a full copy takes."""
        return sum(shard.bytes for shard in self._files)

    def read(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32 [W, window_tokens] padded with 0, lengths int64 [W]).

        Raises:
          UserError: a record is corrupt; names the shard and the row.
        """
        windows_P, rows_P, skips_P, stops_P = self._parts(np.asarray(indices_W, np.int64))
        rows_R, place_P = np.unique(rows_P, return_inverse=True)
        rows, tokens_R = self._read_rows(rows_R)
        counts_P = np.minimum(stops_P, tokens_R[place_P]) - skips_P
        tokens = rows.tokens(place_P, skips_P, counts_P)
        lengths_W = np.bincount(windows_P, counts_P, len(indices_W)).astype(np.int64)
        width = self.window_tokens
        if len(tokens) == len(lengths_W) * width:
            return tokens.reshape(-1, width), lengths_W
        tokens_WN = np.zeros((len(lengths_W), width), np.int32)
        tokens_WN[np.arange(width) < lengths_W[:, None]] = tokens
        return tokens_WN, lengths_W

    def where(self, index: int) -> Place:
        """Returns the location of a window in the cache."""
        _, rows_P, skips_P, stops_P = self._parts(np.array([index]))
        shard = int(np.searchsorted(self._first_row, rows_P[0], side="right")) - 1
        row = int(rows_P[0] - self._first_row[shard])
        if self._row_tokens is None:
            with self._shards.reading(shard) as opened:
                stops_P = np.minimum(stops_P, opened.tokens[row])
        return Place(
            shard, self._files[shard].records,
            files.join(self._folder, self._name(shard, "documents")),
            row, int(skips_P[0]), int((stops_P - skips_P).sum()),
        )  # fmt: skip

    def blocks(self, block_bytes: int) -> np.ndarray:
        """Divides the windows into blocks: consecutive shards of at most `block_bytes` together.

        Returns:
          int64 [blocks + 1], the first window of each block, then the number of windows; a block
          has at least one window.

        Raises:
          UserError: a shard is larger than a block.
        """
        firsts, size = [0], 0
        for number, shard in enumerate(self._files):
            if shard.bytes > block_bytes:
                raise UserError(
                    f"{shard.records} and its index have {shard.bytes:,} bytes, and a block may "
                    f"have {block_bytes:,}: set --data.block_bytes to {shard.bytes} or more"
                )
            if size + shard.bytes > block_bytes:
                firsts.append(int(self._first[number]))
                size = 0
            size += shard.bytes
        # `unique` removes blocks without a window, whose shards have none.
        return np.unique([*firsts, len(self)])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies the shards of windows [first, last) in the background, in the order of the ranges;
        does nothing for a local cache.

        Existing copies count as just read. List the windows that are being read first, so that
        their shards are not deleted to make room for the next ones.
        """
        numbers: dict[int, None] = {}
        for first, last in ranges:
            if first < last:
                begin, end = np.searchsorted(self._first, [first, last - 1], side="right") - 1
                numbers.update(dict.fromkeys(range(int(begin), int(end) + 1)))
        self._shards.prefetch(numbers)

    def _parts(self, indices_W: np.ndarray) -> tuple[np.ndarray, ...]:
        """Splits windows at the ends of rows.

        Returns:
          (windows, rows, skips, stops), int64 [P] each: a part is tokens [skip, stop) of a row of
          the split; with best_fit the row may end before `stop`.
        """
        shards_W = np.searchsorted(self._first, indices_W, side="right") - 1
        numbers_W = indices_W - self._first[shards_W]
        if self._row_tokens is None:
            rows_W = self._first_row[shards_W] + numbers_W
            skips_W = np.zeros_like(rows_W)
            return np.arange(len(rows_W)), rows_W, skips_W, skips_W + self.window_tokens
        begins_W = numbers_W * self.window_tokens
        ends_W = np.minimum(begins_W + self.window_tokens, self._tokens[shards_W])
        rows_W = begins_W // self._row_tokens
        parts_W = -(-ends_W // self._row_tokens) - rows_W
        windows_P = np.repeat(np.arange(len(indices_W)), parts_W)
        rows_P = np.arange(len(windows_P)) - (np.cumsum(parts_W) - parts_W - rows_W)[windows_P]
        skips_P = np.maximum(begins_W[windows_P] - rows_P * self._row_tokens, 0)
        stops_P = np.minimum(ends_W[windows_P] - rows_P * self._row_tokens, self._row_tokens)
        return windows_P, rows_P + self._first_row[shards_W][windows_P], skips_P, stops_P

    def _read_rows(self, rows_R: np.ndarray) -> tuple[records.Records, np.ndarray]:
        """Reads rows of the split, given in ascending order; neighbouring rows in one read.

        Returns:
          (the rows, their numbers of tokens, int64 [R]).
        """
        shards_R = np.searchsorted(self._first_row, rows_R, side="right") - 1
        rows_R = rows_R - self._first_row[shards_R]
        runs = np.flatnonzero(
            (np.diff(rows_R, prepend=-2) != 1) | (np.diff(shards_R, prepend=-1) != 0)
        )
        shards, firsts = shards_R[runs].tolist(), rows_R[runs].tolist()
        counts = np.diff(runs, append=len(rows_R)).tolist()
        data: list[bytes] = []
        bounds: list[int] = []
        tokens: list[np.ndarray] = []
        size = run = 0
        if shards:
            self._shards.soon(list(dict.fromkeys(shards)))
        while run < len(shards):
            shard = shards[run]
            opened = self._shards.hold(shard)
            try:
                while run < len(shards) and shards[run] == shard:
                    row, count = firsts[run], counts[run]
                    begins, found = opened.read(row, row + count)
                    if self._row_tokens is None:
                        tokens.append(opened.tokens[row : row + count])
                    shift = size - begins[0]
                    bounds += [begin + shift for begin in begins[:-1]]
                    data.append(found)
                    size += len(found)
                    run += 1
            except records.CorruptRecord as error:
                raise self._corrupt(shard, firsts[run] + error.record, error) from error
            finally:
                self._shards.release(opened)
        if self._row_tokens is None:
            tokens_R = np.concatenate([np.zeros(0, np.int64), *tokens])
        else:
            tokens_R = np.minimum(
                self._tokens[shards_R] - rows_R * self._row_tokens, self._row_tokens
            )
        try:
            read = records.Records(b"".join(data), np.array([*bounds, size], np.int64), tokens_R)
        except records.CorruptRecord as error:
            row = int(rows_R[error.record])
            raise self._corrupt(int(shards_R[error.record]), row, error) from error
        return read, tokens_R

    def _corrupt(self, shard: int, row: int, why: object) -> UserError:
        return UserError(
            f"{self._files[shard].records} is corrupt in row {row}: {why}; delete the file and "
            "run pipeline.build again, which redoes that shard alone"
        )


def _keep_freed_memory() -> None:
    """Makes glibc keep up to 48 MB of freed memory, which it does once a block of 24 MB is freed.

    Otherwise the arrays of every batch, about a megabyte each, may be returned to the system and
    faulted in again page by page, which takes as long as making the batch. The block itself is
    never written to, so it takes no memory.
    """
    np.empty(24 << 20, np.uint8)
