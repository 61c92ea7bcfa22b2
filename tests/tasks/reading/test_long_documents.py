"""Documents of any length: split at white space, in bounded memory."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.reading import batches, long_documents, sources
from tasks.reading.formats import lines
from tasks.terminal.command_line import UserError
from tests.support import corpora
from tests.support.processes import started

ANY_FOLDER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows(text, piece_bytes=64 << 20, longest=4 << 20, count=1024):
    found = corpora.read(text, piece_bytes, count, max_document_bytes=longest)
    return [tuple(row.values())[:5] for row in found]


# --- splitting


def expected_parts(text, longest):
    """Splits a text by the documented rule, in characters instead of bytes."""
    parts = []
    while len(text.encode()) > longest:
        fits, size = 0, 0
        for fits, character in enumerate(text):  # noqa: B007
            size += len(character.encode())
            if size > longest:
                break
        spaces = [i for i in range(1, fits + 1) if text[i].isspace()]
        cut = spaces[-1] if spaces else fits
        parts.append(text[:cut])
        text = text[cut + bool(spaces) :]
    return [*parts, text]


ALPHABET = "ab\r  é€😀\u2003\u00a0\u3000\u1680\u2028\t\x1f\x00"
LONG_TEXT = st.text(st.sampled_from(ALPHABET), max_size=60)


@given(text=LONG_TEXT, longest=st.integers(4, 40), sizes=st.lists(st.integers(1, 9)))
def test_a_document_is_split_at_the_last_white_space_whatever_the_chunks(text, longest, sizes):
    data, chunks = text.encode(), []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    parts = list(long_documents.split([*chunks, data], longest))
    assert [part.decode() for part in parts] == expected_parts(text, longest)
    assert all(len(part) <= longest for part in parts)


@ANY_FOLDER
@given(
    texts=st.lists(LONG_TEXT.filter(str.strip), min_size=1, max_size=8),
    longest=st.integers(4, 30),
    piece_bytes=st.integers(20, 200),
    block=st.integers(8, 40),
    batch=st.integers(1, 4),
)
def test_parts_are_the_same_from_every_format(
    tmp_path, monkeypatch, texts, longest, piece_bytes, block, batch
):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block)
    monkeypatch.setattr(lines, "_LONG_LINE_BYTES", block)
    monkeypatch.setattr(long_documents, "_CHUNK_BYTES", block)
    monkeypatch.setattr(batches, "BATCH_BYTES", 40)
    ids = [f"id{i}" for i in range(len(texts))]
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "a.parquet", row_group_size=3)
    corpora.write_json(tmp_path / "a.jsonl", dict(zip(ids, texts, strict=True)))
    (tmp_path / "a.txt").write_text("\r\n".join(text + " " for text in texts), newline="")
    expected = []
    for name, text in zip(ids, texts, strict=True):
        parts = expected_parts(text, longest)
        for number, part in enumerate(parts, 1):
            part_name = name if number == 1 else f"{name}#part{number}"
            expected.append((part_name, part, None, number if len(parts) > 1 else 0))
    for form in ("parquet:{}/a.parquet", "json:{}/a.jsonl"):
        got = rows(f"{form.format(tmp_path)}?validation=0", piece_bytes, longest, batch)
        assert [row[1:] for row in got] == expected
        halved = rows(f"{form.format(tmp_path)}?validation=0.5", piece_bytes, longest, batch)
        splits = {}
        for split, name, *_ in halved:
            splits.setdefault(name.partition("#")[0], set()).add(split)
        assert sorted(row[1:] for row in halved) == sorted(expected)
        assert all(len(of_one) == 1 for of_one in splits.values())
    got = rows(f"text:{tmp_path}/a.txt?validation=0", piece_bytes, longest, batch)
    assert [row[2] for row in got] == [
        part
        for text in texts
        for part in expected_parts(text + " ", longest)
        if part.encode().strip()
    ]


def test_only_the_part_of_text_that_is_not_utf8_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"aaaa bbbb cc\xffc dddd\nshort\n")
    got = rows(f"text:{tmp_path}/a.txt?validation=0", longest=5)
    assert [row[1:] for row in got] == [
        ("a.txt:0", "aaaa", None, 1),
        ("a.txt:0#part2", "bbbb", None, 2),
        ("a.txt:0#part3", None, "invalid UTF-8", 3),
        ("a.txt:0#part4", "dddd", None, 4),
        ("a.txt:20", "short", None, 0),
    ]


def test_the_longest_document_is_part_of_the_record(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    spec = sources.parse(f"text:{tmp_path}/a.txt")
    assert sources.resolve(spec).record["max_document_bytes"] == 256 << 10
    assert sources.resolve(spec, max_document_bytes=9).record["max_document_bytes"] == 9
    with pytest.raises(UserError, match="at least 4"):
        sources.resolve(spec, max_document_bytes=3)


# --- long lines of JSON


def test_a_line_of_json_over_the_limit_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_LONG_LINE_BYTES", 100)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(lines, "LONGEST_BYTES", 1000)
    corpora.write_json(tmp_path / "a.jsonl", ["x" * size for size in (50, 500, 5000, 5)])
    got = rows(f"json:{tmp_path}/a.jsonl?validation=0")
    assert [row[3] for row in got] == [None, None, "a line longer than 64 MiB", None]
    assert [len(row[2] or "") for row in got] == [50, 500, 0, 5]


# --- one large row group


@pytest.mark.parametrize("piece_bytes", [50_000, 1 << 20])
def test_one_row_group_fills_several_workers(tmp_path, piece_bytes):
    texts = [f"{i} " + "x" * random.Random(i).randrange(800) for i in range(2000)]
    table = pa.table({"text": texts, "id": [None if i % 3 else i for i in range(2000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2000)
    corpus = sources.resolve(sources.parse(f"parquet:{tmp_path}/a.parquet"), piece_bytes)
    assert len(corpus.pieces) == (17 if piece_bytes == 50_000 else 8)
    got = rows(f"parquet:{tmp_path}/a.parquet?validation=0", piece_bytes)
    assert [row[2] for row in got] == texts
    assert [row[1] for row in got][:4] == ["0", "a.parquet:1", "a.parquet:2", "3"]
    assert len({row[1] for row in got}) == 2000


# --- odd files


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_byte_order_marks_returns_and_nul_are_handled(tmp_path, end):
    data = "\ufeffone\r\n\r\ntwo\x00two\n  \nthree \r" + end
    (tmp_path / "a.txt").write_text(data, newline="")
    got = rows(f"text:{tmp_path}/a.txt?validation=0")
    assert [row[1:3] for row in got] == [
        ("a.txt:0", "one"),
        ("a.txt:10", "two\x00two"),
        ("a.txt:21", "three \r" if end == "\r\n" else "three "),
    ]


def test_the_columns_of_every_json_file_are_checked(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 3)
    (tmp_path / "b.jsonl").write_text('\n{"text": "x"}\n{"text": 5}\n')
    assert len(rows(f"json:{tmp_path}/*.jsonl?validation=0")) == 5
    (tmp_path / "c.jsonl").write_text('{"texts": "x"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl has no column text \(did you mean texts"):
        rows(f"json:{tmp_path}/*.jsonl")
    (tmp_path / "c.jsonl").write_text('{"text": 5}\n{"text": [1]}\n')
    with pytest.raises(UserError, match=r"c\.jsonl: column text is array, number, not text"):
        rows(f"json:{tmp_path}/*.jsonl")


# --- memory

MEASURE = """
import sys
import fsspec, numpy, pyarrow, pyarrow.parquet, pyarrow.compute as pc
from tasks.reading import sources
spec = sources.parse(sys.argv[1])
def peak():
    # Not getrusage's, which starts with the peak of the parent process.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) >> 10
before = peak()
corpus = sources.resolve(spec)
size = documents = 0
for piece in corpus.pieces:
    for split, batch in sources.read(corpus, piece):
        assert batch.nbytes < 9 << 20
        size += pc.sum(pc.binary_length(batch.column("text"))).as_py()
        documents += batch.num_rows
print(before, peak(), size, documents)
"""


def measure(tmp_path, form, chunk, mb):
    """Returns (growth of a reading process's peak in MiB, bytes of its documents, their number)."""
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": [chunk * mb]}), path)
    else:
        before, after = ('{"id": 1, "text": "', '"}') if form == "json" else ("", "")
        with path.open("w", encoding="utf-8") as file:
            file.writelines([before, *[chunk] * mb, after])
    return reading(f"{form}:{path}?validation=0")


def reading(corpus):
    done = started("-c", MEASURE, corpus, check=True)
    before, peak, size, documents = map(int, done.stdout.split())
    print(f"{corpus}: {before} MiB before, {peak} at the most")
    return peak - before, size, documents


# 1 MiB of UTF-8, with an emoji that makes Python's strings wide.
CHUNK = "\U0001f600" + "wide text " * 104_857


@pytest.mark.processes
@pytest.mark.parametrize("form", ["text", "json", "parquet"])
def test_a_line_of_50_mb_takes_little_memory(tmp_path, form):
    growth, size, documents = measure(tmp_path, form, CHUNK, 50)
    assert 49 << 20 < size < 51 << 20
    assert documents in range(200, 205)  # of 256 KiB
    assert growth < {"text": 130, "json": 800, "parquet": 300}[form]


@pytest.mark.slow
def test_a_row_group_of_300_mb_is_read_in_bounded_memory(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=6)) for _ in range(10_000)]
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        texts = [" ".join(rng.choices(words, k=400)) for _ in range(110_000)]
        writer.write_table(pa.table({"text": texts}), row_group_size=110_000)
    growth, size, documents = reading(f"parquet:{tmp_path}/a.parquet?validation=0")
    assert size > 300_000_000
    assert documents == 110_000
    assert growth < 150
