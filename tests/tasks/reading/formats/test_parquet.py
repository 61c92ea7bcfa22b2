"""Parquet: parts of a row group go on where the part before them ended."""

import gc
import os
import pathlib
import random
import shutil
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources
from tasks.reading.formats import parquet
from tasks.terminal.command_line import UserError

ROWS = [4000, 10, 3000]  # of row groups
# Texts stand in the file, in pages smaller than what is read ahead.
PLAIN = {"compression": "none", "use_dictionary": False, "data_page_size": 20_000}


@pytest.fixture
def corpus(tmp_path):
    """A file of three row groups, in pieces much smaller than the large ones."""
    texts = pa.table({"text": [f"text {number} {'x' * 2000}" for number in range(sum(ROWS))]})
    with pq.ParquetWriter(tmp_path / "a.parquet", texts.schema, **PLAIN) as writer:
        for end, rows in zip([4000, 4010, 7010], ROWS, strict=True):
            writer.write_table(texts.slice(end - rows, rows))
    return sources.resolve(sources.parse(f"parquet:{tmp_path}/a.parquet?validation=0"), 1_000_000)


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
    assert texts == [f"text {number} {'x' * 2000}" for number in range(sum(ROWS))]
    assert groups == [0, 1, 2]
    groups.clear()
    # Another process reads every other piece.
    assert read(corpus, range(0, len(corpus.pieces), 2)) == found[::2]
    assert groups == [0, 1, 2]


def test_parts_in_any_order_hold_the_same_documents(corpus):
    whole = read(corpus, range(len(corpus.pieces)))
    numbers = random.Random(3).choices(range(len(corpus.pieces)), k=40)
    for documents in (7, 1000):
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


def test_a_path_that_names_another_file_is_opened_again(corpus, tmp_path):
    path, kept = tmp_path / "a.parquet", tmp_path / "kept"
    whole = read(corpus, range(5))
    read(corpus, [0, 1])
    path.rename(kept)
    shutil.copy2(kept, path)
    kept.write_bytes(kept.read_bytes().replace(b"text ", b"TEXT "))  # the file that was open
    assert read(corpus, range(2, 5)) == whole[2:]


def test_a_file_written_and_restored_within_a_part_is_opened_again(corpus, groups, tmp_path):
    path = tmp_path / "a.parquet"
    data, state = path.read_bytes(), path.stat()
    whole = read(corpus, range(3))
    reader = sources.read(corpus, corpus.pieces[1], 10)
    next(reader)
    path.write_bytes(data.replace(b"text ", b"TEXT "))
    with pytest.raises(UserError, match=str(path)):
        list(reader)
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    groups.clear()
    assert read(corpus, [2], 10) == whole[2:3]
    assert groups == [0]  # what was read ahead is of the other text


def test_readers_by_turns_close_their_files(corpus, tmp_path):
    spec = sources.parse(f"parquet:{tmp_path}/a.parquet?validation=0.5")
    other = sources.resolve(spec, 1_000_000)

    def opened():
        links = pathlib.Path("/proc/self/fd").iterdir()
        return sum("a.parquet" in os.readlink(each) for each in links if each.is_symlink())

    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ResourceWarning)
            for number in range(12):
                readers = [sources.read(each, each.pieces[number], 10) for each in (corpus, other)]
                for _ in zip(*readers, strict=False):
                    pass
                for reader in readers:
                    list(reader)
                assert opened() <= 1
        assert said == []
    finally:
        gc.enable()
