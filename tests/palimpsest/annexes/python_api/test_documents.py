"""Corpora that Python writes: what counts as texts and pairs, shares, names of files."""

import json
import math

import numpy as np
import pandas
import pytest

import palimpsest
from tasks.reading import languages, sources


def test_a_corpus_is_json_lines_of_texts_or_pairs(tmp_path):
    pairs = [("a", "b"), {"inputs": "c", "targets": "d"}]
    spec = palimpsest.write_corpus(pairs, tmp_path / "pairs.jsonl")
    assert spec == f"json:{tmp_path}/pairs.jsonl?inputs=inputs&targets=targets"
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert [*map(json.loads, lines)] == [{"inputs": "a", "targets": "b"}, pairs[1]]
    listed = palimpsest.write_corpus([["a", "b"], pairs[1] | {"n": 1}], tmp_path / "listed.jsonl")
    assert listed == spec.replace("pairs.jsonl", "listed.jsonl")
    lines = (tmp_path / "listed.jsonl").read_text().splitlines()
    assert [*map(json.loads, lines)] == [{"inputs": "a", "targets": "b"}, pairs[1] | {"n": 1}]
    for rows in ([], ["a", pairs[0]], [pairs[0], "a"]):
        with pytest.raises(palimpsest.UserError, match="texts alone, or pairs"):
            palimpsest.write_corpus(rows, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    "given",
    [None, math.nan, b"a", 3, "a\ud800", (), ("a",), ("a", "b", "c"), ["a", 3], {"text": 3},
     {"text": None}, {"txt": "a"}, {"inputs": "a"}, {"text": "a", "inputs": "b", "targets": "c"},
     {"inputs": "a", "targets": "\udfff"}, {"text": "a", "more": {1}},
     {"text": "a", "more": "\udfff"}],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_text_is_refused_by_its_number(tmp_path, given):
    path = tmp_path / "corpus.jsonl"
    path.write_text("before")
    with pytest.raises(palimpsest.UserError, match=r"corpus\.jsonl: text 2 \(from 1\) ") as error:
        palimpsest.write_corpus(["a", given], path)
    assert len(str(error.value).encode().splitlines()) == 1
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_failing_generator_keeps_the_file(tmp_path):
    def texts():
        yield "a"
        raise OverflowError

    path = tmp_path / "corpus.jsonl"
    path.write_text("before")
    with pytest.raises(OverflowError):
        palimpsest.write_corpus(texts(), path)
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(path, "before")]


@pytest.mark.parametrize(
    ("given", "said"),
    [(pandas.DataFrame({"text": ["a"]}), r'DataFrame .*: pass frame\["text"\]$'),
     ("abc", "pass a list, .* not one str$"), (b"abc", "not one bytes$"),
     ({"text": ["a"]}, "not one dict$"), (None, "not one NoneType$"), (3, "not one int$")],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_texts_are_several(tmp_path, given, said):
    with pytest.raises(palimpsest.UserError, match=f"^texts: .*{said}"):
        palimpsest.write_corpus(given, tmp_path / "corpus.jsonl")
    assert not [*tmp_path.iterdir()]
    column = pandas.DataFrame({"text": ["a", "b"]})["text"]
    assert palimpsest.write_corpus(column, tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("share", [2, 1, -1, math.nan, math.inf, 10**400, "x", None, [0.1]])
def test_a_share_of_validation_is_one_that_a_spec_has(tmp_path, share):
    with pytest.raises(palimpsest.UserError, match=r"^validation=.*: it must be a number from 0 "):
        palimpsest.write_corpus(["a"], tmp_path / "corpus.jsonl", validation=share)
    assert not [*tmp_path.iterdir()]
    for right in (0, 0.999, np.float32(0.5)):
        palimpsest.write_corpus(["a"], tmp_path / "corpus.jsonl", validation=right)


@pytest.mark.parametrize(
    "name",
    ["x.jsonl.gz", "x.jsonl.ZST", "x.zip", "a?b.jsonl", "a*b.jsonl", "a::b.jsonl", ".a.jsonl",
     "{language}.jsonl", "a\ud800.jsonl"],
    ids=ascii,
)  # fmt: skip
def test_a_name_that_no_spec_reads_is_refused(tmp_path, name):
    with pytest.raises(palimpsest.UserError, match=r"name|path"):
        palimpsest.write_corpus(["a"], f"{tmp_path}/{name}")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["a[b]c.jsonl", "{a,b}.jsonl", "a b&c=d,%20#@.jsonl"])
def test_the_spec_reads_the_file(tmp_path, name):
    for other in ("abc.jsonl", "a.jsonl", "b.jsonl"):
        (tmp_path / other).write_text('{"text": "other"}\n')
    spec = palimpsest.write_corpus(["a"], tmp_path / name)
    (found,) = languages.specs([spec], None).values()
    pieces = sources.resolve(found).pieces
    assert [part.file.path for each in pieces for part in each.parts] == [f"{tmp_path}/{name}"]


def test_other_texts_are_not_replaced_unasked(tmp_path):
    path = tmp_path / "corpus.jsonl"
    palimpsest.write_corpus(["a", "b"], path)
    before = path.stat()
    palimpsest.write_corpus(iter(["a", "b"]), path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(
        palimpsest.UserError, match=r"corpus\.jsonl holds other texts: .* overwrite=True"
    ):
        palimpsest.write_corpus(["a"], path)
    assert path.read_text().count("\n") == 2
    palimpsest.write_corpus(["a"], path, overwrite=True)
    assert path.read_text().count("\n") == 1
