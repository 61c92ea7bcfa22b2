"""Vocabularies cut to the pieces of a language."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tasks import vocabulary
from tasks.annexes.trimming import pieces, usage
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from tests.support.corpora import KEPT, written
from vocab.annexes.trimming_vocabularies import trim as vocab_trim


@pytest.fixture
def corpus(tmp_path):
    return written(tmp_path)


def loaded(folder, kind):
    lines = " ".join(small_tokenizers.documents(60)).splitlines()
    return vocabulary.load(small_tokenizers.KINDS[kind](folder / kind, lines), 10)


@pytest.mark.parametrize("kind", [kind for kind in small_tokenizers.KINDS if kind != "byte"])
def test_a_text_of_kept_pieces_has_the_same_pieces(kind, tmp_path, corpus):
    base = loaded(tmp_path, kind)
    found = [usage.count(base, vocab_trim.sources.resolve(vocab_trim.sources.parse(corpus)), n)
             for n in (1, 2)]  # fmt: skip
    np.testing.assert_array_equal(*found)
    made = pieces.trim(base, found[0])
    left = made.vocabulary
    assert left.size < base.size
    assert (left.record.sentinels, left.record.extra_ids) == (10, base.record.extra_ids)
    before, after = base.special_pieces(), left.special_pieces()
    assert before == after
    texts = [KEPT, *small_tokenizers.documents(40)]
    kept = 0
    for one, other in zip(base.encode(texts), left.encode(texts), strict=True):
        new = [made.id_map[token] for token in one]
        if None not in new:
            kept += 1
            assert new == other.tolist()
    assert kept >= 1
    assert [left.piece(new) for new in made.id_map if new is not None] == [
        base.piece(old) for old, new in enumerate(made.id_map) if new is not None
    ]
    # The ids that a file's own rules add, as [CLS] around a text, moved along.
    if not left.is_sentencepiece:
        codec = left.codec.tokenizer
        assert codec.encode(KEPT).ids[-1] < left.size


def test_sizes_limit_what_is_kept(tmp_path, corpus):
    base = loaded(tmp_path, "llama")
    counts = usage.count(base, vocab_trim.sources.resolve(vocab_trim.sources.parse(corpus)))
    every = pieces.trim(base, counts).vocabulary
    few = pieces.trim(base, counts, vocab_size=every.size - 13).vocabulary
    frequent = pieces.trim(base, counts, min_count=10).vocabulary
    assert few.size <= every.size - 3 > frequent.size
    with pytest.raises(UserError, match=r"--vocab_size=50 is too small: .* always kept"):
        pieces.trim(base, counts, vocab_size=50)
    with pytest.raises(UserError, match=r"no piece of .* occurs often enough"):
        pieces.trim(base, counts, min_count=1000)
    bytes_alone = vocabulary.load("bytes")
    with pytest.raises(UserError, match="nothing to cut"):
        pieces.trim(bytes_alone, np.ones(bytes_alone.size, np.int64))


def test_the_vocabulary_alone(tmp_path, corpus, capsys):
    base = loaded(tmp_path, "bert")
    flags = [f"--vocabulary={tmp_path}/bert", f"--corpus={corpus}", f"--output={tmp_path}/small"]
    vocab_trim.main(flags)
    left = vocabulary.load(f"{tmp_path}/small")
    assert left.special_pieces() == base.special_pieces()
    id_map = json.loads((tmp_path / "small" / "id_map.json").read_text())
    assert len([new for new in id_map if new is not None]) == left.size
    vocab_trim.main(flags)
    assert "already finished" in capsys.readouterr().out
    with pytest.raises(UserError, match="made with other settings: min_count"):
        vocab_trim.main([*flags, "--min_count=2"])
    # A killed one begins again; a folder that it did not write is left alone.
    whole = (tmp_path / "small" / "tokenizer.json").read_bytes()
    (tmp_path / "small" / "manifest.json").unlink()
    (tmp_path / "small" / "tokenizer.json").write_bytes(b"half")
    (tmp_path / "small" / ".partial-abc-tokenizer.json").write_bytes(b"half")
    vocab_trim.main(flags)
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == whole
    before = (tmp_path / "bert" / "tokenizer.json").read_bytes()
    with pytest.raises(UserError, match="holds other files"):
        vocab_trim.main([*flags[:2], f"--output={tmp_path}/bert"])
    assert (tmp_path / "bert" / "tokenizer.json").read_bytes() == before


def test_without_an_eos_and_with_a_template_of_its_own(tmp_path, corpus):
    folder = small_tokenizers.gpt2(tmp_path / "gpt2", small_tokenizers.documents(60))
    value = json.loads((tmp_path / "gpt2" / "tokenizer.json").read_text())
    (tmp_path / "gpt2" / "tokenizer_config.json").unlink()
    value["added_tokens"] = []
    rare = len(value["model"]["vocab"]) - 1
    value["post_processor"] = {"type": "RobertaProcessing", "sep": ["x", rare], "cls": ["y", 0],
                               "trim_offsets": True, "add_prefix_space": False}  # fmt: skip
    (tmp_path / "gpt2" / "tokenizer.json").write_text(json.dumps(value))
    output = f"{tmp_path}/cut"
    flags = [f"--vocabulary={folder}", f"--corpus={corpus}", f"--output={output}"]
    vocab_trim.main([*flags, "--extra_ids=3"])
    left = vocabulary.load(output, 3)
    id_map = json.loads((tmp_path / "cut" / "id_map.json").read_text())
    assert None in id_map
    assert (
        id_map[-4:] == [*range(left.special.eos, left.size)] == [*range(left.size - 4, left.size)]
    )
    assert json.loads(left.model)["post_processor"]["sep"][1] == id_map[rare]
    vocab_trim.main([*flags, "--extra_ids=3"])
    with pytest.raises(UserError, match="different --extra_ids"):
        vocab_trim.main([*flags, "--extra_ids=4"])
    with pytest.raises(UserError, match="--extra_ids must be 0 or more, not -3"):
        vocab_trim.main([*flags, "--extra_ids=-3"])


def test_a_class_of_the_user_is_not_cut():
    with pytest.raises(UserError, match="only SentencePiece models and"):
        usage.count(SimpleNamespace(is_registered=True, name="own"), None)
