"""Counts the words of a corpus of any size, in bounded memory and by any number of workers.

Each piece of the corpus becomes one file of (word, count) where the vocabulary will be, by a Beam
job or in this process. A file depends on its piece alone and appears whole or not at all, so that a
run that was killed goes on with those that are there. Then the files are added up, and if the words
are more than memory takes, a sample of them is kept that is the same whatever the workers, the
runner and the order.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.watch import polling
from vocab.words import Splitter, passages

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = "counts-"

# Parts of a file, by the hash of the word, that can be added up one after the other.
_PARTS = 64
_STATISTICS = b"statistics"


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker is told; `key`, in the names of files, stands for all that they depend on.

    A worker counts at most `batch_bytes` of text in memory before it writes what it has.
    """

    folder: str
    key: str
    corpus: sources.Corpus
    splitter: Splitter
    batch_bytes: int

    def path(self, number: int) -> str:
        """The file of piece `number`."""
        return files.join(self.folder, f"{PREFIX}{self.key}-{number:06}.parquet")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Words to train on, the most frequent first, and what they stand for.

    `threshold` is 1 if every word of the corpus is here. Otherwise each word of count c was kept
    with probability min(1, c / threshold) and then counts max(c, threshold): for any set of words,
    rare ones or those of one language, the sum of counts is right on average.
    """

    words: "pa.Array"
    counts: np.ndarray  # int64
    threshold: float
    statistics: dict[str, Any]


def run(job: Job, beam_arguments: list[str] | None, verbose: bool) -> None:
    """Writes the files that are missing, in this process if there are no `beam_arguments`.

    Raises:
      UserError: the corpus cannot be read, or a worker died.
      OSError: the files cannot be written.
    """
    numbers = _numbers(job)
    there = set(files.list_names(job.folder))
    names = {number: job.path(number).rsplit("/", 1)[-1] for number in numbers}
    missing = [number for number in numbers if names[number] not in there]
    sizes = {names[number]: job.corpus.pieces[number].bytes for number in numbers}
    total = sum(sizes.values())
    if len(missing) < len(numbers):
        print(f"kept counts of {len(numbers) - len(missing):,} pieces of {len(numbers):,}")
    title = f"counting the words of {job.corpus.spec}"
    begun = total - sum(sizes[names[number]] for number in missing)
    with progress.shown(title, total, begun, unit="B") as bar:
        if beam_arguments is None:
            done = begun
            for number in missing:
                _count_piece(job, number, lambda inside, done=done: bar.update(done + inside))
                done += sizes[names[number]]
        elif missing:

            def look() -> None:
                there = sizes.keys() & set(files.list_names(job.folder))
                bar.update(sum(sizes[name] for name in there))

            with polling(look, files.is_remote(job.folder)):
                # A Beam import costs seconds that a small corpus need not pay.
                from pipeline.runners import beam_job

                count = functools.partial(_count_piece, job)
                beam_job.run(count, missing, job.folder, beam_arguments, verbose)


def clean(folder: str, key: str = "") -> None:
    """Deletes the files of counts in `folder` but those of `key`."""
    for name in files.list_names(folder):
        if name.startswith(PREFIX) and not (key and name.startswith(f"{PREFIX}{key}-")):
            files.remove(files.join(folder, name))


def _numbers(job: Job) -> list[int]:
    pieces = enumerate(job.corpus.pieces)
    return [number for number, piece in pieces if sources.TRAIN in piece.splits]


# --- one piece


def _count_piece(job: Job, number: int, on_read: Any = lambda inside: None) -> Mapping[str, int]:
    """Writes the counts of a piece; returns sums for those who watch the job."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    piece = job.corpus.pieces[number]
    problems: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    schema = pa.schema({"hash": pa.uint64(), "word": pa.large_string(), "count": pa.int64()})
    with (
        files.atomic_write(job.path(number)) as file,
        pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        ) as writer,
    ):
        batch: list[str] = []
        size = inside = 0
        for passage, passage_bytes in _passages(job.corpus, piece, problems, sums):
            batch.append(passage)
            size += passage_bytes
            if size >= job.batch_bytes:
                _write(writer, job.splitter.count(batch))
                inside += size
                on_read(min(inside, piece.bytes))
                batch, size = [], 0
        _write(writer, job.splitter.count(batch))
        statistics = {**sums, "left_out": problems}
        writer.add_key_value_metadata({_STATISTICS: json.dumps(statistics)})
    return sums


def _passages(
    corpus: sources.Corpus, piece: sources.Piece, problems: Counter[str], sums: Counter[str]
) -> Iterator[tuple[str, int]]:
    for split, batch in sources.read(corpus, piece):
        if split != sources.TRAIN:
            continue
        columns = (batch.column(name).to_pylist() for name in ("text", "problem"))
        for text, problem in zip(*columns, strict=True):
            if problem:
                problems[problem] += 1
                continue
            sums["documents"] += 1
            for passage in passages(text):
                size = len(passage.encode())
                sums["bytes"] += size
                yield passage, size


def _write(writer: Any, counts: Counter[str]) -> None:
    """Writes the words in `_PARTS` groups of rows, by their hash."""
    import pyarrow as pa

    words = np.array(sorted(counts), object)
    hashes = np.fromiter(map(_hash, words), np.uint64, len(words))
    numbers = np.fromiter(map(counts.__getitem__, words), np.int64, len(words))
    part = hashes % np.uint64(_PARTS)
    for index in range(_PARTS):
        chosen = part == index
        columns = [hashes[chosen], pa.array(words[chosen], pa.large_string()), numbers[chosen]]
        table = pa.table(dict(zip(writer.schema.names, columns, strict=True)))
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


# --- all pieces


def add_up(job: Job, limit_bytes: int, limit_words: int) -> Counts:
    """Adds up the files of all pieces and keeps words of `limit_bytes` and `limit_words` at most.

    Raises:
      UserError: there is no text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    sums: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    rows = 0
    paths = [job.path(number) for number in _numbers(job)]
    for path in paths:
        with files.open_read(path) as file:
            metadata = pq.read_metadata(file)
        statistics = json.loads(metadata.metadata[_STATISTICS])
        left_out.update(statistics.pop("left_out"))
        sums.update(statistics)
        rows += metadata.num_rows
    kept = _Kept(limit_bytes, limit_words)
    # Each reading of the files takes as many of the parts as memory has room for.
    readings = min(_PARTS, max(1, math.ceil(rows / (2 * limit_words))))
    for reading in range(readings):
        tables: list[pa.Table] = []
        waiting = 0
        for path in paths:
            with files.open_read(path) as file:
                parquet = pq.ParquetFile(file, page_checksum_verification=True)
                groups = [
                    group
                    for group in range(parquet.num_row_groups)
                    if group % _PARTS % readings == reading
                ]
                tables.append(parquet.read_row_groups(groups, use_threads=False))
            waiting += tables[-1].num_rows
            if waiting > 2 * limit_words:  # words that occur everywhere go together early
                tables, waiting = [_grouped(tables)], 0
        kept.add(_grouped(tables))
    found = kept.finish()
    if not found.num_rows:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in left_out.items())
        raise UserError(
            f"corpus {job.corpus.spec} has no text in train"
            + (f" (left out: {reasons})" if reasons else "")
        )
    counts = found.column("count").to_numpy()
    threshold = max(1.0, kept.threshold)
    in_them = int(counts.sum())
    weights = np.maximum(counts, _rounded(threshold, found.column("hash").to_numpy()))
    order = pc.sort_indices(
        pa.table({"weight": weights, "word": found.column("word")}),
        [("weight", "descending"), ("word", "ascending")],
    )
    return Counts(
        found.column("word").combine_chunks().take(order),
        weights[order.to_numpy()],
        threshold,
        {
            "documents": sums["documents"],
            "documents_left_out": dict(sorted(left_out.items())),
            "bytes": sums["bytes"],
            "words": kept.occurrences,
            "distinct_words": kept.seen,
            "words_kept": in_them,
            "distinct_words_kept": found.num_rows,
            "threshold": round(threshold, 3),
        },
    )


def _rounded(threshold: float, hashes: np.ndarray) -> np.ndarray:
    """Returns the threshold for each hash as a whole number, up or down so that the mean is right.

    The lowest bits decide, which have no part in what is kept.
    """
    up = (hashes & np.uint64(0xFFFF)) < (threshold % 1) * 0x10000
    return math.floor(threshold) + up.astype(np.int64)


class _Kept:
    """The words with the highest priority, count / u, where u in (0, 1] is the hash of the word.

    Source: priority sampling, Duffield, Lund and Thorup, "Priority sampling for estimation of
    arbitrary subset sums", JACM 54 (2007).
    """

    def __init__(self, limit_bytes: int, limit_words: int):
        self._limits = limit_bytes, limit_words
        self._table: pa.Table | None = None
        self.threshold = 0.0  # the highest priority of a word that was left out
        self.seen = 0
        self.occurrences = 0

    def add(self, table: "pa.Table") -> None:
        """Offers words that were not offered before."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.seen += table.num_rows
        self.occurrences += pc.sum(table.column("count")).as_py() or 0
        table = pa.concat_tables([self._table, table] if self._table else [table])
        self._table = table
        lengths = pc.binary_length(table.column("word")).to_numpy()
        limit_bytes, limit_words = self._limits
        if table.num_rows <= limit_words and lengths.sum() <= limit_bytes and not self.threshold:
            return
        hashes = table.column("hash").to_numpy()
        priorities = table.column("count").to_numpy() / ((hashes.astype(np.float64) + 1) / 2.0**64)
        order = np.lexsort((hashes, -priorities))
        fits = (np.cumsum(lengths[order]) <= limit_bytes) & (np.arange(len(order)) < limit_words)
        if not fits.all():
            self.threshold = max(self.threshold, float(priorities[order[np.argmin(fits)]]))
        self._table = table.filter(pa.array(priorities > self.threshold)).combine_chunks()

    def finish(self) -> "pa.Table":
        """The words that are kept, in no order."""
        assert self._table is not None
        return self._table


def _grouped(tables: list["pa.Table"]) -> "pa.Table":
    """One row for each word of `tables`."""
    import pyarrow as pa

    grouped = pa.concat_tables(tables).group_by(["hash", "word"], use_threads=False)
    return grouped.aggregate([("count", "sum")]).rename_columns(["hash", "word", "count"])
