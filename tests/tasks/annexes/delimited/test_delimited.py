"""CSV and TSV: the rows of Python's `csv`, and what becomes of bad ones."""

import csv
import io
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.reading import sources
from tasks.reading.columns import INVALID
from tasks.reading.formats import lines as lines_format
from tasks.terminal.command_line import UserError
from tests.support.corpora import pieces_and_rows as read

ANY_FOLDER = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def texts(spec, **how):
    return [(row["id"], row["text"], row["problem"]) for row in read(spec, **how)[1]]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(lines_format, "_BLOCK_BYTES", 16)
    monkeypatch.setattr("tasks.reading.cutting._LEAST_PIECE_BYTES", 1)


FIELDS = st.text(st.sampled_from('ab,;"\n\r \té'), max_size=12)


@ANY_FOLDER
@given(
    rows=st.lists(st.lists(FIELDS, min_size=3, max_size=3), min_size=1, max_size=20),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    end=st.sampled_from(["\n", "\r\n"]),
    piece_bytes=st.integers(1, 60),
    count=st.integers(1, 5),
)
def test_rows_that_csv_writes_are_read_once(
    tmp_path, small_blocks, rows, quoting, end, piece_bytes, count
):
    if quoting == csv.QUOTE_MINIMAL:  # does not quote a carriage return by itself
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    out = io.StringIO()
    writer = csv.writer(out, quoting=quoting, lineterminator=end)
    writer.writerows([["id", "text", "more"], *rows])
    (tmp_path / "a.csv").write_bytes(out.getvalue().encode())
    pieces, found = read(f"csv:{tmp_path}/a.csv?validation=0", piece_bytes, count)
    assert [(row["text"], row["problem"]) for row in found] == [(row[1], None) for row in rows]
    given = [(row["id"], row["place"]) for row in found]
    assert [name for name, _ in given] == [
        row[0] or place for row, (_, place) in zip(rows, given, strict=True)
    ]
    offsets = [int(place.rpartition(":")[2]) for _, place in given]
    assert offsets == sorted(set(offsets))
    assert len(pieces) <= 1


BROKEN = st.lists(
    st.sampled_from([b"a,b", b'"a', b'x"', b'"q"z,1', b'"a\nb",c', b"", b",", b"one",
                     b"\xff,\xc3\xa9", b"r\rs,t", b'"",""', b'"un,', b"1,2,3"]),
    max_size=25,
)  # fmt: skip


@ANY_FOLDER
@given(rows=BROKEN)
def test_no_row_vanishes_beside_broken_ones(tmp_path, small_blocks, rows):
    data = b"text,id\n" + b"\n".join(rows) + b"\nlast,one\n"
    (tmp_path / "a.csv").write_bytes(data)
    spec = f"csv:{tmp_path}/a.csv?validation=0"
    _, whole = read(spec, 1 << 30)
    # Every line that is not blank belongs to one row: its bytes are before the next row's.
    starts = [int(row["place"].rpartition(":")[2]) for row in whole]
    for begin, end in zip(starts, [*starts[1:], len(data)], strict=True):
        lines = data[begin:end].split(b"\n")
        if any(
            row["problem"] == "invalid CSV" for row in whole if row["place"] == f"a.csv:{begin}"
        ):
            assert not any(line.strip(b"\r") for line in lines[1:])
    assert whole[-1]["text"] == "last"  # no quote before it swallows it


def test_bad_rows_are_problems_with_their_places(tmp_path):
    rows = [b"text,id,n", b"good,a,1", b"two,b", b"three,c,1,2", b'"open,d,1', b"\xe9,e,1",
            b'"shut"x,f,1', b"", b'"a ""b"",\nc",g,1', b"last,,1"]  # fmt: skip
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    found = read(f"csv:{tmp_path}/a.csv?validation=0")[1]
    assert [(row["text"], row["problem"]) for row in found] == [
        ("good", None),
        (None, "wrong number of fields"),
        (None, "wrong number of fields"),
        (None, "invalid CSV"),
        (None, "invalid UTF-8"),
        (None, "invalid CSV"),
        ('a "b",\nc', None),
        ("last", None),
    ]
    assert found[0]["id"] == "a"
    assert found[4]["id"] == "e"  # a row whose text is not UTF-8 keeps its id
    assert found[3]["place"] == f"a.csv:{3 + sum(len(row) + 2 for row in rows[:4])}"
    assert found[-1]["id"] == found[-1]["place"]


def test_tsv_is_cut_at_any_line_and_knows_no_quotes(tmp_path):
    rows = ["id\ttext", *(f'{i}\t"row {i}, x' for i in range(2000)), "bad"]
    (tmp_path / "a.tsv").write_text("\n".join(rows))
    pieces, found = read(f"tsv:{tmp_path}/a.tsv?validation=0", 4000)
    assert len(pieces) > 1
    assert [row["text"] for row in found] == [*(f'"row {i}, x' for i in range(2000)), None]
    assert found[-1]["problem"] == "wrong number of fields"
    (tmp_path / "q.tsv").write_text('id\ttext\na\t"x\ty"\n')
    assert texts(f'tsv:{tmp_path}/q.tsv?quote="&validation=0') == [("a", "x\ty", None)]
    (tmp_path / "t5.tsv").write_text("who?\tme\nwhat?\tit\n")
    spec = f"tsv:{tmp_path}/t5.tsv?columns=question,answer&column=answer&validation=0"
    assert [text for _, text, _ in texts(spec)] == ["me", "it"]


@pytest.mark.parametrize("delimiter", [";", "tab", "|"])
def test_delimiters_and_quotes_are_options(tmp_path, delimiter):
    character = "\t" if delimiter == "tab" else delimiter
    (tmp_path / "a.csv").write_text(f"id{character}text\na{character}'x{character}\ny'\n")
    spec = f"csv:{tmp_path}/a.csv?delimiter={delimiter}&quote='&validation=0"
    assert texts(spec) == [("a", f"x{character}\ny", None)]
    assert sources.parse(str(sources.parse(spec))) == sources.parse(spec)


def test_large_fields_are_read_and_too_large_ones_left_out(tmp_path, monkeypatch):
    text = "word, " * (1 << 20)
    (tmp_path / "a.csv").write_text(f'id,text\na,"{text}"\nb,x\n')
    spec = f"csv:{tmp_path}/a.csv?validation=0"
    found = texts(spec)
    assert "".join(piece for _, piece, _ in found[:-1]).replace(" ", "") == text.replace(" ", "")
    assert found[-1] == ("b", "x", None)
    monkeypatch.setattr(lines_format, "LONGEST_BYTES", 1 << 20)
    assert [(name, problem) for name, _, problem in texts(spec)] == [
        ("a.csv:8", "a line longer than 64 MiB"), ("b", None),
    ]  # fmt: skip
    lines = "".join(f"line {i}\n" for i in range(200_000))
    (tmp_path / "a.csv").write_text(f'id,text\na,"{lines}"\nb,x\n')
    problems = [problem for _, _, problem in texts(spec)]
    assert problems[0] == "invalid CSV"  # its lines are rows then, and bad ones
    assert problems[-1] is None
    assert set(problems[1:-1]) <= {"wrong number of fields", "invalid CSV"}


def test_pairs_of_csv_are_those_of_json(tmp_path):
    rows = [
        {"id": "a", "q": "Ä, \n", "n": "3", "a": "yes"},
        {"id": "b", "q": "x", "n": "", "a": ""},
    ]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "q", "n", "a"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "?inputs={q} </s> {n}&targets=a&validation=0"
    of_csv = read(f"csv:{tmp_path}/a.csv{options}")[1]
    of_json = read(f"json:{tmp_path}/a.jsonl{options}")[1]
    assert [{**row, "place": ""} for row in of_csv] == [{**row, "place": ""} for row in of_json]
    with open(tmp_path / "a.csv", "ab") as file:
        file.write(b"c,\xff,1,y\nd,x\n")
    assert [row["problem"] for row in read(f"csv:{tmp_path}/a.csv{options}")[1]][2:] == [
        INVALID, "wrong number of fields",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("id,body\na,x\n", "", "has no column text; it has id, body: add ?column=NAME"),
        ("id;text\na;x\n", "", "if a ';' separates fields, read it as csv with ?delimiter=;"),
        ("id\ttext\na\tx\n", "", "read it as csv with ?delimiter=tab"),
        ("id,text,text\na,x,y\n", "", "has the column text 2 times"),
        ("a,x\n", "?columns=id,body", "?columns=id,body does not name the column text"),
        ("q,a\nx,y\n", "?inputs={question}&targets=a", "has no column question; it has q, a"),
        ('"text\nx\n', "", "cannot be read: its header is invalid CSV"),
        (b"t\xe9xt\nx\n", "", "'utf-8' codec can't decode byte 0xe9"),
        ("", "", "is empty: its 1 files hold no documents"),
        ("\n\n", "", "is empty"),
        ("text\n", "", "is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, content, options, says):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read(f"csv:{path}{options}")
    assert says in str(caught.value)
    assert "a.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_quotes_is_cut_as_lines_are(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{i},row {i}\n" for i in range(100_000)))
    spec = f"csv:{tmp_path}/a.csv?validation=0"
    quoted, found = read(spec, 300_000)
    plain, same = read(f"{spec}&quote=none", 300_000)
    assert found == same
    assert len(found) == 100_000
    assert len(quoted) == 1
    assert len(plain) > 1


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_header_after_blank_lines_is_no_document_wherever_it_is_cut(
    tmp_path, small_blocks, kind, mark
):
    comma = {"csv": ",", "tsv": "\t"}[kind]
    lines = [f"id{comma}text", *(f"{i}{comma}row {i}" for i in range(30))]
    (tmp_path / "a").write_text(mark + "\n" * 12 + "\n".join(lines))
    for piece_bytes in (1, 7, 20, 1000):
        found = texts(f"{kind}:{tmp_path}/a?validation=0", piece_bytes=piece_bytes)
        assert found == [(str(i), f"row {i}", None) for i in range(30)]


def test_a_byte_order_mark_alone_has_no_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "b.csv").write_text("1,a\n")
    found = texts(f"csv:{tmp_path}/*.csv?columns=id,text&validation=0")
    assert found == [("1", "a", None)]


def test_latin_1_is_left_out_row_by_row(tmp_path):
    data = "id,text\n" + "".join(f"{n},caf\xe9 {n}\n" for n in range(5)) + "x,plain\n"
    (tmp_path / "a.csv").write_bytes(data.encode("latin-1"))
    rows = [(row["id"], row["problem"]) for row in read(f"csv:{tmp_path}/a.csv?validation=0")[1]]
    assert rows == [*((str(n), "invalid UTF-8") for n in range(5)), ("x", None)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("csv:a?delimiter=%0A", "delimiter must be one ASCII character"),
        ("csv:a?delimiter=;;", "delimiter must be one ASCII character, or tab, not ';;'"),
        ('csv:a?delimiter="', "are the same"),
        ("csv:a?delimiter='&quote='", "delimiter and quote are the same"),
        ("csv:a?quote=double", "quote must be one ASCII character, or none, not 'double'"),
        ("csv:a?columns=a,,b", "columns=a,,b has an empty or repeated name"),
        ("tsv:a?delimiter=;", "only csv, hf have ?delimiter="),
        ("json:a?columns=a", "only csv, tsv, hf have ?columns="),
        ("tabs:/a/b.tsv.gz", "did you mean tsv:/a/b.tsv.gz?"),
        ("/a/*.csv", "did you mean csv:/a/*.csv?"),
    ],
)
def test_a_wrong_option_is_one_line(text, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        sources.parse(text)
    assert "\n" not in str(caught.value)
