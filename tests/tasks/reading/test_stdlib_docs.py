"""The built-in corpus: the documentation of Python's standard library."""

import ast
import builtins
import gzip
import hashlib
import os
import sys
import sysconfig

import pytest

from tasks.reading import sources, stdlib_docs
from tasks.terminal.command_line import UserError
from tests.support.corpora import read
from tests.support.processes import started


@pytest.fixture
def corpus():
    return sources.resolve(sources.parse("python_docs"))


def test_python_docs_holds_each_document_of_the_library_once(corpus):
    found = [tuple(row.values())[:3] for row in read("python_docs")]
    documents = {name: text for _, name, text in found}
    assert len(documents) == len(found) == corpus.record["documents"]
    assert documents == stdlib_docs.documents()
    assert len(corpus.pieces) >= 8
    assert corpus.record["bytes"] == sum(piece.bytes for piece in corpus.pieces)
    decoder = documents["json.decoder.JSONDecoder"]
    assert decoder.startswith("json.decoder.JSONDecoder\n\nSimple JSON <https")
    assert "json.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document" in decoder
    assert documents["json"].startswith("json\n\nJSON (JavaScript Object Notation)")
    # A docstring of two modules is included once, so that none is in both splits.
    texts = [
        text.partition("\n\n")[2]
        for name, text in documents.items()
        if not name.startswith("topic:")
    ]
    assert len(set(texts)) == len(texts)
    assert "generator" in documents["topic:yield"]
    assert not any(name.startswith(("test.", "idlelib", "site-packages")) for name in documents)
    held = sum(row[0] == "validation" for row in found)
    assert 0.07 < held / len(found) < 0.13


@pytest.mark.processes
def test_python_docs_is_the_same_in_every_run(corpus):
    command = (
        "from tasks.reading import sources as s; c = s.resolve(s.parse('python_docs'));"
        "print(c.record, c.pieces)"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = started("-c", command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert other.stdout == f"{corpus.record} {corpus.pieces}\n"


def test_python_docs_is_what_was_published(corpus):
    names = ("documents", "bytes", "python", "sha256")
    assert [corpus.record[name] for name in names] == [
        3465,
        2_290_393,
        "3.11.7",
        "9139fb1a822684676798abb221987aa69987862092bbde728ee0d9e6670bfd2b",
    ]
    lines = hashlib.sha256(gzip.decompress(stdlib_docs.FILE.read_bytes())).hexdigest()
    assert lines in (stdlib_docs.FILE.parent / "README.md").read_text()
    assert stdlib_docs.FILE.stat().st_size < 1_000_000


def test_python_docs_reads_nothing_of_the_python_that_runs(corpus, monkeypatch):
    library = sysconfig.get_paths()["stdlib"]

    def refused(*arguments, **options):
        raise AssertionError("the running Python was looked at")

    def opened(path, *arguments, original=builtins.open, **options):
        assert not str(path).startswith(library), path
        return original(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", opened)
    for module, name in ((sysconfig, "get_paths"), (ast, "parse"), (os, "walk"), (sys, "version")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    stdlib_docs.documents.cache_clear()
    stdlib_docs.sha256.cache_clear()
    again = sources.resolve(sources.parse("python_docs"))
    assert (again.record, again.pieces) == (corpus.record, corpus.pieces)


def test_a_cache_of_another_pythons_documentation_is_refused(corpus):
    corpus.record.update(python="3.99.0", sha256="0" * 64)
    with pytest.raises(UserError, match=r"documentation of Python 3\.99\.0.*of Python 3\.11\.7"):
        list(sources.read(corpus, corpus.pieces[0]))
