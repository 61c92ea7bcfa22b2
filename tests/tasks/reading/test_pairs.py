"""Pairs: templates, and the same pairs from JSON lines and Parquet."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from tasks.reading import sources
from tasks.reading.columns import Columns
from tasks.terminal.command_line import UserError
from tests.support.corpora import known

SPEC = "?inputs={premise} </s> {hypothesis} {{n}}: {number}&targets=label&validation=0"
ROWS = [
    {"id": "a", "premise": "Ärger", "hypothesis": "日本", "number": 3, "label": True},
    {"id": "b", "premise": None, "hypothesis": "x", "number": 1, "label": False},
    {"id": "c", "premise": "", "hypothesis": "", "number": -7, "label": None},
]


def read(spec, **how):
    corpus = sources.resolve(sources.parse(spec))
    batches = [batch for piece in corpus.pieces for _, batch in sources.read(corpus, piece, **how)]
    return [row for batch in batches for row in batch.to_pylist()], batches


def test_json_lines_and_parquet_make_the_same_pairs(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    of_json, _ = read(f"json:{tmp_path}/a.jsonl{SPEC}")
    of_parquet, _ = read(f"parquet:{tmp_path}/a.parquet{SPEC}")
    assert of_json[0]["inputs"] == "Ärger </s> 日本 {n}: 3"
    assert of_json[0]["targets"] == "true"
    for row, other in zip(of_json, of_parquet, strict=True):
        assert {**row, "place": ""} == {**other, "place": ""}
    assert [row["problem"] for row in of_json] == [None, "null", "null"]
    assert {row["inputs"] for row in of_json[1:]} == {None}


def test_columns_of_arrow_kinds(tmp_path):
    table = pa.table(
        {
            "q": pa.array(["ab", "ab", None]).dictionary_encode(),
            "a": pa.array([b"x", b"\xff", b"y"]),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    rows, _ = read(f"parquet:{tmp_path}/a.parquet?inputs=Q: {{q}}&targets=a&validation=0")
    found = [(row["inputs"], row["targets"], row["problem"]) for row in rows]
    assert found == [("Q: ab", "x", None), (None, None, "invalid UTF-8"), (None, None, "null")]


def test_broken_lines_are_problems_with_their_places(tmp_path):
    lines = [b'{"q": "1", "a": "2"}', b"not json", b'["q"]', b'{"q": "1"}',
             b'{"q": [1], "a": "2"}', b'{"q": "\xff", "a": "2"}', b'{"q": "\\ud800", "a": "2"}',
             b'{"q": NaN, "a": "x"}']  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    rows, _ = read(f"json:{tmp_path}/a.jsonl?inputs=q&targets=a&validation=0")
    assert [row["problem"] for row in rows] == [
        None, "invalid JSON", "missing column", "missing column", "not a string", "invalid UTF-8",
        "invalid UTF-8", "not a finite number",
    ]  # fmt: skip
    assert rows[1]["place"] == rows[1]["id"] == f"a.jsonl:{len(lines[0]) + 1}"


def test_a_long_line_is_a_pair(tmp_path):
    text = "word " * (1 << 20)
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"q": text, "a": "y"}) + "\n\n" + '{"q":"1","a":""}'
    )
    rows, _ = read(f"json:{tmp_path}/a.jsonl?inputs=q&targets=a&validation=0")
    assert [(row["inputs"], row["targets"]) for row in rows] == [(text, "y"), ("1", "")]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_batches_are_bounded_by_both_sides(tmp_path, kind):
    rows = [{"q": "i" * (1 << 20), "a": "t" * (1 << 20)} for _ in range(9)]
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found, batches = read(f"{kind}:{tmp_path}/a.{kind}?inputs=q&targets=a&validation=0")
    assert len(found) == 9
    assert max(batch.num_rows for batch in batches) == 2
    _, batches = read(
        f"{kind}:{tmp_path}/a.{kind}?inputs=q&targets=a&validation=0", batch_documents=1
    )
    assert len(batches) == 9


def test_a_spec_with_templates_reads_back():
    text = "json:a/*.jsonl?inputs=q%26a %2B {q}: 100%25 {{x}}?&targets={a}&split=train"
    spec = sources.parse(text)
    assert spec.inputs == "q&a + {q}: 100% {{x}}?"
    assert str(spec) == text
    assert sources.parse(str(spec)) == spec
    assert Columns(spec).names == ("q", "a")


def test_columns_that_cannot_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1", "n": [1.5]}\n')
    parquet.write_table(pa.table({"question": ["1"], "n": [[1.5]]}), tmp_path / "a.parquet")
    (tmp_path / "t.txt").write_text("x\n")
    for kind, name in (("json", "a.jsonl"), ("parquet", "a.parquet")):
        with pytest.raises(UserError, match=r"has no column questoin \(did you mean question\?\)"):
            read(f"{kind}:{tmp_path}/{name}?inputs={{questoin}}&targets=n")
        with pytest.raises(UserError, match=r"column n is (array|list<.*), not text$"):
            read(f"{kind}:{tmp_path}/{name}?inputs=question&targets=n")
    with pytest.raises(UserError, match="text has no columns"):
        sources.parse(f"text:{tmp_path}/t.txt?inputs=a&targets=b")


def test_numbers_are_spelled_as_in_json(tmp_path):
    scores = [5.0, 3.8, 0.1 + 0.2, 1e-05, -1e16, 1e22, 123456789.125, 0.0, -0.0, 5e-324, None]
    rows = [{"q": f"{n}", "a": score} for n, score in enumerate(scores)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for kind, name in (("json", "a.jsonl"), ("parquet", "a.parquet")):
        found, _ = read(f"{kind}:{tmp_path}/{name}?inputs=q&targets=Score: {{a}}.&validation=0")
        assert [row["targets"] for row in found[:-1]] == [
            f"Score: {json.dumps(score)}." for score in scores[:-1]
        ]
        assert (found[-1]["targets"], found[-1]["problem"]) == (None, "null")
    for kind in (pa.float32(), pa.float16()):  # the shortest of that precision
        scores = pa.array([3.8, 5.0, None, float("nan"), float("inf")], kind)
        parquet.write_table(pa.table({"q": ["x"] * 5, "a": scores}), tmp_path / "a.parquet")
        found, _ = read(f"parquet:{tmp_path}/a.parquet?inputs=q&targets=a&validation=0")
        assert [row["targets"] for row in found] == ["3.8", "5.0", None, None, None]
        assert [row["problem"] for row in found[2:]] == ["null", *["not a finite number"] * 2]


NESTED = [
    {"key": {"name": "a"}, "translation": {"en": "one", "ro": "unu", "more": {"fr": "un"}}},
    {"key": {"name": "b"}, "translation": {"en": "two", "ro": None, "more": {"fr": "deux"}}},
    {"key": {"name": None}, "translation": None},
    {"key": None, "translation": {"en": "four", "ro": "patru", "more": None}},
]


def written_in_every_format(folder, rows):
    """Writes rows whose columns may be nested; yields their SPECs."""
    table = pa.Table.from_pylist(rows)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.json").write_text(json.dumps(rows, indent=2))
    parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    for name, new in (("a.arrow", pa.ipc.new_stream), ("a.feather", pa.ipc.new_file)):
        with new(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    kinds = ("json", "json", "parquet", "arrow", "arrow")
    for kind, end in zip(kinds, ("jsonl", "json", "parquet", "arrow", "feather"), strict=True):
        if known(kind):
            yield f"{kind}:{folder}/a.{end}"


def test_nested_columns_are_read_in_every_format(tmp_path):
    for spec in written_in_every_format(tmp_path, NESTED):
        pairs = "inputs=translation.en&targets={translation.ro}/{translation.more.fr}"
        found, _ = read(f"{spec}?{pairs}&id=key.name&validation=0")
        assert [(row["inputs"], row["targets"], row["problem"]) for row in found] == [
            ("one", "unu/un", None), (None, None, "null"), (None, None, "null"),
            (None, None, "null"),
        ]  # fmt: skip
        assert [row["id"] for row in found[:2]] == ["a", "b"]
        assert found[3]["id"] == found[3]["place"]
        texts, _ = read(f"{spec}?column=translation.more.fr&validation=0", batch_documents=2)
        assert [row["text"] for row in texts] == ["un", "deux", None, None]


def test_a_column_of_the_whole_name_comes_first(tmp_path):
    rows = [
        {"a": {"b": "inner"}, "a.b": "outer", "c.d": {"e.f": "x"}},
        {"a": {"b": "y"}, "a.b": "z", "c.d": None},
    ]
    for spec in written_in_every_format(tmp_path, rows):
        found, _ = read(f"{spec}?column=a.b&validation=0")
        assert [row["text"] for row in found] == ["outer", "z"]
        found, _ = read(f"{spec}?column=c.d.e.f&validation=0")
        assert [(row["text"], row["problem"]) for row in found] == [("x", None), (None, "null")]


def test_what_is_in_a_nested_column_is_named(tmp_path):
    for spec in written_in_every_format(tmp_path, NESTED):
        with pytest.raises(UserError, match=r"translation\.rx \(did you mean translation\.ro\?\)"):
            read(f"{spec}?column=translation.rx")
        with pytest.raises(
            UserError, match=r"no column text; it has key\.name, translation\.en, t"
        ):
            read(spec)
        with pytest.raises(
            UserError, match=r"not text: name a column in it, such as translation\.e"
        ):
            read(f"{spec}?column=translation")
        with pytest.raises(UserError, match=r"has no column key\.id.*: give another \?id=NAME"):
            read(f"{spec}?column=translation.en&id=key.id")
