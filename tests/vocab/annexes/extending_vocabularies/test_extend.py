"""Extending a vocabulary: ids and scores are kept, sentinels stay last, new text gets shorter."""

import json
import random

import pytest
from sentencepiece import sentencepiece_model_pb2

from tasks import vocabulary
from tasks.reading import sources, stdlib_docs
from tests.support.corpora import write_json
from vocab import train
from vocab.annexes.extending_vocabularies import extend
from vocab.fit import measure

FLAGS = {"extra_ids": 10, "character_coverage": 0.9999, "memory_bytes": 10**9}
NEW = "Straße über Zürich größer schön Fluss Brücke Wasser fahren Häuser Gärten Wörter 東京 塔"


def corpus(path, texts):
    return sources.resolve(sources.parse(f"{write_json(path, texts)}?validation=0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("extend")


@pytest.fixture(scope="module")
def old_corpus(folder):
    documents = [text for text in stdlib_docs.documents().values() if len(text) < 3000]
    return corpus(folder / "old.jsonl", documents[:150])


@pytest.fixture(scope="module")
def new_corpus(folder):
    draw = random.Random(0)
    words = ["".join(draw.choices(NEW.split(), k=draw.randint(1, 3))) for _ in range(4000)]
    lines = [" ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    return corpus(folder / "new.jsonl", lines)


@pytest.fixture(scope="module")
def old(folder, old_corpus):
    return train.train(train.Options(500, **FLAGS), old_corpus, str(folder / "old"))


@pytest.fixture(scope="module")
def new(folder, old, new_corpus):
    options = train.Options(
        530, extends=old.record.sha256, user_defined_symbols=("<lang>",), **FLAGS
    )
    return train.train(options, new_corpus, str(folder / "new"), old)


def pieces(loaded):
    return sentencepiece_model_pb2.ModelProto.FromString(loaded.model).pieces


@pytest.mark.processes
def test_old_pieces_stay_where_they_are(old, new):
    assert new.size == 540
    assert list(pieces(new))[:500] == list(pieces(old))[:500]
    assert list(pieces(new))[530:] == list(pieces(old))[500:]
    assert pieces(new)[500].piece == "<lang>"
    assert new.record.sentinels == 10
    texts = [piece.piece for piece in pieces(new)]
    assert len(set(texts)) == 540


def test_the_id_map_gives_every_old_piece_its_new_id(folder, old, new):
    ids = json.loads((folder / "new" / "id_map.json").read_text())
    assert len(ids) == old.size
    for before, after in enumerate(ids):
        assert old.processor.id_to_piece(before) == new.processor.id_to_piece(after)
    assert ids[499] == 499
    assert ids[500] == 530
    manifest = json.loads((folder / "new" / "manifest.json").read_text())
    assert manifest["options"]["extends"] == old.record.sha256


def test_new_text_is_shorter_and_old_text_nearly_the_same(old, new, old_corpus, new_corpus):
    assert measure(new, new_corpus).tokens < 0.6 * measure(old, new_corpus).tokens
    assert measure(old, new_corpus).unknown_tokens > 0
    assert measure(new, new_corpus).unknown_tokens == 0
    assert measure(new, new_corpus).character_coverage == 1
    before, after = measure(old, old_corpus), measure(new, old_corpus)
    assert 0.98 * before.tokens < after.tokens <= before.tokens


def test_text_without_a_new_piece_is_segmented_as_before(old, new, old_corpus):
    added = [piece.piece for piece in pieces(new)[500:530]]
    words = {word for text in stdlib_docs.documents().values() for word in text.split()}
    same = [w for w in words if not any(piece in f"▁{w}" for piece in added)]
    assert len(same) > 5000
    assert all(old.processor.encode(w) == new.processor.encode(w) for w in same)


def test_sentinels_are_added_to_a_model_without_any(folder, old, new_corpus):
    proto = sentencepiece_model_pb2.ModelProto.FromString(old.model)
    del proto.pieces[500:]
    bare = folder / "bare.model"
    bare.write_bytes(proto.SerializeToString())
    base = vocabulary.load(str(bare))
    output = folder / "of_bare"
    options = train.Options(520, extends=base.record.sha256, **FLAGS)
    found = train.train(options, new_corpus, str(output), base)
    assert found.record.sentinels == 10
    ids = json.loads((output / "id_map.json").read_text())
    assert ids == [*range(500), *range(520, 530)]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vocab_size=400"], "too small: the vocabulary to extend has 500 pieces"),
        (["--vocab_size=5000"], "too large: the vocabulary to extend has 500 pieces"),
        (["--vocab_size=600", "--extra_ids=7"], "contradicts --extend"),
        (["--vocab_size=600", "--model_type=bpe"], "contradicts --extend"),
        (["--vocab_size=600", "--normalization=nfkc"], "which has nmt_nfkc"),
        (["--vocab_size=600", "--user_defined_symbols=▁the"], "without spaces"),
    ],
)
def test_invalid_options_are_rejected(folder, old, new_corpus, tmp_path, flags, says):
    arguments = [
        f"--corpus={new_corpus.spec}",
        f"--extend={folder / 'old'}",
        f"--output={tmp_path / 'out'}",
        *flags,
    ]
    with pytest.raises(train.UserError) as caught:
        train.main(arguments)
    assert says in str(caught.value)


def test_a_symbol_that_is_already_a_piece_is_rejected(old, new_corpus, tmp_path):
    piece = next(p.piece for p in pieces(old)[3:] if p.piece.isalpha())
    options = train.Options(600, extends=old.record.sha256, user_defined_symbols=(piece,), **FLAGS)
    with pytest.raises(train.UserError, match=f"already has the piece '{piece}'"):
        train.train(options, new_corpus, str(tmp_path), old)


def test_sentinels_are_recognised_in_mt5_spelling(old):
    proto = sentencepiece_model_pb2.ModelProto.FromString(old.model)
    for piece in proto.pieces[-10:]:
        piece.piece = "▁" + piece.piece
    spelt = vocabulary.from_bytes(proto.SerializeToString())
    assert (spelt.size, spelt.record.sentinels) == (old.size, 10)
    assert spelt.ids.id_of("<extra_id_0>") == old.size - 1


def test_bpe_is_rejected(folder, old):
    proto = sentencepiece_model_pb2.ModelProto.FromString(old.model)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    base = vocabulary.from_bytes(proto.SerializeToString())
    with pytest.raises(
        train.UserError, match="supports unigram vocabularies only; this one is bpe"
    ):
        extend.settings(base)


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("/nothing/here", "no vocabulary at"),
        ("bytes", "only SentencePiece models with T5's ids can be extended"),
    ],
)
def test_other_bases_are_rejected(new_corpus, tmp_path, base, says):
    with pytest.raises(train.UserError, match=says):
        train.main([f"--corpus={new_corpus.spec}", f"--extend={base}", f"--output={tmp_path}/out"])
    with pytest.raises(train.UserError, match=r"unknown flag --extends \(did you mean --extend\?"):
        train.main([f"--corpus={new_corpus.spec}", "--extends=a", f"--output={tmp_path}/out"])
