"""Word counts are equal for any pieces, order and workers; samples of them are unbiased."""

import hashlib
import json
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources
from tests.support.corpora import write_json
from tests.support.counted_words import passages, words_of
from vocab import count, word_splitter

DRAW = random.Random(1)
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]


def text(number):
    return " ".join("".join(DRAW.choices(WORDS, k=DRAW.randint(1, 3))) for _ in range(number))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    return write_json(path, [*(text(200) for _ in range(120)), {"text": 5}]) + "?validation=0"


def hash_of(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


KEY = "0123456789abcdef"


def job(spec, folder, piece_bytes=1 << 15, batch_bytes=1 << 20):
    found = sources.resolve(sources.parse(spec), piece_bytes)
    splitter = word_splitter.Splitter(word_splitter.normaliser("nmt_nfkc", False, ()), (), False)
    return count.Job(str(folder), KEY, found, splitter, batch_bytes)


def counted(job, limit_bytes=10**9, limit_words=10**9):
    count.run(job, None)
    return count.add_up(job, limit_bytes, limit_words)


def as_dict(counts):
    return dict(zip(counts.words.to_pylist(), counts.counts.tolist(), strict=True))


def test_all_words_are_counted(corpus, tmp_path):
    expected: Counter[str] = Counter()
    with open(corpus.removeprefix("json:").partition("?")[0]) as file:
        for line in file:
            value = json.loads(line)["text"]
            expected.update("▁" + word for word in str(value).split() if isinstance(value, str))
    ours = counted(job(corpus, tmp_path))
    assert as_dict(ours) == expected
    keys = [(-number, word) for word, number in as_dict(ours).items()]
    assert keys == sorted(keys)
    assert ours.threshold == 1
    assert ours.statistics == {
        "documents": 120,
        "documents_left_out": {"not a string": 1},
        "bytes": ours.statistics["bytes"],
        "words": expected.total(),
        "distinct_words": len(expected),
        "words_kept": expected.total(),
        "distinct_words_kept": len(expected),
        "threshold": 1.0,
    }


def test_files_keep_their_bytes(tmp_path):
    # A run that resumes reads the files that an earlier version wrote.
    numbers = (60, 3000, 1, 900, 0, 2000)
    documents = [" ".join(random.Random(each).choices(WORDS, k=each)) for each in numbers]
    pairs = list(zip(documents, reversed(documents), strict=True))
    rows = [{"inputs": inputs, "targets": targets} for inputs, targets in pairs]
    rows.insert(3, {"inputs": None, "targets": "a"})
    spec = write_json(tmp_path / "pairs.jsonl", rows)
    counted = job(f"{spec}?inputs=inputs&targets=targets&validation=0", tmp_path, 1 << 30, 9000)
    count.run(counted, None)
    schema = pa.schema({"hash": pa.uint64(), "word": pa.large_string(), "count": pa.int64()})
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with pq.ParquetWriter(tmp_path / "expected", schema, **options) as writer:
        batch = []
        for passage in (each for pair in pairs for side in pair for each in passages(side)):
            batch.append(passage)
            if sum(map(len, batch)) >= 9000:
                write(writer, Counter(words_of(counted.splitter, batch)))
                batch = []
        write(writer, Counter(words_of(counted.splitter, batch)))
        size = sum(map(len, documents)) * 2
        statistics = {"documents": 6, "bytes": size, "left_out": {"null": 1}}
        writer.add_key_value_metadata({"statistics": json.dumps(statistics)})
    (path,) = tmp_path.glob("counts-*")
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()


def write(writer, counts):
    words = sorted(counts, key=lambda word: (hash_of(word) % 64, word))
    for part in range(64):
        chosen = [word for word in words if hash_of(word) % 64 == part]
        numbers = [counts[word] for word in chosen]
        columns = [list(map(hash_of, chosen)), chosen, numbers]
        table = pa.table(dict(zip(writer.schema.names, columns, strict=True)), writer.schema)
        writer.write_table(table, row_group_size=max(1, len(chosen)))


@pytest.fixture(scope="module")
def jobs_of_other_sizes(corpus, tmp_path_factory):
    jobs = []
    for piece, batch in [(1 << 16, 1 << 20), (1 << 30, 5000), (3 << 16, 1)]:
        jobs.append(job(corpus, tmp_path_factory.mktemp("counts"), piece, batch))
        count.run(jobs[-1], None)
    return jobs


@pytest.mark.parametrize("limit_words", [10**9, 6000, 3000, 40])
def test_pieces_and_batches_do_not_matter(jobs_of_other_sizes, limit_words):
    found = []
    for each in jobs_of_other_sizes:
        counts = count.add_up(each, 10**9, limit_words)
        found.append((as_dict(counts), counts.threshold, counts.statistics))
        assert len(counts.words) <= limit_words
        # The counts of kept words make up for the words left out.
        error = 3 / limit_words**0.5
        assert counts.counts.sum() == pytest.approx(counts.statistics["words"], rel=error)
    assert found[0] == found[1] == found[2]


def test_the_sample_of_words_is_unbiased():
    # 40 frequent words, and 20,000 that occur once or twice, half of them in another script.
    rare = [f"▁{'rare' if i % 2 else '世界'}{i}" for i in range(20_000)]
    table = {
        **{f"▁often{i}": 1000 + i for i in range(40)},
        **{w: 1 + i % 2 for i, w in enumerate(rare)},
    }
    kept = count._Kept(10**9, 3000)
    kept.add(as_table(table))
    found = kept.finish()
    weights = {
        word: max(number, kept.threshold)
        for word, number in zip(
            found.column("word").to_pylist(), found.column("count").to_pylist(), strict=True
        )
    }
    assert 2990 < len(weights) <= 3000
    assert all(weights[f"▁often{i}"] == 1000 + i for i in range(40))
    assert 9 < kept.threshold < 12
    for part in ("rare", "世界"):
        true = sum(number for word, number in table.items() if part in word)
        assert sum(weights[word] for word in weights if part in word) == pytest.approx(
            true, rel=0.1
        )


def as_table(table):
    names = list(table)
    hashes = np.array([hash_of(word) for word in names], np.uint64)
    return pa.table(
        {"hash": hashes, "word": pa.array(names, pa.large_string()), "count": list(table.values())}
    )


@pytest.mark.parametrize("limits", [(10**9, 500), (3000, 10**9)])
def test_the_kept_words_do_not_depend_on_the_order(limits):
    names = [text(1) + "x" * (i % 30) for i in range(3000)]
    table = Counter({word: 1 + i % 9 for i, word in enumerate(names)})
    expected = None
    for chunks in (1, 7, 50):
        order = random.Random(chunks).sample(list(table), len(table))
        kept = count._Kept(*limits)
        for start in range(chunks):
            kept.add(as_table({word: table[word] for word in order[start::chunks]}))
        found = sorted(kept.finish().column("word").to_pylist()), kept.threshold
        assert sum(len(word.encode()) for word in found[0]) <= limits[0]
        assert 100 < len(found[0]) <= limits[1]
        expected = expected or found
        assert found == expected


def test_a_threshold_is_rounded_up_or_down():
    hashes = np.array([hash_of(str(i)) for i in range(10_000)], np.uint64)
    found = count._rounded(3.25, hashes)
    assert set(found) == {3, 4}
    assert found.mean() == pytest.approx(3.25, abs=0.02)
    assert set(count._rounded(1.0, hashes)) == {1}


def test_a_word_is_left_out_after_a_longer_one_even_if_it_fits():
    # Otherwise the result would depend on which of the two came first.
    rare, long = "▁rare", "▁" + "long" * 30
    table = {"▁often": 10**12, rare: 1, long: 10**6}
    for first in (["▁often", long], ["▁often", rare], [rare, long]):
        kept = count._Kept(limit_bytes=40, limit_words=10)
        kept.add(as_table({word: table[word] for word in first}))
        kept.add(as_table({word: table[word] for word in table.keys() - set(first)}))
        assert kept.finish().column("word").to_pylist() == ["▁often"]


def test_finished_pieces_are_reused(corpus, tmp_path, capsys):
    ours = job(corpus, tmp_path)
    first = as_dict(counted(ours))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == len(ours.corpus.pieces) > 3
    paths[1].unlink()
    before = [path.stat().st_mtime_ns for path in paths if path.exists()]
    assert as_dict(counted(ours)) == first
    assert (
        f"reusing the counts of {len(paths) - 1} of {len(paths)} pieces" in capsys.readouterr().out
    )
    assert [path.stat().st_mtime_ns for path in [paths[0], *paths[2:]]] == before
    count.clean(str(tmp_path), KEY)
    assert sorted(tmp_path.iterdir()) == paths
    count.clean(str(tmp_path), "f" * 16)
    assert not list(tmp_path.iterdir())


def test_files_of_a_user_are_left_alone(tmp_path):
    theirs = ["counts-2023.csv", "counts-x-000001.parquet", f"counts-{KEY}-000001.parquet.bak"]
    for name in (*theirs, f"counts-{KEY}-000001.parquet"):
        (tmp_path / name).touch()
    count.clean(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)


def test_reading_the_files_in_several_passes_gives_the_same_counts(corpus, tmp_path):
    ours = job(corpus, tmp_path)
    whole = as_dict(counted(ours))
    kept = counted(ours, limit_words=len(whole))  # the files have several times as many rows
    assert as_dict(kept) == whole
