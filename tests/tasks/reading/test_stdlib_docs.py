"""The built-in corpus: the documentation of Python's standard library."""

import os

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
    assert 1_500_000 < corpus.record["bytes"] == sum(piece.bytes for piece in corpus.pieces)
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


def test_python_docs_of_another_python_is_refused(corpus):
    corpus.record.update(python="3.99.0", sha256="0" * 64)
    with pytest.raises(UserError, match=r"listed with Python 3\.99\.0"):
        list(sources.read(corpus, corpus.pieces[0]))
