"""Counts the words of a corpus of any size, in bounded memory, with any number of workers.

One file of (word, count) per piece of the corpus is written atomically, by an engine or by this
process, so a killed run can resume. If the words do not fit in memory, a sample is kept, which does
not depend on the workers, the runner or the order of the pieces.
"""

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.runners import engines
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from vocab.word_splitter import Splitter

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.tokenizer.word_counts import WordCounter

PREFIX = "counts-"
# Names of our files. Other files in a folder may have the same prefix.
_OURS = re.compile(PREFIX + r"([0-9a-f]{16})-\d{6,}\.parquet")

# Each file is divided into this many parts by the words' hashes, so that one part of all files can
# be added up at a time.
_PARTS = 64
_STATISTICS = b"statistics"


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a worker needs to count."""

    folder: str  # for the count files
    key: str  # hash of everything that the counts depend on, 16 hex digits; part of their names
    corpus: sources.Corpus
    splitter: Splitter
    batch_bytes: int  # a worker writes its counts after this many bytes of text

    def path(self, number: int) -> str:
        return files.join(self.folder, f"{PREFIX}{self.key}-{number:06}.parquet")


@dataclasses.dataclass(frozen=True)
class Counts:
    """The words to train on, most frequent first, with their counts.

    With a `threshold` above 1, a word with count c was kept with probability min(1, c / threshold)
    and its count is max(c, threshold). For any set of words, such as one language's, the expected
    sum of these counts is the true sum.
    """

    words: "pa.Array"
    counts: np.ndarray  # int64
    threshold: float
    statistics: dict[str, Any]


def run(job: Job, runner: engines.Engine | None) -> None:
    """Writes the missing count files, in this process if `runner` is None."""
    pieces = [(number, job.corpus.pieces[number]) for number in _train_pieces(job)]
    names = [job.path(number).rpartition("/")[2] for number, _ in pieces]
    finished = set(files.list_names(job.folder))
    missing = [piece for piece, name in zip(pieces, names, strict=True) if name not in finished]
    if len(missing) < len(pieces):
        print(f"reusing the counts of {len(pieces) - len(missing):,} of {len(pieces):,} pieces")
    title = f"counting the words of {job.corpus.spec}"
    sizes = {name: piece.bytes for name, (_, piece) in zip(names, pieces, strict=True)}
    if runner is None:
        done = sum(sizes.values()) - sum(piece.bytes for _, piece in missing)
        with progress.shown(title, sum(sizes.values()), done, unit="B") as bar:
            for number, piece in missing:
                show = lambda inside, done=done: bar.update(done + inside)  # noqa: E731
                _count_piece(job, (number, piece), show)
                done += piece.bytes
                bar.update(done)
    elif missing:
        runner.check(job.corpus.spec, job.folder)
        slim = dataclasses.replace(job, corpus=engines.without_pieces(job.corpus))
        with engines.files_shown(title, job.folder, sizes, "B"):
            runner.run(functools.partial(_count_piece, slim), missing, job.folder)


def clean(folder: str, *keys: str) -> None:
    """Deletes the count files in `folder`, except files with one of `keys`."""
    for name in files.list_names(folder):
        ours = _OURS.fullmatch(name)
        if ours and ours[1] not in keys:
            files.remove(files.join(folder, name))


def _train_pieces(job: Job) -> list[int]:
    pieces = enumerate(job.corpus.pieces)
    return [number for number, piece in pieces if sources.TRAIN in piece.splits]


def _count_piece(
    job: Job, numbered: tuple[int, sources.Piece], on_read: Any = lambda inside: None
) -> Mapping[str, int]:
    """Writes a piece's counts; returns its numbers of documents and bytes as job counters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, piece = numbered
    problems: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    schema = pa.schema({"hash": pa.uint64(), "word": pa.large_string(), "count": pa.int64()})
    with (
        files.atomic_write(job.path(number)) as file,
        pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        ) as writer,
    ):
        counter = job.splitter.counter()
        for texts in _texts(job.corpus, piece, problems, sums):
            for _ in counter.add(texts, job.batch_bytes):
                _write(writer, counter, sums)
                on_read(min(sums["bytes"], piece.bytes))
        _write(writer, counter, sums)
        statistics = {**sums, "left_out": problems}
        writer.add_key_value_metadata({_STATISTICS: json.dumps(statistics)})
    return sums


def _texts(
    corpus: sources.Corpus, piece: sources.Piece, problems: Counter[str], sums: Counter[str]
) -> Iterator["pa.Array"]:
    """Yields the training split's usable texts, those of a document one after another."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = corpus.spec.unit.columns
    for split, batch in sources.read(corpus, piece):
        if split != sources.TRAIN:
            continue
        problem = pc.fill_null(batch.column("problem"), "")
        if unusable := Counter(filter(None, problem.to_pylist())):
            problems.update(unusable)
            batch = batch.filter(pc.equal(problem, ""))
        sums += Counter(documents=batch.num_rows)  # without a name if there are none
        texts = [batch.column(name).cast(pa.large_string()) for name in columns]
        if len(texts) > 1:
            order = np.arange(len(texts) * batch.num_rows).reshape(len(texts), -1).T.ravel()
            texts = [pa.concat_arrays(texts).take(pa.array(order))]
        yield texts[0]


def _write(writer: Any, counter: "WordCounter", sums: Counter[str]) -> None:
    """Writes the counter's words as `_PARTS` row groups, divided by hash."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words, numbers, hashes, size = counter.take()
    sums += Counter(bytes=size)
    order = pc.array_sort_indices(words).to_numpy()
    parts = hashes % np.uint64(_PARTS)
    order = order[np.argsort(parts[order], kind="stable")]
    ends = np.cumsum(np.bincount(parts, minlength=_PARTS))[:-1]
    for chosen in np.split(order, ends):
        columns = [hashes[chosen], words.take(pa.array(chosen)), numbers[chosen]]
        table = pa.table(dict(zip(writer.schema.names, columns, strict=True)))
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def sizes(jobs: Mapping[str, Job]) -> dict[str, int]:
    """Returns how many bytes of text each job counted."""
    return {name: _statistics([job])[0]["bytes"] for name, job in jobs.items()}


def add_up(
    jobs: "Job | Sequence[Job]",
    limit_bytes: int,
    limit_words: int,
    factors: Sequence[float] = (1.0,),
) -> Counts:
    """Adds up the counts of all pieces; keeps at most `limit_words` words and `limit_bytes` bytes.

    A job's counts are multiplied by its factor and rounded. Raises UserError if train has no text.
    """
    jobs = [jobs] if isinstance(jobs, Job) else jobs
    totals, left_out, rows = _statistics(jobs)
    kept = _Kept(limit_bytes, limit_words)
    for table in _words(jobs, factors, rows, limit_words):
        kept.add(table)
    found = kept.finish()
    if not found.num_rows:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in left_out.items())
        raise UserError(
            f"corpus {', '.join(str(job.corpus.spec) for job in jobs)} has no text in train"
            + (f" (left out: {reasons})" if reasons else "")
        )
    threshold = max(1.0, kept.threshold)
    words, weights = _weighted(found, threshold)
    statistics = {
        "documents": totals["documents"],
        "documents_left_out": dict(sorted(left_out.items())),
        "bytes": totals["bytes"],
        "words": kept.occurrences,
        "distinct_words": kept.seen,
        "words_kept": int(found.column("count").to_numpy().sum()),
        "distinct_words_kept": found.num_rows,
        "threshold": round(threshold, 3),
    }
    return Counts(words, weights, threshold, statistics)


def _statistics(jobs: Sequence[Job]) -> tuple[Counter[str], Counter[str], int]:
    """Returns totals over pieces, documents left out by reason, and the number of rows in files."""
    import pyarrow.parquet as pq

    totals, left_out, rows = Counter[str](), Counter[str](), 0
    for path in (job.path(number) for job in jobs for number in _train_pieces(job)):
        with files.open_read(path) as file:
            metadata = pq.read_metadata(file)
        statistics = json.loads(metadata.metadata[_STATISTICS])
        left_out.update(statistics.pop("left_out"))
        totals.update(statistics)
        rows += metadata.num_rows
    return totals, left_out, rows


def _words(
    jobs: Sequence[Job], factors: Sequence[float], rows: int, limit_words: int
) -> Iterator["pa.Table"]:
    """Yields tables of distinct words with total counts; reads as many parts as fit in memory."""
    passes = min(_PARTS, max(1, math.ceil(rows / (2 * limit_words))))
    for number_of_pass in range(passes):
        tables = []
        for job, factor in zip(jobs, factors, strict=True):
            table = _words_of(job, passes, number_of_pass, limit_words)
            if factor != 1:
                counts = np.rint(table.column("count").to_numpy() * factor).astype(np.int64)
                place = table.schema.get_field_index("count")
                table = table.set_column(place, "count", [counts])
            tables.append(table)
        yield _grouped(tables) if len(tables) > 1 else tables[0]


def _words_of(job: Job, passes: int, number_of_pass: int, limit_words: int) -> "pa.Table":
    import pyarrow.parquet as pq

    tables: list[pa.Table] = []
    waiting = 0
    for number in _train_pieces(job):
        with files.open_read(job.path(number)) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            groups = [
                group
                for group in range(parquet.num_row_groups)
                if group % _PARTS % passes == number_of_pass
            ]
            tables.append(parquet.read_row_groups(groups, use_threads=False))
        waiting += tables[-1].num_rows
        # Add up early, to save memory: some words occur in every piece.
        if waiting > 2 * limit_words:
            tables, waiting = [_grouped(tables)], 0
    return _grouped(tables)


def _weighted(table: "pa.Table", threshold: float) -> tuple["pa.Array", np.ndarray]:
    """Returns the words, most frequent first, and their counts raised to `threshold`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = table.column("count").to_numpy()
    weights = np.maximum(counts, _rounded(threshold, table.column("hash").to_numpy()))
    order = pc.sort_indices(
        pa.table({"weight": weights, "word": table.column("word")}),
        [("weight", "descending"), ("word", "ascending")],
    )
    return table.column("word").combine_chunks().take(order), weights[order.to_numpy()]


def _rounded(threshold: float, hashes: np.ndarray) -> np.ndarray:
    """Returns `threshold` rounded up or down for each hash, so that the mean is `threshold`.

    The lowest 16 bits of the hash decide; they do not affect which words are kept.
    """
    up = (hashes & np.uint64(0xFFFF)) < (threshold % 1) * 0x10000
    return math.floor(threshold) + up.astype(np.int64)


class _Kept:
    """Keeps the words of highest priority, count / u, where u in (0, 1] is the word's hash.

    Source: priority sampling, Duffield, Lund and Thorup, "Priority sampling for estimation of
    arbitrary subset sums", JACM 54 (2007).
    """

    def __init__(self, limit_bytes: int, limit_words: int):
        self._limits = limit_bytes, limit_words
        self._table: pa.Table | None = None
        self.threshold = 0.0  # highest priority of the omitted words
        self.seen = 0
        self.occurrences = 0

    def add(self, table: "pa.Table") -> None:
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
        assert self._table is not None
        return self._table


def _grouped(tables: list["pa.Table"]) -> "pa.Table":
    import pyarrow as pa

    grouped = pa.concat_tables(tables).group_by(["hash", "word"], use_threads=False)
    return grouped.aggregate([("count", "sum")]).rename_columns(["hash", "word", "count"])
