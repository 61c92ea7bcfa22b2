"""Parquet: parts of a row group go on where the part before them ended."""

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources
from tasks.reading.formats import parquet

ROWS = [4000, 10, 3000]  # of row groups


@pytest.fixture
def corpus(tmp_path):
    """A file of three row groups, in pieces much smaller than the large ones."""
    texts = pa.table({"text": [f"text {number} {'x' * 200}" for number in range(sum(ROWS))]})
    with pq.ParquetWriter(tmp_path / "a.parquet", texts.schema) as writer:
        for end, rows in zip([4000, 4010, 7010], ROWS, strict=True):
            writer.write_table(texts.slice(end - rows, rows))
    return sources.resolve(sources.parse(f"parquet:{tmp_path}/a.parquet?validation=0"), 100_000)


@pytest.fixture
def groups(monkeypatch):
    """The row groups that are decoded, each as often as it is begun."""
    found = []

    class Counting(pq.ParquetFile):
        def iter_batches(self, rows, row_groups, *columns, **options):
            found.extend(row_groups)
            return super().iter_batches(rows, row_groups, *columns, **options)

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    return found


def read(corpus, numbers, documents=100):
    return [
        [
            row["text"]
            for _, batch in sources.read(corpus, piece, documents)
            for row in batch.to_pylist()
        ]
        for piece in (corpus.pieces[number] for number in numbers)
    ]


def test_each_row_group_is_decoded_once_by_parts_in_order(corpus, groups):
    assert len(corpus.pieces) > 10
    found = read(corpus, range(len(corpus.pieces)))
    texts = [text for piece in found for text in piece]
    assert texts == [f"text {number} {'x' * 200}" for number in range(sum(ROWS))]
    assert groups == [0, 1, 2]
    groups.clear()
    # Another process reads every other piece.
    assert read(corpus, range(0, len(corpus.pieces), 2)) == found[::2]
    assert groups == [0, 1, 2]


def test_parts_in_any_order_hold_the_same_documents(corpus):
    whole = read(corpus, range(len(corpus.pieces)))
    numbers = random.Random(3).choices(range(len(corpus.pieces)), k=100)
    for documents in (1, 7, 1000):
        assert read(corpus, numbers, documents) == [whole[number] for number in numbers]


def test_a_part_left_half_way_and_a_fork_begin_again(corpus, groups, monkeypatch):
    whole = read(corpus, range(4))
    read(corpus, [0])
    left = sources.read(corpus, corpus.pieces[1], 10)
    next(left)
    left.close()
    groups.clear()
    assert read(corpus, [1]) == whole[1:2]
    assert groups == [0]
    other = os.getpid() + 1
    monkeypatch.setattr(parquet.os, "getpid", lambda: other)
    assert read(corpus, [2]) == whole[2:3]
    assert groups == [0, 0]
    assert read(corpus, [3]) == whole[3:4]
    assert groups == [0, 0]
