"""Reads a cache as windows of tokens, with random access; verifies every record's checksum.

With `concat` packing the shards of a split, in their order, are one stream of tokens, cut into
windows of any length; training leaves out the last window if it is shorter. With `best_fit` and
`rows` a window is a row; `pair_windows` reads pairs, which are rows as well. Our rows of a stream
are full, which says where a token is; those of other programs' caches have an index for that.

Dimensions: W windows, P parts of windows (a part lies in one row), R rows (each is read once), S
shards.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from tasks.cache import records
from tasks.cache.manifest import (
    MANIFEST,
    PACKINGS,
    PAIR_INDEX,
    ROWS,
    CacheManifest,
    Shard,
    shard_file,
)
from tasks.cache.shards import ShardFiles, Shards
from tasks.storage import files
from tasks.terminal.command_line import UserError

_LOCAL_BYTES = 50 << 30


@dataclasses.dataclass(frozen=True)
class Place:
    """Location of a window, or of its part in one shard.

    Attributes:
      shard: index of the shard in its split.
      path: TFRecords of the shard.
      documents: lineage table of the shard.
      row: row of the shard in which the part begins.
      position: token of that row at which the part begins.
      tokens: length of the part, which continues in the following rows; with best_fit the window
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
      keep_tails: True to include the unfinished last window, as in evaluation; False to leave it
        out, as in training.
      across_shards: True for windows that run over the borders of shards; False for windows that
        begin anew in each shard, each with an unfinished last window, as in version 1 of the order.
      local_dir: folder for copies of a remote cache; the system's temporary folder if None.
      local_bytes: largest total size of the copies; the least recently read are deleted.

    Raises:
      UserError: the cache has no such split, its manifest is damaged, it is packed best_fit into
        rows longer than a window, or a shard of a remote cache is larger than `local_bytes`.
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
        across_shards: bool = True,
    ):
        _keep_freed_memory()
        plan = manifest.plan
        if split not in manifest.splits:
            raise UserError(f"{folder} has no split {split}; it has {', '.join(manifest.splits)}")
        if plan.packing not in PACKINGS:
            raise _damaged(folder, f"its packing is {plan.packing!r}, which is unknown")
        self._is_pairs = plan.pairs is not None
        if plan.packing in ("best_fit", ROWS) and plan.row_tokens > window_tokens:
            ours = f"build it with --row_tokens={window_tokens}, or use"
            raise UserError(
                f"{folder} is packed {plan.packing} into rows of {plan.row_tokens} tokens, and "
                f"these lengths need windows of {window_tokens}: "
                f"{'use longer ones, or adopt it with' if plan.adopted else ours} "
                "--packing=concat, which fits any length"
            )
        self.window_tokens = window_tokens
        self._folder, self._split = folder, split
        self._is_stream, self._plan = not plan.rows_are_windows, plan
        self._row_tokens = plan.row_tokens if self._is_stream and not plan.adopted else None
        shards = manifest.splits[split]
        self._count = len(shards)
        self._files = [self._shard_files(number, shard) for number, shard in enumerate(shards)]
        if plan.adopted:
            self._check_sizes()
        self._shards = Shards(self._files, local_dir, local_bytes)
        self._tokens = np.array([shard.tokens for shard in shards], np.int64)
        rows = np.array([shard.rows for shard in shards], np.int64)
        if self._row_tokens and (-(-self._tokens // self._row_tokens) != rows).any():
            raise _damaged(folder, "the tokens of a shard do not fill its rows")
        # Rows are numbered through the whole split, like windows. Windows are cut from a stream of
        # tokens or, with best_fit, of rows; shards begin at `_borders` of it.
        self._first_row = _starts(rows)
        self._borders, self._width = _starts(self._tokens), window_tokens
        if not self._is_stream:
            self._borders, self._width = self._first_row, 1
        self._across_shards = across_shards
        # Of the windows, the first that begins in each shard or after it, then their number.
        if across_shards:
            last = int(self._borders[-1]) + (self._width - 1 if keep_tails else 0)
            self._first = np.minimum(-(-self._borders // self._width), last // self._width)
        else:
            lengths = np.diff(self._borders) + (self._width - 1 if keep_tails else 0)
            self._first = _starts(lengths // self._width)

    def _shard_files(self, number: int, shard: Shard) -> ShardFiles:
        records, index = (self._name(number, kind) for kind in ("tfrecord", "rows"))
        folder = self._folder
        if self._plan.adopted:
            records = next((name for name in shard.files if name != index), records)
            folder = self._plan.adopted.folder or folder
        for name in (records, index):
            if name not in shard.files:
                raise _damaged(self._folder, f"shard {number} of {self._split} lacks {name}")
        return ShardFiles(
            files.join(folder, records), files.join(self._folder, index),
            shard.files[records], shard.files[index], shard.rows, self._plan.remedy,
        )  # fmt: skip

    def _check_sizes(self) -> None:
        """Checks that no file of another program was cut or exchanged since it was adopted."""
        assert self._plan.adopted
        sizes = files.list_sizes(self._plan.adopted.folder or self._folder)
        for shard in self._files:
            size, then = sizes.get(shard.records.rpartition("/")[2]), shard.records_entry.bytes
            if size != then:
                now = "is missing" if size is None else f"has {size:,} bytes"
                raise UserError(
                    f"{shard.records} {now}, and had {then:,} when it was adopted: "
                    f"{self._plan.remedy.redo}"
                )

    def _name(self, number: int, kind: str) -> str:
        return shard_file(self._split, kind, number, self._count)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def unread_tokens(self) -> int:
        """Number of the split's tokens that are in no window."""
        if not self._is_stream:
            return 0
        return max(0, int(self._tokens.sum()) - len(self) * self.window_tokens)

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a window."""
        if not self._is_stream:
            return int(self._tokens.sum()) / max(1, len(self))
        return float(self.window_tokens)

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
        rows, tokens_R, _ = self._read_rows(rows_R)
        counts_P = np.minimum(stops_P, tokens_R[place_P]) - skips_P
        tokens = rows.tokens(place_P, skips_P, counts_P)
        lengths_W = np.bincount(windows_P, counts_P, len(indices_W)).astype(np.int64)
        width = self.window_tokens
        if len(tokens) == len(lengths_W) * width:
            return tokens.reshape(-1, width), lengths_W
        tokens_WN = np.zeros((len(lengths_W), width), np.int32)
        tokens_WN[np.arange(width) < lengths_W[:, None]] = tokens
        return tokens_WN, lengths_W

    def where(self, index: int) -> tuple[Place, ...]:
        """Returns the location of a window in the cache: a place in each of its shards."""
        _, rows_P, skips_P, stops_P = self._parts(np.array([index]))
        shards_P = self._shards_of_rows(rows_P)
        places = []
        for shard in np.unique(shards_P).tolist():
            parts = np.flatnonzero(shards_P == shard)
            row = int(rows_P[parts[0]] - self._first_row[shard])
            if not self._is_stream:
                with self._shards.reading(shard) as opened:
                    stops_P = np.minimum(stops_P, opened.tokens[row])
            places.append(
                Place(
                    shard, self._files[shard].records,
                    files.join(self._folder, self._name(shard, "documents")),
                    row, int(skips_P[parts[0]]), int((stops_P - skips_P)[parts].sum()),
                )
            )  # fmt: skip
        return tuple(places)

    def blocks(self, block_bytes: int) -> np.ndarray:
        """Divides the windows into blocks, those that begin in consecutive shards.

        A block's shards, and those in which its last window continues, have at most `block_bytes`
        together.

        Returns:
          int64 [blocks + 1], the first window of each block, then the number of windows; a block
          has at least one window.

        Raises:
          UserError: `block_bytes` is too small for the windows of one shard.
        """
        if not len(self):
            return np.zeros(1, np.int64)
        begins_S1 = _starts(np.array([shard.bytes for shard in self._files]))
        # Up to the end of each shard: the shards that the windows before it need, and their bytes.
        _, ends_S = self._extents(np.maximum(self._first[1:] - 1, 0))
        own_S = np.arange(self._count)
        last_S = np.where(self._first[1:] > 0, self._shards_at(ends_S - 1), own_S)
        needed_S = np.maximum(last_S, own_S) + 1
        bytes_S = begins_S1[needed_S]
        alone_S = bytes_S - begins_S1[:-1]
        most = int(np.argmax(alone_S))
        if alone_S[most] > block_bytes:
            raise UserError(
                f"the windows of {self._files[most].records} take {alone_S[most]:,} bytes of "
                f"shards and indices, and a block may have {block_bytes:,}: set "
                f"--data.block_bytes to {alone_S[most]} or more"
            )
        firsts, shard = [0], 0
        while shard < self._count:
            limit = begins_S1[shard] + block_bytes
            shard = int(np.searchsorted(bytes_S, limit, side="right"))
            firsts.append(int(self._first[shard]))
        # `unique` removes blocks without a window, whose shards have none.
        return np.unique(firsts)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies the shards of windows [first, last) in the background, in the order of the ranges;
        does nothing for a local cache.

        Existing copies count as just read. List the windows that are being read first, so that
        their shards are not deleted to make room for the next ones.
        """
        numbers: dict[int, None] = {}
        for first, last in ranges:
            if first < last:
                begins, ends = self._extents(np.array([first, last - 1]))
                begin, end = self._shards_at(np.array([begins[0], ends[1] - 1])).tolist()
                numbers.update(dict.fromkeys(range(begin, end + 1)))
        self._shards.prefetch(numbers)

    def _extents(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (begins, ends) of windows in the stream of tokens or rows, int64 [W] each."""
        if self._across_shards:
            begins_W, limits = indices_W * self._width, self._borders[-1]
        else:
            shards_W = np.searchsorted(self._first, indices_W, side="right") - 1
            begins_W = (indices_W - self._first[shards_W]) * self._width + self._borders[shards_W]
            limits = self._borders[shards_W + 1]
        return begins_W, np.minimum(begins_W + self._width, limits)

    def _shards_at(self, places: np.ndarray) -> np.ndarray:
        """Returns the shards at places of the stream of tokens or rows."""
        return np.searchsorted(self._borders, places, side="right") - 1

    def _shards_of_rows(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._first_row, rows, side="right") - 1

    def _rows_at(self, places_W: np.ndarray) -> np.ndarray:
        """Returns the rows at places of the stream of tokens."""
        shards_W = self._shards_at(places_W)
        inside_W = places_W - self._borders[shards_W]
        if self._row_tokens:
            return self._first_row[shards_W] + inside_W // self._row_tokens
        found = records.loops("example_loops").rows_at
        return self._first_row[shards_W] + self._from_index(
            shards_W, inside_W, lambda index, inside: found(index["begin"], inside)
        )

    def _begins(self, rows_P: np.ndarray, shards_P: np.ndarray) -> np.ndarray:
        """Returns the places of the stream of tokens at which rows begin."""
        inside_P = rows_P - self._first_row[shards_P]
        if self._row_tokens:
            return self._borders[shards_P] + inside_P * self._row_tokens
        return self._borders[shards_P] + self._from_index(
            shards_P, inside_P, lambda index, inside: index["begin"][inside]
        )

    def _from_index(
        self,
        shards_P: np.ndarray,
        values_P: np.ndarray,
        find: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Returns what `find` makes of the row indices of shards and the values of each, int64."""
        found_P = np.empty(len(values_P), np.int64)
        shards = np.unique(shards_P).tolist()
        if shards:
            self._shards.soon(shards)
        for shard in shards:
            chosen = shards_P == shard
            with self._shards.reading(shard) as opened:
                found_P[chosen] = find(opened.rows, values_P[chosen])
        return found_P

    def _parts(self, indices_W: np.ndarray) -> tuple[np.ndarray, ...]:
        """Splits windows at the ends of rows.

        Returns:
          (windows, rows, skips, stops), int64 [P] each: a part is tokens [skip, stop) of a row of
          the split; with best_fit the row may end before `stop`.
        """
        begins_W, ends_W = self._extents(indices_W)
        if not self._is_stream:
            skips_W = np.zeros_like(begins_W)
            return np.arange(len(begins_W)), begins_W, skips_W, skips_W + self.window_tokens
        rows_W = self._rows_at(begins_W)
        parts_W = self._rows_at(ends_W - 1) - rows_W + 1
        windows_P = np.repeat(np.arange(len(indices_W)), parts_W)
        rows_P = np.arange(len(windows_P)) - (np.cumsum(parts_W) - parts_W - rows_W)[windows_P]
        shards_P = self._shards_of_rows(rows_P)
        starts_P = self._begins(rows_P, shards_P)
        # A window's parts follow each other: each ends where the next begins.
        stops_P = np.empty_like(starts_P)
        stops_P[:-1] = starts_P[1:]
        stops_P[np.cumsum(parts_W) - 1] = ends_W
        skips_P = np.maximum(begins_W[windows_P] - starts_P, 0)
        return windows_P, rows_P, skips_P, stops_P - starts_P

    def _index(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of tokens of rows [first, last) of the split and, of pairs, those of
        their inputs, int64 each, from the index alone."""
        tokens, inputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for shard in range(self._count):
            begin = max(first - int(self._first_row[shard]), 0)
            end = min(last, int(self._first_row[shard + 1])) - int(self._first_row[shard])
            if begin < end:
                with self._shards.reading(shard) as opened:
                    tokens.append(opened.tokens[begin:end].astype(np.int64))
                    if opened.inputs is not None:
                        inputs.append(opened.inputs[begin:end].astype(np.int64))
        return np.concatenate(tokens), np.concatenate(inputs)

    def _read_rows(self, rows_R: np.ndarray) -> tuple[records.Rows, np.ndarray, np.ndarray]:
        """Reads rows of the split, given in ascending order; neighbouring rows in one read.

        Returns:
          (the rows, their numbers of tokens, int64 [R], and of pairs those of their inputs, int64
          [R], else [0]).
        """
        shards_R = self._shards_of_rows(rows_R)
        rows_R = rows_R - self._first_row[shards_R]
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
            self._shards.soon(list(dict.fromkeys(shards)))
        while run < len(shards):
            shard = shards[run]
            opened = self._shards.hold(shard)
            try:
                while run < len(shards) and shards[run] == shard:
                    row, count = firsts[run], counts[run]
                    begins, found = opened.read(row, row + count)
                    if self._row_tokens is None:
                        index.append(opened.rows[row : row + count])
                    shift = size - begins[0]
                    bounds += [begin + shift for begin in begins[:-1]]
                    data.append(found)
                    size += len(found)
                    run += 1
            except records.CorruptRecord as error:
                raise self._corrupt(shard, firsts[run] + error.record, error) from error
            finally:
                self._shards.release(opened)
        inputs_R = np.zeros(0, np.int64)
        if self._row_tokens:
            tokens_R = np.minimum(
                self._tokens[shards_R] - rows_R * self._row_tokens, self._row_tokens
            )
        else:
            index_R = np.concatenate(index or [np.zeros(0, PAIR_INDEX)])
            tokens_R = index_R["tokens"].astype(np.int64)
            if self._is_pairs:
                inputs_R = index_R["inputs"].astype(np.int64)
        joined, bounds_R1 = b"".join(data), np.array([*bounds, size], np.int64)
        read: records.Rows
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
        return UserError(
            f"{self._files[shard].records} is corrupt in row {row}: {why}; {self._plan.remedy.redo}"
        )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Returns where consecutive stretches begin, and the end of the last, int64 [stretches + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _damaged(folder: str, why: str) -> UserError:
    return UserError(f"{files.join(folder, MANIFEST)} is damaged ({why}): run pipeline.build again")


def _keep_freed_memory() -> None:
    """Makes glibc keep up to 48 MB of freed memory, which it does once a block of 24 MB is freed.

    Otherwise the arrays of every batch, about a megabyte each, may be returned to the system and
    faulted in again page by page, which takes as long as making the batch. The block itself is
    never written to, so it takes no memory.
    """
    np.empty(24 << 20, np.uint8)
