"""JSON that is not one object per line: arrays, and objects over several lines."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.reading.formats import json_values, lines
from tasks.terminal.command_line import UserError
from tests.support.corpora import pieces_and_rows, read

ANY_FOLDER = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ROWS = [{"id": f"{n}", "text": f'Text "{n}",\n[of] {{many}}: çà, 日本'} for n in range(300)]
FORMS = {
    "one line": lambda rows: json.dumps(rows),
    "other letters": lambda rows: json.dumps(rows, ensure_ascii=False),
    "an object a line": lambda rows: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n",
    "commas first": lambda rows: "[" + "\n,".join(map(json.dumps, rows)) + "]",
    "indented": lambda rows: "\ufeff" + json.dumps(rows, indent=2, ensure_ascii=False),
    "indented by tabs": lambda rows: "\r\n" + json.dumps(rows, indent="\t").replace("\n", "\r\n"),
    "objects over lines": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
    "two arrays": lambda rows: json.dumps(rows[:100], indent=1) + json.dumps(rows[100:]),
}


def found(spec, **how):
    return [(row["id"], row["text"], row["problem"]) for row in read(spec, **how)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_object_is_a_document_whatever_the_pieces(tmp_path, form, packed):
    data = FORMS[form](ROWS).encode()
    (tmp_path / "a.json").write_bytes(gzip.compress(data) if packed else data)
    spec = f"json:{tmp_path}/a.json?validation=0"
    expected = [(row["id"], row["text"], None) for row in ROWS]
    assert found(spec) == expected
    pieces, rows = pieces_and_rows(spec, 100, 7)
    assert len(pieces) == 1
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    for row in rows:
        at = int(row["place"].rpartition(":")[2])
        assert json.JSONDecoder().raw_decode(data[at:].decode())[0]["id"] == row["id"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
SPACES = st.text(" \t\r\n", max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(VALUES, max_size=9), spaces=st.lists(SPACES, min_size=4, max_size=4),
    indent=st.sampled_from([None, 0, 3]), ascii=st.booleans(), step=st.integers(1, 40),
)  # fmt: skip
def test_the_values_of_an_array_are_those_that_json_reads(values, spaces, indent, ascii, step):
    first, before, after, last = spaces
    each = [json.dumps(value, indent=indent, ensure_ascii=ascii) for value in values]
    inside = f"{before},{after}".join(each)
    data = f"{first}[{before}{inside}{after}]{last}".encode()
    chunks = (data[at : at + step] for at in range(0, len(data), step))
    got = list(json_values.split(chunks, 1 << 20))
    assert [json.loads(value) for _, value in got] == values
    assert all(data[offset : offset + len(value)] == value for offset, value in got)
    if values:
        assert json_values.are_in(data, True)


@ANY_FOLDER
@given(
    rows=st.lists(
        st.sampled_from([
            b'{"text": "a"}', b'{"text": "b", "x": [1]}', b"[", b"]", b"[1]", b'{"text": "cut',
            b"{", b"}", b"", b" ", b'["x",', b'[{"text": "in"}', b"x", b'"text"', b"[]", b"\xff",
        ]),
        max_size=8,
    )
)  # fmt: skip
def test_lines_that_were_read_as_lines_still_are(tmp_path, rows):
    """Most of the first lines are objects, as in every file that could be built from."""
    rows += [b'{"text": "a line"}'] * (len(rows) + 1)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    pieces, got = pieces_and_rows(f"json:{tmp_path}/a.jsonl?validation=0", 1)
    assert pieces[0].parts[0].stop is not None
    assert len(got) == sum(bool(row.strip()) for row in rows)


def test_bad_elements_are_bad_documents(tmp_path):
    elements = [b'{"text": "a", "id": 7}', b"[1]", b'{"text": null}', b'{"body": "x"}',
                b"5", b'{"text": "\xff", "id": "odd"}', rb'{"text": "\ud800"}',
                b'{"text": "last"}']  # fmt: skip
    data = b"[" + b", ".join(elements) + b"]"
    (tmp_path / "a.json").write_bytes(data)
    got = found(f"json:{tmp_path}/a.json?validation=0")
    assert [problem for _, _, problem in got] == [
        None, "missing column", "null", "missing column", "missing column", "invalid UTF-8",
        "invalid UTF-8", None,
    ]  # fmt: skip
    names = [name for name, _, _ in got]
    assert (names[0], names[5]) == ("7", "odd")
    assert names[7] == f"a.json:{data.index(elements[-1])}"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            b'[{"text": "a"},\n{"text": "b"},\n{"text": "c"}',
            "cut short: the end of its array is missing",
        ),
        (b'[{"text": "a"},', "cut short"),
        (b'[{"text": "a"},{"text": "b', "not valid JSON, or too long a value, at byte 15"),
        (b'[{"text": "a"},,{"text": "b"}]', "at byte 15"),
        (b'[{"text": "a"},]', "at byte 15"),
        (b'[{"text": "a"}, {"text": "b"} {"text": "c"}]', "at byte 30"),
        (b'[{"text": "a"},\n{"text": "b"}]\nmore', "at byte 31"),
        (b"[1, 2, 3]", "is not JSON lines, nor an array of objects: it begins with no JSON object"),
        (b"[]", "it begins with no JSON object"),
        (b'[{"body": "a"}, {"body": "b"}]', "a.json has no column text; it has body"),
        (b'{\n"body": "a"\n}', "a.json has no column text; it has body"),
    ],
)
def test_what_is_not_an_array_is_named(tmp_path, data, says):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError) as caught:
        read(f"json:{tmp_path}/a.json")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_element_at_a_time_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 1000)
    rows = [{"text": "a word " * 100} for _ in range(500)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    held = []
    usual = json_values._decode
    monkeypatch.setattr(
        json_values, "_decode", lambda text, at: held.append(len(text)) or usual(text, at)
    )
    assert len(found(f"json:{tmp_path}/a.json?validation=0")) == 500
    assert max(held[-500:]) < 5000


def test_an_element_that_is_too_long_ends_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_BYTES", 1 << 20)
    for size, length in ((1 << 19, 2), (1 << 22, None)):
        rows = [{"text": "short"}, {"text": "x" * size}]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        if length:
            assert len(found(f"json:{tmp_path}/a.json", max_document_bytes=1 << 20)) == length
            continue
        with pytest.raises(UserError, match="too long a value, at byte 20"):
            read(f"json:{tmp_path}/a.json")


def test_values_longer_than_the_first_look_are_read(tmp_path):
    for form in ("one line", "indented", "an object a line"):
        rows = [{"text": "x" * 300_000}, {"text": "y"}]
        (tmp_path / "a.json").write_text(FORMS[form](rows))
        got = found(f"json:{tmp_path}/a.json?validation=0", max_document_bytes=1 << 20)
        assert [len(text) for _, text, _ in got] == [300_000, 1]


def test_what_is_nested_too_deeply_is_invalid():
    with pytest.raises(ValueError, match="not valid JSON, or too long a value, at byte 1"):
        list(json_values.split([b"[" * 100_000], 1 << 20))
