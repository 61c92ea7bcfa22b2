"""The laws of SentencePiece's unigram models: the ids of each, the audit, and a build's flag."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.tokenizer import fast_tokenizer, tokenize
from pipeline.tokenizer.spelling import Speller
from tasks import vocabulary
from tasks.cache.manifest import KEEP, QUARANTINE, Spelling, plan_from_dict
from tasks.terminal.command_line import UserError
from tasks.vocabularies import sentencepiece_model
from tasks.vocabularies.sentencepiece_model import LAWS, NEW_LAW, OLD_LAW, installed
from tests.support import small_tokenizers, unigram_laws
from tests.support.unigram_laws import DIGESTS, MODELS, TEXTS, digest

VERSIONS = {"0.1.99": OLD_LAW, "0.2.1": OLD_LAW, "0.2.2": NEW_LAW, "0.10": NEW_LAW, "1.0": NEW_LAW}


def loaded(name: str) -> vocabulary.Vocabulary:
    return vocabulary.from_bytes(MODELS[name])


@pytest.fixture
def as_installed(monkeypatch):
    """Returns a function that makes the installed SentencePiece one of another law."""

    def pretend(law: str) -> None:
        version = {OLD_LAW: "0.2.1", NEW_LAW: "0.2.3"}[law]
        monkeypatch.setattr(tokenize, "installed", lambda: (version, law))

    return pretend


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_returns_the_recorded_ids_of_each_law(name):
    processor = loaded(name).processor
    normal = [processor.normalize(text) for text in TEXTS]
    for law in LAWS:
        found = [unigram_laws.encode(MODELS[name], text, law) for text in normal]
        assert digest(found) == DIGESTS[law][name]
    ids = [processor.encode(text) for text in TEXTS]
    assert digest(ids) == DIGESTS[installed()[1]][name]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", MODELS)
def test_the_fast_tokenizer_returns_the_ids_of_each_law(name, law):
    fast = tokenize.fast(loaded(name), law)
    for _ in range(2):  # later from the memo
        tokens, lengths = fast.encode(pa.array(TEXTS))
        found = [each.tolist() for each in np.split(tokens, np.cumsum(lengths)[:-1])]
        assert digest(found) == DIGESTS[law][name]


@pytest.mark.parametrize(("version", "law"), VERSIONS.items())
def test_a_version_has_a_law(monkeypatch, version, law):
    monkeypatch.setattr(sentencepiece_model.importlib.metadata, "version", lambda _: version)
    assert installed() == (version, law)


def test_only_unigram_models_have_laws(tmp_path):
    texts = small_tokenizers.documents(30)
    of = {
        "unigram": loaded("bytes"),
        "bpe": vocabulary.load(small_tokenizers.t5(tmp_path / "bpe", texts, 400, model_type="bpe")),
        "gpt2": vocabulary.load(small_tokenizers.gpt2(tmp_path / "gpt2", texts)),
    }
    assert {name: each.is_unigram for name, each in of.items()} == {
        "unigram": True, "bpe": False, "gpt2": False
    }  # fmt: skip


def test_the_audit_needs_a_library_of_the_same_law(as_installed):
    texts = pa.array(TEXTS)
    for law, audited in ((OLD_LAW, True), (NEW_LAW, False)):
        as_installed(law)
        tokenizer = tokenize.Tokenizer(loaded("ties"))
        tokenizer.encode(texts)
        assert bool(tokenizer.documents["audited"]) == audited
    for engine in (tokenize.LIBRARY, tokenize.SENTENCEPIECE):
        advice = r"give --sentencepiece_law=0\.2\.2 or .*fast, or .* with 'sentencepiece<0\.2\.2'"
        with pytest.raises(UserError, match=rf"{engine}: sentencepiece 0\.2\.3 encodes.*{advice}"):
            tokenize.Tokenizer(loaded("ties"), engine)
        tokenize.Tokenizer(loaded("ties"), engine, NEW_LAW)


def test_what_the_fast_tokenizer_refuses_needs_the_law_too(as_installed, monkeypatch):
    def refuse(*_):
        raise fast_tokenizer.Unsupported("its spaces are not escaped")

    monkeypatch.setattr(fast_tokenizer, "from_model", refuse)
    assert tokenize.Tokenizer(loaded("ties")).refusal
    as_installed(NEW_LAW)
    with pytest.raises(
        UserError, match=r"leaves it to .* \(its spaces are.*=0\.2\.2, or an environment"
    ):
        tokenize.Tokenizer(loaded("ties"))


def test_text_between_sentinels_is_encoded_by_the_law():
    words = vocabulary.from_bytes(MODELS["ties"], extra_ids=1)
    spell = Speller(words, Spelling(KEEP, QUARANTINE), tokenize.FAST, NEW_LAW)
    text = TEXTS[-1]
    given = pa.array([f"{text} <extra_id_0>"])
    found = spell(given, np.zeros(1, np.int32), np.ones(1, np.int64)).tokens
    expected = unigram_laws.encode(words.model, words.codec.normalize(text), NEW_LAW)
    assert found.tolist() == [*expected, words.first_sentinel]


def test_a_plan_without_a_law_has_the_old_one():
    plan = {
        "task": "small_lm", "corpus": {}, "packing": "concat", "row_tokens": 9, "format": 1,
        "separator": "none", "shards": {"train": 1},
        "vocabulary": {"sha256": "", "pieces": 9, "extra_ids": 0, "sentinels": 0},
    }  # fmt: skip
    old = plan_from_dict(plan)
    assert (old.law, old.sentencepiece_law) == (OLD_LAW, None)
    new = plan_from_dict({**plan, "sentencepiece_law": NEW_LAW})
    assert new.law == NEW_LAW
    assert new.fingerprint != old.fingerprint
    for wrong in (OLD_LAW, "0.3"):
        with pytest.raises(UserError, match=r"sentencepiece_law"):
            plan_from_dict({**plan, "sentencepiece_law": wrong})
