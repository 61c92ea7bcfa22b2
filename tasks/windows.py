"""Reading a cache as windows of tokens: random access by the index, every record's CRC checked.

Under `concat` packing a shard is one stream of tokens, cut into windows of any length; the tokens
of a shard's last, shorter window are left out of training. Under `best_fit` a window is a row.
"""

import itertools
import os
import tempfile

import numpy as np

from tasks import files, records
from tasks.command_line import UserError
from tasks.manifest import ROW_INDEX, CacheManifest, shard_file


class Windows:
    """The windows of one split of a cache; `len()` of them, read by `read`.

    Args:
      folder: the cache, local or any fsspec URL; shards of a remote one are copied to a temporary
        folder when first touched.
      window_tokens: tokens of a window.
      keep_tails: whether a shard's unfinished last window counts (evaluation) or not (training).

    Raises:
      UserError: the split is not in the cache, or its rows are longer than a window under best_fit.
    """

    def __init__(
        self,
        folder: str,
        manifest: CacheManifest,
        split: str,
        window_tokens: int,
        keep_tails: bool = False,
    ):
        plan = manifest.plan
        if split not in manifest.splits:
            raise UserError(f"{folder} has no split {split}; it has {', '.join(manifest.splits)}")
        if plan.packing == "best_fit" and plan.row_tokens > window_tokens:
            raise UserError(
                f"{folder} is packed best_fit into rows of {plan.row_tokens} tokens, and these "
                f"lengths take windows of {window_tokens}: build it with "
                f"--row_tokens={window_tokens}, or use --packing=concat, which fits any length"
            )
        self.window_tokens = window_tokens
        self._row_tokens = plan.row_tokens if plan.packing == "concat" else None
        count = plan.shards[split]
        self._paths = [
            files.join(folder, shard_file(split, "tfrecord", index, count))
            for index in range(count)
        ]
        self._rows = [
            _load_index(files.join(folder, shard_file(split, "rows", index, count)))
            for index in range(count)
        ]
        self._sizes = [
            shard.files[shard_file(split, "tfrecord", index, count)].bytes
            for index, shard in enumerate(manifest.splits[split])
        ]
        self._tokens = np.array([int(rows["tokens"].sum()) for rows in self._rows], np.int64)
        if self._row_tokens is None:
            per_shard = np.array([len(rows) for rows in self._rows], np.int64)
        elif keep_tails:
            per_shard = -(-self._tokens // window_tokens)
        else:
            per_shard = self._tokens // window_tokens
        self._first = np.concatenate([[0], np.cumsum(per_shard)])
        self._copies: dict[int, str] = {}
        self._copy_folder: tempfile.TemporaryDirectory | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32 [W, window_tokens] padded with 0, lengths int64 [W]).

        Raises:
          UserError: a record is corrupt; names the shard and the row.
        """
        tokens_WN = np.zeros((len(indices_W), self.window_tokens), np.int32)
        lengths_W = np.zeros(len(indices_W), np.int64)
        shards_W = np.searchsorted(self._first, indices_W, side="right") - 1
        for place, (shard, index) in enumerate(zip(shards_W, indices_W, strict=True)):
            window = self._window(int(shard), int(index - self._first[shard]))
            tokens_WN[place, : len(window)] = window
            lengths_W[place] = len(window)
        return tokens_WN, lengths_W

    def _window(self, shard: int, number: int) -> np.ndarray:
        if self._row_tokens is None:
            return self._read_rows(shard, number, number + 1)
        begin = number * self.window_tokens
        end = min(begin + self.window_tokens, int(self._tokens[shard]))
        first_row = begin // self._row_tokens
        tokens = self._read_rows(shard, first_row, -(-end // self._row_tokens))
        skip = begin - first_row * self._row_tokens
        return tokens[skip : skip + end - begin]

    def _read_rows(self, shard: int, first: int, last: int) -> np.ndarray:
        offsets = self._rows[shard]["offset"]
        begin = int(offsets[first])
        end = int(offsets[last]) if last < len(offsets) else self._sizes[shard]
        with open(self._local(shard), "rb", buffering=0) as file:
            data = memoryview(os.pread(file.fileno(), end - begin, begin))
        borders = [*(int(offset) - begin for offset in offsets[first:last]), end - begin]
        parts = []
        for row, (start, stop) in enumerate(itertools.pairwise(borders), first):
            try:
                parts.append(records.decode_row(records.unframe(data[start:stop])).targets)
            except records.CorruptRecord as error:
                raise UserError(
                    f"{self._paths[shard]} is corrupt in row {row}: {error}; delete the file and "
                    "run pipeline.build again, which redoes that shard alone"
                ) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _local(self, shard: int) -> str:
        path = self._paths[shard]
        if not files.is_remote(path):
            return files.local_path(path)
        if shard not in self._copies:
            self._copy_folder = self._copy_folder or tempfile.TemporaryDirectory()
            copy = os.path.join(self._copy_folder.name, os.path.basename(path))
            files.copy(path, copy)
            self._copies[shard] = copy
        return self._copies[shard]


def _load_index(path: str) -> np.ndarray:
    try:
        with files.open_read(path) as file:
            rows = np.load(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: run pipeline.build again") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is not a row index ({error}): run pipeline.build again") from error
    if rows.dtype != ROW_INDEX:
        raise UserError(f"{path} is not a row index of this version: build the cache again")
    return rows
