"""Builds by a law of SentencePiece: what the plan names, and what is refused."""

import json
import shutil

import pytest

from pipeline.tokenizer import tokenize
from pipeline.verify import main as verify
from tasks import vocabulary
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import LAWS, NEW_LAW, OLD_LAW
from tests.support import small_tokenizers, unigram_laws
from tests.support.corpora import write_json
from tests.support.unigram_laws import MODELS, TEXTS

NEW = f"--sentencepiece_law={NEW_LAW}"


@pytest.fixture(scope="module")
def small(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    return f"--corpus={write_json(path, dict(list(documents.items())[:80]))}"


@pytest.fixture
def later(monkeypatch):
    """Makes the installed SentencePiece one of the new law."""
    monkeypatch.setattr(tokenize, "installed", lambda: ("0.2.3", NEW_LAW))


def test_a_plan_names_the_new_law_alone(small, build, checksums, tmp_path, capsys, later):
    old, new = build(tmp_path / "old", small), build(tmp_path / "new", small, NEW)
    out = capsys.readouterr().out
    assert f"none audited, because sentencepiece 0.2.3 encodes by law {NEW_LAW}" in out
    plans = [json.loads((folder / "plan.json").read_text()) for folder in (old, new)]
    assert plans[1] == {**plans[0], "sentencepiece_law": NEW_LAW}
    assert CacheManifest.load(str(new)).plan.law == NEW_LAW
    assert verify([f"--cache={new}"]) == 0
    # An earlier command, without the flag, or one that names its default.
    before = checksums(old)
    build(tmp_path / "old", small, f"--sentencepiece_law={OLD_LAW}")
    build(tmp_path / "new", small, NEW)
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert checksums(old) == before
    for folder, flags in (("old", [NEW]), ("new", []), ("new", ["--extend"])):
        with pytest.raises(UserError, match=r"different plan \(sentencepiece_law: "):
            build(tmp_path / folder, small, *flags)


def test_rows_hold_the_ids_of_the_law(build, tmp_path):
    (tmp_path / "ties.model").write_bytes(MODELS["ties"])
    words, text = vocabulary.from_bytes(MODELS["ties"]), TEXTS[-1]
    corpus = f"--corpus={write_json(tmp_path / 'text.jsonl', [text])}?validation=0"
    for law in LAWS:
        flags = [corpus, f"--vocabulary={tmp_path}/ties.model", f"--sentencepiece_law={law}"]
        flags += ["--max_unknown=1"]
        folder = build(tmp_path / "cache", *flags)
        expected = unigram_laws.encode(words.model, words.codec.normalize(text), law)
        assert CacheManifest.load(str(folder)).total("train", "text_tokens") == len(expected)
        shutil.rmtree(folder)


def test_a_law_that_cannot_be_had_is_refused(small, build, tmp_path, documents):
    flags = [small, NEW, "--tokenizer=sentencepiece"]
    cure = r"give --sentencepiece_law=0\.1.*'sentencepiece>=0\.2\.2', without Beam"
    with pytest.raises(UserError, match=rf"--tokenizer=sentencepiece: sentencepiece .*{cure}"):
        build(tmp_path, *flags)
    texts = list(documents.values())[:80]
    bpe = small_tokenizers.t5(tmp_path / "bpe", texts, 400, model_type="bpe")
    with pytest.raises(UserError, match=r"=0\.2\.2 has no effect: .*bpe\.model is not a unigram"):
        build(tmp_path, small, NEW, f"--vocabulary={bpe}")
    assert not (tmp_path / "manifest.json").exists()
