"""Corpora: splits, pieces, and every document read exactly once."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import pickle
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.reading import sources, splits
from tasks.reading.formats import lines as lines_format
from tasks.terminal.command_line import UserError
from tests.support.corpora import known

ROOT = pathlib.Path(__file__).parents[3]
ANY_FOLDER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def resolve(text, piece_bytes=64 << 20):
    return sources.resolve(sources.parse(text), piece_bytes)


def rows(text, piece_bytes=64 << 20, batch_documents=1024):
    """Returns (split, id, text, problem) of all documents, in the order of the pieces."""
    corpus = resolve(text, piece_bytes)
    found = []
    for piece in corpus.pieces:
        for split, batch in sources.read(corpus, piece, batch_documents):
            assert split in piece.splits
            assert batch.schema.names == ["id", "text", "problem", "part", "place"]
            assert 0 < batch.num_rows <= batch_documents
            found += [(split, *list(row.values())[:3]) for row in batch.to_pylist()]
    return found


def write_parquet(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)


# --- lines


def expected_lines(data: bytes, name: str):
    found, position = [], 0
    for line in data.split(b"\n"):
        body = line.removesuffix(b"\r")
        if line.strip():
            try:
                found.append((f"{name}:{position}", body.decode(), None))
            except UnicodeDecodeError:
                found.append((f"{name}:{position}", None, "invalid UTF-8"))
        position += len(line) + 1
    return found


LINES = st.lists(
    st.sampled_from([b"", b" ", b"a", b"ab c", "ș€".encode(), b"\xff", b"x" * 40, b"a\rb"])
)


@ANY_FOLDER
@given(
    lines=LINES,
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    piece_bytes=st.integers(1, 60),
    block=st.integers(1, 50),
    batch=st.integers(1, 5),
)
def test_every_line_of_text_is_read_once_whatever_the_pieces(
    tmp_path, monkeypatch, lines, end, last, piece_bytes, block, batch
):
    monkeypatch.setattr(lines_format, "_BLOCK_BYTES", block)
    data = end.join(lines) + (end if last else b"")
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "more.txt").write_bytes(b"at least one")
    (tmp_path / "none.txt").write_bytes(b"")
    got = rows(f"text:{tmp_path}/*.txt?validation=0", piece_bytes, batch)
    assert [row[1:] for row in got] == [
        *expected_lines(data, "a.txt"),
        ("more.txt:0", "at least one", None),
    ]


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=8), st.lists(st.integers()))


@ANY_FOLDER
@given(
    documents=st.lists(st.fixed_dictionaries({"text": VALUES}, optional={"id": VALUES})),
    piece_bytes=st.integers(1, 100),
)
def test_every_json_line_is_read_once_whatever_the_pieces(tmp_path, documents, piece_bytes):
    documents = [{"text": "first", "id": "one"}, *documents]
    data = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "a.jsonl").write_text(data)
    whole = rows(f"json:{tmp_path}/a.jsonl?validation=0", 1 << 30)
    assert rows(f"json:{tmp_path}/a.jsonl?validation=0", piece_bytes) == whole
    assert len(whole) == len(documents)
    for (_, id, text, problem), document in zip(whole, documents, strict=True):
        value = document["text"]
        assert text == (value if isinstance(value, str) else None)
        assert problem == (
            None if isinstance(value, str) else "null" if value is None else "not a string"
        )
        if document.get("id") is not None:
            assert id == str(document["id"])


def test_a_bad_line_of_json_is_one_bad_document(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "good", "id": 7}',
        b'{"text": "cut',
        b'{"text": null}',
        b'{"text": 5}',
        b'{"body": "x"}',
        b"[1]",
        b'{"text": "\xff"}',
        rb'{"text": "\ud800"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    found = rows(f"json:{tmp_path}/a.jsonl?validation=0")
    assert [row[3] for row in found] == [
        *(None, "invalid JSON", "null", "not a string", "missing column", "missing column"),
        *("invalid UTF-8", "invalid UTF-8", "invalid JSON", None),
    ]
    assert found[0][1:3] == ("7", "good")
    assert found[-1][1:3] == (f"a.jsonl:{sum(len(line) + 2 for line in lines[:-1])}", "last")


# --- parquet


@ANY_FOLDER
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=30)), min_size=1, max_size=60),
    group=st.integers(1, 20),
    piece_bytes=st.integers(1, 400),
    batch=st.integers(1, 7),
)
def test_every_row_is_read_once_whatever_the_pieces(tmp_path, texts, group, piece_bytes, batch):
    write_parquet(tmp_path / "a.parquet", {"text": texts}, row_group_size=group)
    got = rows(f"parquet:{tmp_path}/*.parquet?validation=0", piece_bytes, batch)
    assert got == [
        ("train", f"a.parquet:{i}", text, "null" if text is None else None)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "b"]).dictionary_encode(),
        pa.array(["a", None, "b"], pa.large_string()),
        pa.array([b"a", None, b"b"], pa.binary()),
    ],
)
def test_every_arrow_type_of_text_is_read(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", {"body": column, "key": [1, None, 3]})
    got = rows(f"parquet:{tmp_path}/a.parquet?column=body&id=key&validation=0")
    assert [row[1:] for row in got] == [
        ("1", "a", None),
        ("a.parquet:1", None, "null"),
        ("3", "b", None),
    ]


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary())]
)
@pytest.mark.parametrize("kind_of_file", known("parquet", "arrow"))
def test_ids_of_bytes_are_text(tmp_path, kind, kind_of_file):
    values = [b"x1", None, "\u0219".encode(), b"\xff"]
    ids = (
        pa.array(values, pa.binary()).cast(kind)
        if kind.id != pa.lib.Type_DICTIONARY
        else pa.array(values, pa.binary()).dictionary_encode()
    )
    table = pa.table({"id": ids, "text": list("abcd")})
    name = f"a.{kind_of_file}"
    if kind_of_file == "arrow":
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, tmp_path / name)
    spec = f"{kind_of_file}:{tmp_path}/{name}?validation=0"
    assert [row[1] for row in rows(spec)] == ["x1", f"{name}:1", "\u0219", "b'\\xff'"]
    # A cache of version 0.2.0 has other ids, and keeps them when it is built further.
    old = sources.resolve(sources.parse(spec), rules=2)
    assert (old.record["rules"], resolve(spec).record["rules"]) == (2, 3)
    (piece,) = old.pieces
    (batch,) = [batch for _, batch in sources.read(old, piece)]
    assert batch.column("id")[0].as_py() == "b'x1'"
    pq.write_table(pa.table({"id": ["x1"], "text": ["a"]}), tmp_path / "b.parquet")
    assert resolve(f"parquet:{tmp_path}/b.parquet").record["rules"] == 2


def test_batches_are_bounded_in_bytes(tmp_path):
    texts = ["x" * 200_000] * 100
    write_parquet(tmp_path / "a.parquet", {"text": texts})
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for text in (f"parquet:{tmp_path}/a.parquet", f"text:{tmp_path}/a.txt"):
        corpus = resolve(f"{text}?validation=0", 1 << 30)
        got = [
            batch for piece in corpus.pieces for _, batch in sources.read(corpus, piece)
        ]  # fmt: skip
        assert sum(batch.num_rows for batch in got) == 100
        assert max(batch.num_rows for batch in got) <= 25


# --- splits and ids


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("ro_train.parquet", "train"),
        ("data/validation-00000-of-00002.parquet", "validation"),
        ("wiki.valid.txt", "validation"),
        ("val/part-1", "validation"),
        ("DEV.txt", "validation"),
        ("testing.txt", "test"),
        ("train/test.txt", "test"),
        ("latest.txt", "train"),
        ("interval.txt", "train"),
        ("devices.txt", "train"),
    ],
)
def test_the_words_of_a_file_name_determine_its_split(name, split):
    assert splits.split_of(name) == split


@pytest.fixture
def three_splits(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(f"of {name}\n" * 50)
    return f"text:{tmp_path}/*.txt"


def texts_by_split(text):
    found = {}
    for split, _, document, _ in rows(text):
        found.setdefault(split, set()).add(document)
    return found


def test_a_corpus_with_its_own_validation_keeps_it(three_splits):
    own = {"train": {"of train"}, "validation": {"of valid"}}
    assert texts_by_split(f"{three_splits}?split=train") == own
    assert texts_by_split(f"{three_splits}?split=validation") == {"validation": {"of valid"}}
    assert texts_by_split(f"{three_splits}?split=test") == {
        "train": {"of test"},
        "validation": {"of valid"},
    }


def test_a_missing_split_lists_the_existing_ones(three_splits):
    with pytest.raises(UserError, match="no split dev2; it has test, train, validation"):
        resolve(f"{three_splits}?split=dev2")
    alone = three_splits.replace("*", "valid")
    with pytest.raises(UserError, match="no split train; it has validation"):
        resolve(f"{alone}?split=train")
    assert texts_by_split(f"{alone}?validation=0") == {"train": {"of valid"}}
    assert texts_by_split(f"{alone}?split=validation") == {"validation": {"of valid"}}


def test_documents_are_held_out_by_a_hash_of_their_id(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5000}, row_group_size=100)
    spec = f"parquet:{tmp_path}/a.parquet?validation=0.1"
    got = rows(spec)
    held = {row[1] for row in got if row[0] == "validation"}
    assert len(got) == 5000
    assert 400 < len(held) < 600
    fine = rows(spec, 200)
    assert len(resolve(spec, 200).pieces) > 10
    assert {row[1] for row in fine if row[0] == "validation"} == held
    alone = rows(f"{spec}&split=validation")
    assert {row[:2] for row in alone} == {("validation", id) for id in held}
    with pytest.raises(UserError, match="validation=0 holds nothing out"):
        resolve(f"parquet:{tmp_path}/a.parquet?validation=0&split=validation")


def test_the_same_files_elsewhere_are_the_same_corpus(tmp_path):
    for place in ("here", "over/there"):
        for name in ("sub/a.parquet", "b.parquet"):
            write_parquet(tmp_path / place / name, {"text": ["some", "text"]})
    here, there = (f"parquet:{tmp_path}/{place}/**/*.parquet" for place in ("here", "over/there"))
    assert resolve(here).record == resolve(there).record
    assert rows(here) == rows(there)
    assert str(tmp_path) not in json.dumps(resolve(here).record)
    write_parquet(tmp_path / "over/there/b.parquet", {"text": ["some", "else"]})
    assert resolve(here).record != resolve(there).record


def test_a_small_corpus_still_fills_several_workers(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n" * 100_000)
    pieces = resolve(f"text:{tmp_path}/a.txt").pieces
    assert len(pieces) == 8
    assert len({piece.name for piece in pieces}) == 8
    assert sum(piece.bytes for piece in pieces) == 1_100_000
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    assert len(resolve(f"text:{tmp_path}/a.txt").pieces) == 1


def test_a_corpus_travels_to_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    (tmp_path / "a.txt").write_text("a\nb\n")
    corpus = resolve(f"text:{tmp_path}/a.txt")
    data = pickle.dumps(corpus)
    assert pickle.loads(data) == corpus
    assert b"hf_secret_of_mine" not in data


# --- mistakes of a user


def test_bad_files_are_one_clear_line(tmp_path):
    def refused(text, says):
        with pytest.raises(UserError, match=says):
            resolve(text)

    (tmp_path / "no.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "list.jsonl").write_bytes(b'["x"]\n[\n]')
    write_parquet(tmp_path / "good.parquet", {"texts": ["x"], "number": [5]})
    write_parquet(tmp_path / "none.parquet", {"text": pa.array([], pa.string())})
    refused(f"parquet:{tmp_path}/*.orc", "no file matches")
    refused(f"parquet:{tmp_path}", "is a folder")
    refused(f"parquet:{tmp_path}/no.parquet", "no.parquet cannot be read")
    refused(f"parquet:{tmp_path}/none.parquet", "is empty")
    refused(f"parquet:{tmp_path}/good.parquet?column=number", "is int64, not text")
    refused(f"json:{tmp_path}/list.jsonl", "not JSON lines")
    refused("json:nosuchscheme://x/y", "cannot open")


def test_importing_sources_imports_nothing_heavy():
    command = (
        "import sys, tasks.reading.sources;"
        "assert not {'pyarrow', 'fsspec', 'datasets', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.check_call([sys.executable, "-c", command], cwd=ROOT)


# --- what a document of plain text is


def test_a_file_may_be_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nsecond\r\n")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfno newline")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "odd.txt").write_bytes(b"caf\xe9\n")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("packed\nlines")
    found = rows(f"text:{tmp_path}/*?document=file&validation=0")
    assert [row[1:] for row in found] == [
        ("a.txt:0", "first\n\nsecond\r\n", None),
        ("b.txt:0", "no newline", None),
        ("blank.txt:0", " \n\n", None),  # counted as empty
        ("c.txt.gz:0", "packed\nlines", None),
        ("odd.txt:0", None, "invalid UTF-8"),
    ]


BLOCKS = ["one\ntwo", "three", "four\r\nfive", "si x"]


@pytest.mark.parametrize("end", ["", "\n", "\n\n \t\n"])
@pytest.mark.parametrize("begin", ["", "\n \n"])
def test_blocks_are_read_once_wherever_the_file_is_cut(tmp_path, begin, end):
    text = begin + BLOCKS[0] + "\n\n" + BLOCKS[1] + "\n \n\n" + BLOCKS[2] + "\r\n\r\n" + BLOCKS[3]
    path = tmp_path / "a.txt"
    path.write_bytes((text + end).encode())
    corpus = resolve(f"text:{path}?document=block&validation=0")
    (piece,) = corpus.pieces
    (whole,) = piece.parts
    size = path.stat().st_size
    for first in range(size + 1):
        for second in range(first, size + 1, 3):
            found = []
            bounds = [0, first, second, size]
            for start, stop in itertools.pairwise(bounds):
                if start < stop:
                    part = dataclasses.replace(whole, start=start, stop=stop)
                    cut = dataclasses.replace(piece, parts=(part,))
                    for _, batch in sources.read(corpus, cut):
                        found += zip(
                            *(batch.column(n).to_pylist() for n in ("id", "text")), strict=True
                        )
            assert [text for _, text in found] == BLOCKS
    assert [row[1].rpartition(":")[2] for row in rows(str(corpus.spec))] == [
        str((text + end).index(block)) for block in BLOCKS
    ]


def test_blocks_with_long_lines_keep_their_places(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_format, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(lines_format, "_LONG_LINE_BYTES", 16)
    blocks = ["a" * 50 + "\nb", "c", "d " * 20, "e\n" + "f" * 40]
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(blocks) + "\n")
    expected = [(f"a.txt:{path.read_text().index(block)}", block.strip()) for block in blocks]
    for piece_bytes in (1 << 20, 40, 7):
        found = rows(f"text:{path}?document=block&validation=0", piece_bytes)
        assert [(name, text.strip()) for _, name, text, _ in found] == expected


def test_the_choice_of_a_document_is_printed_and_recorded(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    for query, words in (
        ("", "every line is a document; ?document=file"),
        ("?document=file", "1 files, every file is a document"),
        ("?document=block", "every block of lines"),
    ):
        corpus = resolve(f"text:{tmp_path}/*.txt{query}")
        assert words in corpus.notes[-1]
        assert "held out" not in corpus.notes[-1]
        assert corpus.record["spec"].endswith(query or ".txt")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("?document=file", "; 1% of them are held out for validation, of so few perhaps none"),
        ("?document=file&validation=0.5", ""),
        ("?document=file&validation=0", ""),
        ("?document=line", ""),
    ],
)
def test_a_corpus_of_few_files_may_hold_nothing_out(tmp_path, query, says):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("a\n")
    (note,) = resolve(f"text:{tmp_path}/*.txt{query}").notes
    assert ("held out" in note) == bool(says)
    assert says in note
