"""Reads a cache as windows of tokens, with random access and checksum verification.

With `concat` packing, the shards of a split form one stream of tokens, cut into windows of any
length. With `best_fit` and `rows`, a window is a row; `pair_windows` reads pairs, which are also
rows. Our stream rows are full, so a token's row follows from its position; caches of other programs
need an index for that.

Dimensions: W windows, P parts of windows (a part lies in one row), R distinct rows, S shards.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tasks.cache.manifest import PACKINGS, ROWS, CacheManifest, Shard
from tasks.cache.records import loops
from tasks.cache.split_rows import SplitRows, damaged, offsets
from tasks.storage import files
from tasks.terminal.command_line import UserError


@dataclasses.dataclass(frozen=True)
class Place:
    """Location of a window, or of its part in one shard."""

    shard: int  # index of the shard in its split
    path: str  # TFRecords of the shard
    documents: str  # lineage table of the shard
    row: int  # row of the shard in which the part begins
    position: int  # token of that row at which the part begins
    tokens: int  # length of the part, which may continue in later rows unless windows are rows


class Windows:
    """The windows of one split of a cache; any thread may read them in any order.

    Files open on first read; remote shards are then copied, as in `Shards`. Index and records stay
    in files: only the windows of a call are in memory. Raises UserError if the cache lacks the
    split, its manifest is damaged, its rows are longer than a window, or as `Shards` does.
    """

    def __init__(
        self,
        folder: str,
        manifest: CacheManifest,
        split: str,
        window_tokens: int,
        keep_tails: bool = False,  # include the unfinished last window, as evaluation does
        local_dir: str | None = None,
        local_bytes: int = 50 << 30,
        across_shards: bool = True,  # if False, each shard has its own
        within: int | None = None,  # windows lie side by side in windows of this many tokens
    ):
        # Freeing a block of 24 MB once makes glibc keep up to 48 MB of freed memory. Otherwise the
        # arrays of each batch, about a megabyte each, may return to the system and be faulted in
        # page by page, which takes as long as making the batch. The block is never written, so it
        # takes no memory.
        np.empty(24 << 20, np.uint8)
        plan = manifest.plan
        if split not in manifest.splits:
            raise UserError(f"{folder} has no split {split}; it has {', '.join(manifest.splits)}")
        if plan.packing not in PACKINGS:
            raise damaged(folder, f"its packing is {plan.packing!r}, which is unknown")
        if plan.packing in ("best_fit", ROWS) and plan.row_tokens > window_tokens:
            advice = f"build it with --row_tokens={window_tokens}, or use"
            if plan.adopted:
                advice = "use longer ones, or adopt it with"
            raise UserError(
                f"{folder} has {plan.packing} rows of {plan.row_tokens} tokens, but "
                f"these lengths need windows of {window_tokens}: {advice} --packing=concat, which "
                "fits any length"
            )
        self.window_tokens = window_tokens
        self._folder, self._plan = folder, plan
        self._is_stream = not plan.rows_are_windows
        self._rows = SplitRows(folder, manifest, split, local_dir, local_bytes)
        self._across_shards, self._keep_tails = across_shards, keep_tails
        self._width = window_tokens if self._is_stream else 1
        self._outer = within or self._width
        self.per_outer = self._outer // self._width
        self._measure()

    def _measure(self) -> None:
        # Rows are numbered through the whole split, like windows. Windows are cut from a stream of
        # tokens or, with best_fit, of rows; shards begin at its `_borders`.
        self._borders = offsets(self._rows.tokens) if self._is_stream else self._rows.first
        more = self._width - 1 if self._keep_tails else 0
        # The first window that begins in or after each shard, then the number of windows.
        if self._across_shards:
            last = int(self._borders[-1]) + more
            outer, inside = np.divmod(self._borders, self._outer)
            begins = outer * self.per_outer + np.minimum(-(-inside // self._width), self.per_outer)
            self._first = np.minimum(begins, last // self._outer * self.per_outer)
        else:
            self._first = offsets((np.diff(self._borders) + more) // self._width)
        self._whole = len(self)  # before `keep_first`

    def grow(self, shards: Sequence[Shard]) -> None:
        """Adds the next shards of a split that is being built; other threads may be reading.

        Complete windows keep their numbers. Must not follow a call of `keep_first`.
        """
        if shards:
            self._rows.grow(shards)
            self._measure()

    @property
    def shards(self) -> int:
        return self._rows.count

    def ending(self, shards: int) -> int:
        """Returns the number of windows that end within the first `shards` shards.

        Assumes windows that cross shard borders. Later shards do not affect the result.
        """
        return int(self._borders[shards]) // self._width

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def unread_tokens(self) -> int:
        """Number of tokens outside all windows, not counting windows removed by `keep_first`."""
        if not self._is_stream:
            return 0
        return max(0, int(self._rows.tokens.sum()) - self._whole * self.window_tokens)

    @property
    def mean_tokens(self) -> float:
        if not self._is_stream:
            return int(self._rows.tokens.sum()) / max(1, self._whole)
        return float(self.window_tokens)

    @property
    def taken_share(self) -> float:
        return len(self) / max(1, self._whole)

    def keep_first(self, count: int) -> None:
        """Keeps only the first `count` windows; call it before reading any."""
        self._first = np.minimum(self._first, count)

    def within_tokens(self, tokens: int) -> int:
        """Returns the number of windows that end within the split's first `tokens` tokens."""
        limit = tokens
        if not self._is_stream:
            shard = int(np.searchsorted(np.cumsum(self._rows.tokens), tokens, side="right"))
            if shard == self._rows.count:
                return len(self)
            first, last = self._rows.first[shard : shard + 2].tolist()
            inside = tokens - int(self._rows.tokens[:shard].sum())
            sizes_R = np.cumsum(self._rows.sizes(first, last)[0])
            limit = first + int(np.searchsorted(sizes_R, inside, side="right"))
        ends = lambda window: int(self._extents(np.array([window]))[1][0])  # noqa: E731
        return bisect.bisect_right(range(len(self)), limit, key=ends)

    @property
    def bytes(self) -> int:
        """Total size of all shards and their row indices: the space a full copy takes."""
        return sum(shard.bytes for shard in self._rows.files)

    def read(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32 [W, window_tokens] padded with 0, lengths int64 [W]).

        Raises UserError, which names the shard and the row, if a record is corrupt.
        """
        return self._read(indices_W)[:2]

    def read_documents(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the result of `read`, and each token's document number in its window.

        The numbers, int32 [W, window_tokens], start at 0 and are 0 at padding. A separator belongs
        to the document it ends. Raises UserError if the records do not say where documents begin.
        """
        if self._plan.pairs or self._plan.adopted:
            raise UserError(f"{self._folder} does not record where documents begin in its rows")
        tokens_WN, lengths_W, parts = self._read(indices_W)
        windows_P, skips_P, counts_P, place_P, rows = parts
        starts, starts_R = rows.document_starts()
        firsts_R = np.cumsum(starts_R) - starts_R
        number_P = starts_R[place_P]
        part_S = np.repeat(np.arange(len(place_P)), number_P)  # S: starts in the rows of the parts
        inside_S = np.arange(len(part_S)) - np.repeat(np.cumsum(number_P) - number_P, number_P)
        places_S = starts[firsts_R[place_P][part_S] + inside_S] - skips_P[part_S]
        shown_S = (places_S >= 0) & (places_S < counts_P[part_S])
        begins_P = _before(counts_P) - _before(lengths_W)[windows_P]
        marks_WN = np.zeros(tokens_WN.shape, np.int32)
        marks_WN[windows_P[part_S[shown_S]], (begins_P[part_S] + places_S)[shown_S]] = 1
        marks_WN[:, 0] = 0
        within_WN = np.arange(tokens_WN.shape[1]) < lengths_W[:, None]
        return tokens_WN, lengths_W, np.cumsum(marks_WN, axis=1, dtype=np.int32) * within_WN

    def _read(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[Any, ...]]:
        """Returns (tokens, lengths, parts); see `read`.

        Parts are (windows, skips, counts, places in the rows), int64 [P] each, then the rows.
        """
        windows_P, rows_P, skips_P, stops_P = self._parts(np.asarray(indices_W, np.int64))
        rows_R, place_P = np.unique(rows_P, return_inverse=True)
        rows, tokens_R, _ = self._rows.read(rows_R)
        counts_P = np.minimum(stops_P, tokens_R[place_P]) - skips_P
        tokens = rows.tokens(place_P, skips_P, counts_P)
        lengths_W = np.bincount(windows_P, counts_P, len(indices_W)).astype(np.int64)
        parts = (windows_P, skips_P, counts_P, place_P, rows)
        width = self.window_tokens
        if len(tokens) == len(lengths_W) * width:
            return tokens.reshape(-1, width), lengths_W, parts
        tokens_WN = np.zeros((len(lengths_W), width), np.int32)
        tokens_WN[np.arange(width) < lengths_W[:, None]] = tokens
        return tokens_WN, lengths_W, parts

    def where(self, index: int) -> tuple[Place, ...]:
        """Returns the location of a window: one place per shard."""
        _, rows_P, skips_P, stops_P = self._parts(np.array([index]))
        shards_P = self._rows.shards_of(rows_P)
        places = []
        for shard in np.unique(shards_P).tolist():
            parts = np.flatnonzero(shards_P == shard)
            row = int(rows_P[parts[0]] - self._rows.first[shard])
            if not self._is_stream:
                with self._rows.shards.reading(shard) as opened:
                    stops_P = np.minimum(stops_P, opened.tokens[row])
            records = self._rows.files[shard].records
            documents = files.join(self._folder, self._rows.name(shard, "documents"))
            tokens = int((stops_P - skips_P)[parts].sum())
            places.append(Place(shard, records, documents, row, int(skips_P[parts[0]]), tokens))
        return tuple(places)

    def holding(self, shard: int, row: int, position: int, tokens: int) -> range:
        """Returns the windows that contain a piece of a document, given its lineage entry."""
        begin, end = int(self._rows.first[shard]) + row, int(self._rows.first[shard]) + row + 1
        if self._is_stream:
            assert self._rows.row_tokens
            begin = int(self._borders[shard]) + row * self._rows.row_tokens + position
            end = begin + tokens
        first, last = 0, len(self)
        if not self._across_shards:
            border = int(self._borders[shard])
            begin, end = begin - border, end - border
            first, last = int(self._first[shard]), int(self._first[shard + 1])
        (outer, inside), (end_outer, end_inside) = (
            divmod(place, self._outer) for place in (begin, end - 1)
        )
        per = self.per_outer  # what follows the last window of an outer one is in none
        first_held = outer * per + min(inside // self._width, per)
        last_held = end_outer * per + min(end_inside // self._width, per - 1)
        bounds = first + first_held, first + last_held + 1
        return range(*np.minimum(bounds, last).tolist())

    def blocks(self, block_bytes: int) -> np.ndarray:
        """Divides the windows into blocks: windows that begin in consecutive shards.

        The shards that a block's windows touch total at most `block_bytes`. Returns int64
        [blocks + 1]: the first window of each block, then the number of windows. No block is empty.
        Raises UserError if the windows of one shard need more.
        """
        if not len(self):
            return np.zeros(1, np.int64)
        begins_S1 = offsets(np.array([shard.bytes for shard in self._rows.files]))
        # For the windows up to the end of each shard: the shards they need, and their bytes.
        _, ends_S = self._extents(np.maximum(self._first[1:] - 1, 0))
        own_S = np.arange(self._rows.count)
        last_S = np.where(self._first[1:] > 0, self._shards_at(ends_S - 1), own_S)
        needed_S = np.maximum(last_S, own_S) + 1
        bytes_S = begins_S1[needed_S]
        alone_S = bytes_S - begins_S1[:-1]
        most = int(np.argmax(alone_S))
        if alone_S[most] > block_bytes:
            raise UserError(
                f"the windows of {self._rows.files[most].records} take {alone_S[most]:,} bytes of "
                f"shards and indices, but a block may have {block_bytes:,}: set "
                f"--data.block_bytes to {alone_S[most]} or more"
            )
        firsts, shard = [0], 0
        while shard < self._rows.count:
            limit = begins_S1[shard] + block_bytes
            shard = int(np.searchsorted(bytes_S, limit, side="right"))
            firsts.append(int(self._first[shard]))
        # `unique` removes blocks in whose shards no window begins.
        return np.unique(firsts)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies the shards of windows [first, last) in the background, in the order of the ranges.

        Does nothing for a local cache. Existing copies count as just read. List the windows being
        read first, so that prefetching does not evict their shards.
        """
        numbers: dict[int, None] = {}
        for first, last in ranges:
            if first < last:
                begins, ends = self._extents(np.array([first, last - 1]))
                begin, end = self._shards_at(np.array([begins[0], ends[1] - 1])).tolist()
                numbers.update(dict.fromkeys(range(begin, end + 1)))
        self._rows.shards.prefetch(numbers)

    def _extents(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (begins, ends) of windows in the stream of tokens or rows, each int64 [W]."""
        if self._across_shards:
            outer_W, inner_W = np.divmod(indices_W, self.per_outer)
            begins_W, limits = outer_W * self._outer + inner_W * self._width, self._borders[-1]
        else:
            shards_W = np.searchsorted(self._first, indices_W, side="right") - 1
            begins_W = (indices_W - self._first[shards_W]) * self._width + self._borders[shards_W]
            limits = self._borders[shards_W + 1]
        return begins_W, np.minimum(begins_W + self._width, limits)

    def _shards_at(self, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._borders, places, side="right") - 1

    def _rows_at(self, places_W: np.ndarray) -> np.ndarray:
        shards_W = self._shards_at(places_W)
        inside_W = places_W - self._borders[shards_W]
        if self._rows.row_tokens:
            return self._rows.first[shards_W] + inside_W // self._rows.row_tokens
        found = loops().rows_at
        return self._rows.first[shards_W] + self._rows.from_index(
            shards_W, inside_W, lambda index, inside: found(index["begin"], inside)
        )

    def _begins(self, rows_P: np.ndarray, shards_P: np.ndarray) -> np.ndarray:
        inside_P = rows_P - self._rows.first[shards_P]
        if self._rows.row_tokens:
            return self._borders[shards_P] + inside_P * self._rows.row_tokens
        return self._borders[shards_P] + self._rows.from_index(
            shards_P, inside_P, lambda index, inside: index["begin"][inside]
        )

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
        shards_P = self._rows.shards_of(rows_P)
        starts_P = self._begins(rows_P, shards_P)
        # A window's parts follow each other: each ends where the next begins.
        stops_P = np.empty_like(starts_P)
        stops_P[:-1] = starts_P[1:]
        stops_P[np.cumsum(parts_W) - 1] = ends_W
        skips_P = np.maximum(begins_W[windows_P] - starts_P, 0)
        return windows_P, rows_P, skips_P, stops_P - starts_P


def _before(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(sizes) - sizes
