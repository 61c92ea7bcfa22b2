"""Small files are joined into pieces."""

import gzip
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources, splits
from tasks.reading.corpus import TRAIN, SourceFile
from tasks.terminal.command_line import UserError
from tests.support import corpora


def resolve(text, piece_bytes=64 << 20, **options):
    return sources.resolve(sources.parse(text), piece_bytes, **options)


def documents(spec):
    """Returns (split, id, text) of all documents, in the order of the pieces."""
    return [tuple(row.values())[:3] for row in corpora.read(spec)]


def names(corpus):
    return [[part.file.name for part in piece.parts] for piece in corpus.pieces]


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of 100 files of 4 kB, of which some are compressed, and 10 empty ones."""
    for number in range(100):
        lines = "".join(f"{number} {line} {'x' * 90}\n" for line in range(40)).encode()
        if number % 7:
            (tmp_path / f"{number:03}.txt").write_bytes(lines)
        else:
            (tmp_path / f"{number:03}.txt.gz").write_bytes(gzip.compress(lines))
    for number in range(10):
        (tmp_path / f"{number:03}.empty.txt").write_bytes(b"")
    return tmp_path


def test_small_files_are_joined_in_the_order_of_the_listing(folder):
    corpus = resolve(f"text:{folder}/*?validation=0")
    found = names(corpus)
    assert len(found) <= 6
    assert all(piece.bytes <= 64 << 10 for piece in corpus.pieces)
    joined = [name for piece in found for name in piece]
    assert joined == sorted(joined)
    assert len(joined) == 100
    assert not any("empty" in name for name in joined)
    assert len(corpus.record["files"]) == 110
    assert len({piece.name for piece in corpus.pieces}) == len(corpus.pieces)


def test_joining_changes_no_document(folder):
    spec = f"text:{folder}/*?validation=0.2"
    found = documents(spec)
    alone = [row for each in sorted(folder.iterdir()) if each.stat().st_size
             for row in documents(f"text:{each}?validation=0.2")]  # fmt: skip
    assert sorted(found) == sorted(alone)
    assert len(found) == 4000
    assert ("train", "001.txt:0", f"1 0 {'x' * 90}") in found


def test_parquet_files_of_any_size_are_joined_and_cut(tmp_path):
    for number, rows in enumerate((1, 3000, 2, 2, 1)):
        texts = [f"{number} {row} {'y' * 99}" for row in range(rows)]
        pq.write_table(
            pa.table({"text": texts}), tmp_path / f"{number}.parquet", row_group_size=100
        )
    corpus = resolve(f"parquet:{tmp_path}/*.parquet?validation=0")
    found = names(corpus)
    assert found[0][0] == "0.parquet"
    assert found[-1][-3:] == ["2.parquet", "3.parquet", "4.parquet"]
    assert len(found) in (5, 6)
    ids = [id for _, id, _ in documents(f"parquet:{tmp_path}/*.parquet?validation=0")]
    assert len(ids) == len(set(ids)) == 3006


def test_a_piece_has_files_of_one_split_and_one_generation(tmp_path):
    for name in ("a", "b", "c-valid", "d", "e-valid", "f"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    spec = f"text:{tmp_path}/*.txt?split=train"
    assert names(resolve(spec)) == [
        ["a.txt", "b.txt", "d.txt", "f.txt"],
        ["c-valid.txt", "e-valid.txt"],
    ]
    earlier = [["b.txt", "c-valid.txt"], ["d.txt", "f.txt"]]
    assert names(resolve(spec, earlier=earlier)) == [
        ["b.txt"], ["c-valid.txt"], ["d.txt", "f.txt"], ["a.txt"], ["e-valid.txt"],
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["cut short", "written again", "gone"])
def test_every_file_of_a_piece_is_checked(folder, change):
    corpus = resolve(f"text:{folder}/*?validation=0")
    path = folder / corpus.pieces[0].parts[5].file.name
    data = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(data[:-1] if change == "cut short" else data)
    with pytest.raises(UserError, match=path.name):
        for _ in sources.read(corpus, corpus.pieces[0]):
            pass


def test_the_place_of_a_document_names_its_file(tmp_path):
    for number in range(3):
        lines = {f"{number}-{n}": "x" if n else None for n in range(3)}
        corpora.write_json(tmp_path / f"{number}.jsonl", lines)
        ids = [f"{number}-{n}" for n in range(3)]
        table = pa.table({"id": ids, "text": ["x", None, "y"]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    (_,), rows = corpora.pieces_and_rows(f"json:{tmp_path}/*.jsonl?validation=0.4")
    places = {row["id"]: row["place"] for row in rows}
    for number in range(3):
        data = (tmp_path / f"{number}.jsonl").read_bytes()
        for n in range(3):
            file, _, offset = places[f"{number}-{n}"].rpartition(":")
            assert file == f"{number}.jsonl"
            assert data[int(offset) :].startswith(b'{"id": "%d-%d"' % (number, n))
    rows = corpora.read(f"parquet:{tmp_path}/*.parquet?validation=0.4")
    assert {row["id"]: row["place"] for row in rows} == {
        f"{number}-{n}": f"{number}.parquet:{n}" for number in range(3) for n in range(3)
    }


def test_files_of_an_extended_cache_are_told_apart_in_little_time():
    found = [SourceFile("", f"{number:05}.txt", TRAIN, 1, {}) for number in range(30_000)]
    earlier = [[file.name for file in found[:20_000]], [file.name for file in found[20_000:29_990]]]
    started = time.process_time()
    generations = splits.generations(sources.parse("text:*"), found, earlier)
    assert time.process_time() - started < 1  # 10 s where every name is sought in a list
    assert [[each.file for each in some] for some in generations] == [
        found[:20_000], found[20_000:29_990], found[29_990:]
    ]  # fmt: skip


def test_a_cache_of_an_unreleased_version_is_refused(folder):
    record = resolve(f"text:{folder}/*").record
    sources.check_record("cache", record)
    sources.check_record("cache", resolve("python_docs").record)
    del record["rules"]
    with pytest.raises(UserError, match=r"^cache was built before version 0\.2\.0: build it in"):
        sources.check_record("cache", record)
