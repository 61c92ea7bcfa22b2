"""The report on a cache: numbers agree with manifest and corpus, and the page loads nothing."""

import json
import re

import numpy as np
import pytest

from pipeline.annexes.report.report import main
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tasks.vocabulary import load
from tests.pipeline.building.test_law import NEW, NEW_LAW
from tests.pipeline.building.test_law import later as later
from tests.pipeline.building.test_law import small as small
from tests.pipeline.building.test_pairs import make as make
from tests.pipeline.building.test_pairs import rows as rows
from tests.support.corpora import write_json
from tests.support.pages import Page

EVIL = "<script>alert('x')</script> & <b>bold</b>"
# The data of the chart, uPlot, and what draws the chart.
SCRIPTS = 3


@pytest.fixture
def report(tmp_path):
    def write(cache, *flags) -> Page:
        main([f"--cache={cache}", f"--output={tmp_path}/report.html", *flags])
        text = (tmp_path / "report.html").read_text()
        page = Page(text)
        names = [tag for tag, _ in page.tags]
        assert not {"img", "iframe", "object", "embed"} & {*names}
        assert names.count("script") == SCRIPTS
        given = [(name, value) for _, found in page.tags for name, value in found.items()]
        assert not [value for name, value in given if name == "src" or name.startswith("on")]
        links = [value for name, value in given if name == "href"]
        assert all(value.startswith(("#", "data:")) for value in links)
        return page

    return write


def number(text):
    return float(text.replace(",", "").rstrip("%"))


def test_numbers_are_those_of_the_cache(report, cache, documents, vocabulary):
    page = report(cache)
    manifest = CacheManifest.load(str(cache))
    (caption,) = [name for name in page.tables if "packing" in name]
    head, *rows = page.tables[caption]
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        split = cells["split"]
        assert number(cells["shards"]) == len(manifest.splits[split])
        for field in ("documents", "tokens", "rows"):
            assert number(cells[field]) == manifest.total(split, field)
        room = manifest.total(split, "rows") * manifest.plan.row_tokens
        share = manifest.total(split, "tokens") / room
        assert number(cells["rows filled"]) == pytest.approx(100 * share, abs=0.01)

    processor = load(str(vocabulary)).processor
    encoded = [processor.encode(text) for text in documents.values()]
    lengths = np.array([len(tokens) for tokens in encoded])
    (caption,) = [name for name in page.tables if "Tokens per document" in name]
    values = dict(zip(*page.tables[caption], strict=True))
    assert number(values["minimum"]) == lengths.min()
    assert number(values["maximum"]) == lengths.max()
    assert number(values["50%"]) == np.quantile(lengths, 0.5, method="lower")
    assert f"The mean is {lengths.mean():,.1f} tokens" in page.text

    fit = dict(page.tables["Fit to the corpus"][1:])
    tokens = np.concatenate([np.array(each) for each in encoded])
    size = sum(len(text.encode()) for text in documents.values())
    assert number(fit["bytes per token"]) == pytest.approx(size / len(tokens), abs=0.001)
    in_bytes = sum(processor.is_byte(token) for token in tokens.tolist()) / len(tokens)
    assert number(fit["byte-fallback tokens"]) == pytest.approx(100 * in_bytes, abs=0.0001)
    top = page.tables["The most frequent pieces"][1]
    most = int(np.bincount(tokens).argmax())
    assert top[:2] == [processor.id_to_piece(most), f"{(tokens == most).sum():,}"]

    assert manifest.plan.fingerprint in page.text
    assert manifest.software["apache-beam"] in page.text


def test_duplicates_quarantine_and_text_that_looks_like_html(report, build, tmp_path):
    texts = [f"text number {n} of many" for n in range(200)] + [EVIL] * 3 + ["twice here"] * 2
    lines = [json.dumps({"id": f"<i>{n}</i>", "text": text}) for n, text in enumerate(texts)]
    lines += ['{"id": "none", "text": null}', '{"id": "none2", "text": null}', "not json"]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    cache = build(tmp_path / "cache", f"--corpus=json:{tmp_path}/corpus.jsonl?validation=0")
    page = report(cache)
    facts = dict(page.tables["Nothing was removed"][1:])
    assert facts["documents with the same tokens as an earlier one"] == "3"
    assert facts["groups of equal documents"] == "2"
    groups = page.tables["The largest groups"][1:]
    assert [row[1] for row in groups] == ["3", "2"]
    assert groups[0][0].startswith("<script>alert('x')")
    assert groups[0][2] == "<i>200</i>, <i>201</i>, <i>202</i>"
    reasons = {row[0]: row[1:] for row in page.tables["Documents by reason"][1:]}
    assert reasons["null"][0] == "2"
    assert reasons["null"][1].startswith("none (corpus.jsonl:")
    assert reasons["invalid JSON"][0] == "1"
    assert "i" not in {tag for tag, _ in page.tags}


def test_a_sample_is_labelled(report, cache):
    page = report(cache, "--sample_shards=2")
    assert "From 4 of the 16 shards." in page.text
    assert "of the 16 shards" not in report(cache).text
    manifest = CacheManifest.load(str(cache))
    (caption,) = [name for name in page.tables if "packing" in name]
    assert number(page.tables[caption][1][2]) == manifest.total("train", "documents")


def test_documents_by_file(report, build, tmp_path):
    for name, count in (("a.txt", 30), ("b.txt", 70)):
        text = "\n".join(f"{name} {'word ' * 40} {n}" for n in range(count))
        (tmp_path / name).write_text(text)
    (tmp_path / "c.txt").write_text("five words are in here\n" * 5)
    more = ["--packing=best_fit", "--row_tokens=60", "--separator=eos"]
    cache = build(tmp_path / "cache", f"--corpus=text:{tmp_path}/*.*?validation=0", *more)
    page = report(cache)
    files = {row[0]: row[3] for row in page.tables["Files: 3"][1:]}
    assert files == {"a.txt": "30", "b.txt": "70", "c.txt": "5"}
    manifest = CacheManifest.load(str(cache))
    tokens = sum(number(row[4]) for row in page.tables["Files: 3"][1:])
    assert tokens == manifest.total("train", "tokens")
    (caption,) = [name for name in page.tables if "Tokens per document" in name]
    assert re.search(r"of 105 documents$", caption)
    assert any(tag == "b" for tag, _ in page.tags)


def test_empty_shards(report, build, tmp_path):
    corpus = write_json(tmp_path / "one.jsonl", ["one document", ""])
    cache = build(tmp_path / "cache", f"--corpus={corpus}?validation=0.01")
    page = report(cache)
    assert "No two documents have the same tokens." in page.text
    assert dict((row[0], row[1]) for row in page.tables["Documents by reason"][1:]) == {
        "empty": "1"
    }


@pytest.mark.parametrize(
    ("output", "problem"), [("/proc/z.html", "no file can"), ("{new}/z.html", "there is no folder")]
)
def test_an_output_that_cannot_be_is_one_line(cache, tmp_path, output, problem):
    output = output.format(new=tmp_path / "new")
    with pytest.raises(UserError, match=f"{output}: {problem}"):
        main([f"--cache={cache}", f"--output={output}"])


def test_pairs_are_shown(make):
    cache = make()
    main([f"--cache={cache}", f"--output={cache.parent}/report.html"])
    page = (cache.parent / "report.html").read_text()
    assert "A pair a row" in page
    assert "targets" in page


def test_the_law_of_the_vocabulary_is_shown(small, build, tmp_path, later):
    cache = build(tmp_path / "new", small, NEW)
    main([f"--cache={cache}", f"--output={tmp_path}/page.html"])
    assert re.search(rf"law of SentencePiece.*{NEW_LAW}", (tmp_path / "page.html").read_text())
