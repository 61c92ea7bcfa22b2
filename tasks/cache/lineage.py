"""Finds the documents of a window's tokens, from a cache's row index and lineage table."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tasks.cache.manifest import LINEAGE_COLUMNS, CacheManifest, shard_file
from tasks.cache.row_index import read_row_index
from tasks.cache.windows import Place
from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

_OPEN_SHARDS = 16  # shards whose index or lineage is cached, for neighbouring windows


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a document in a window."""

    id: str  # the document's id in its corpus
    file: str  # corpus file of the document, "" if unknown
    position: int  # start of the part in the window
    tokens: int  # length of the part, including the separator
    first: int  # number of the document's tokens before the part
    whole: int | None  # number of tokens in the document; None if it may continue in another row


class Lineage:
    """Finds the documents in the windows of one split of a cache.

    `unit` names the results: "document", or "row" in another program's cache.
    """

    def __init__(self, folder: str, manifest: CacheManifest, split: str):
        self._folder, self._plan, self._split = folder, manifest.plan, split
        self._shards = manifest.splits[split]
        self.unit = "row" if self._plan.adopted else "document"
        self._names = {file["name"] for file in manifest.plan.corpus.get("files", ())}

    def parts(self, places: Sequence[Place]) -> tuple[Part, ...]:
        """Returns the documents in a window, in order; `places` locate the window, one per shard.

        For another program's cache, which does not record documents, returns rows. Raises UserError
        if pyarrow is not installed, or the cache is damaged.
        """
        begins = itertools.accumulate((place.tokens for place in places), initial=0)
        return tuple(
            dataclasses.replace(part, position=begin + part.position)
            for begin, place in zip(begins, places, strict=False)
            for part in (self._whole_rows if self._plan.adopted else self._parts)(place)
        )

    def tokens_before(self, document: int) -> int:
        """Returns the number of tokens in the split before the document at index `document`.

        Requires concat packing; `document` may equal the document count. Raises as `parts` does.
        """
        before = 0
        for number, shard in enumerate(self._shards):
            if document < shard.documents:
                count = self._plan.shards[self._split]
                name = shard_file(self._split, "documents", number, count)
                path = files.join(self._folder, name)
                ((_, row, position, _, _),) = _pieces(path, document, document + 1)
                return before + row * self._plan.row_tokens + position
            document -= shard.documents
            before += shard.tokens
        return before

    def _whole_rows(self, place: Place) -> list[Part]:
        """Returns the rows in a window's part in one shard; positions count from its start."""
        sizes = self._index(place.shard)["tokens"]
        file = place.path.rpartition("/")[2]
        parts: list[Part] = []
        row, first, position = place.row, place.position, 0
        while position < place.tokens:
            whole = int(sizes[row])
            tokens = min(whole - first, place.tokens - position)
            if tokens:
                parts.append(Part(f"{file}:{row}", file, position, tokens, first, whole))
            row, first, position = row + 1, 0, position + tokens
        return parts

    def _parts(self, place: Place) -> list[Part]:
        """Returns the documents in a window's part in one shard; positions count from its start."""
        # All rows of a shard but the last are full, or rows are windows.
        width = self._plan.row_tokens
        rows_are_windows = self._plan.rows_are_windows
        last = place.row
        if not rows_are_windows:
            last += (place.position + place.tokens - 1) // width
        rows = self._index(place.shard)
        # The last document that began in an earlier row may continue in this one.
        first_piece = max(int(rows["documents"][place.row]) - 1, 0)
        last_piece = int(rows["documents"][last + 1]) if last + 1 < len(rows) else None
        parts = []
        pieces = _pieces(place.documents, first_piece, last_piece)
        for name, row, position, tokens, before in pieces:
            if rows_are_windows and row != place.row:
                continue
            start = (row - place.row) * width + position - place.position
            begin, end = max(start, 0), min(start + tokens, place.tokens)
            if begin < end:
                whole = None if rows_are_windows and tokens == width else before + tokens
                place_in = (begin, end - begin, before + begin - start)
                parts.append(Part(name, self._file(name), *place_in, whole))
        return parts

    def _index(self, shard: int) -> np.ndarray:
        count = self._plan.shards[self._split]
        path = files.join(self._folder, shard_file(self._split, "rows", shard, count))
        return _rows(path, self._shards[shard].rows, self._plan.remedy)

    def _file(self, name: str) -> str:
        only = next(iter(self._names)) if len(self._names) == 1 else ""
        return file if (file := name.rpartition(":")[0]) in self._names else only


_rows = functools.lru_cache(maxsize=_OPEN_SHARDS)(read_row_index)


def _pieces(path: str, first: int, last: int | None) -> list[tuple[str, int, int, int, int]]:
    """Returns rows [first, last) of a lineage table, as tuples of LINEAGE_COLUMNS."""
    ends = _group_ends(path)
    last = ends[-1] if last is None else last
    found: list[tuple[str, int, int, int, int]] = []
    for group, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        if begin < last and end > first:
            table = _group(path, group)[max(first - begin, 0) : last - begin]
            found += zip(*(table.column(name).to_pylist() for name in LINEAGE_COLUMNS), strict=True)
    return found


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    with extras.needed("the list of a window's documents, a Parquet file,", "pipeline"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        with files.open_read(path) as file:
            yield parquet.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): run pipeline.build again") from error


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _group_ends(path: str) -> list[int]:
    with _open(path) as table:
        metadata = table.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return list(itertools.accumulate(sizes)) or [0]


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _group(path: str, group: int) -> Any:
    with _open(path) as table:
        # Without Arrow's threads: one that drops the last reference to a Python buffer while the
        # interpreter exits aborts the process (CPython before 3.14).
        return table.read_row_group(group, columns=list(LINEAGE_COLUMNS), use_threads=False)
