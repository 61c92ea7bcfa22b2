"""Vocabularies of every kind: ids, special ids, pieces, text without the library, and refusals."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from tasks import decode, vocabulary
from tasks.terminal.command_line import UserError
from tasks.vocabularies import byte_level, tokenizer_json
from tasks.vocabulary import SpecialIds
from tests.support import small_tokenizers

SENTINELS = 10
TEXTS = ["The list is sorted.", "naïve café — 日本 🇷🇴!", "!", "a\tb\n\nc  d", "x" * 300]


@pytest.fixture(scope="module")
def lines():
    documents = small_tokenizers.documents(200)
    return [line for text in documents for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folders(lines, tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: make(root / kind, lines) for kind, make in small_tokenizers.KINDS.items()}


@pytest.fixture(params=small_tokenizers.KINDS)
def kind(request):
    return request.param


@pytest.fixture
def loaded(kind, folders):
    return vocabulary.load(folders[kind], SENTINELS)


# Padding, EOS, unknown, BOS, and what a decoder reads first.
SPECIAL = {
    "gpt2": (SpecialIds(None, 400, 400, 400), 400),
    "llama3": (SpecialIds(None, 401, None, 400), 400),
    "bert": (SpecialIds(0, 3, 1, 2), 2),
    "unigram": (SpecialIds(1, 2, 3, 0), 0),
    "llama": (SpecialIds(None, 2, 0, 1), 1),
    "gemma": (SpecialIds(0, 1, 3, 2), 2),
    "byte": (SpecialIds(), 0),
}


def test_special_ids_and_sentinels(kind, loaded):
    special, start = SPECIAL[kind]
    assert loaded.special == loaded.ids.special == special
    assert special.start == start
    # GPT-2's unknown token is its EOS.
    assert loaded.special.of_unknown_text == (None if kind == "gpt2" else special.unk)
    assert loaded.record.special == (None if kind == "byte" else special)
    assert special.zero_pads == (kind in ("bert", "gemma", "byte"))
    assert loaded.size == len(loaded.ids.pieces) + SENTINELS
    assert loaded.ids.id_of("<extra_id_0>") == loaded.size - 1
    assert not loaded.is_sentencepiece or kind in ("llama", "gemma")


def test_random_tokens_have_no_role(kind, loaded):
    special = {*dataclasses.astuple(loaded.special), *range(loaded.first_sentinel, loaded.size)}
    drawn = {*loaded.ids.random_ids.tolist()}
    assert not drawn & special
    names = {loaded.piece(number) for number in {*range(loaded.size)} - drawn - special}
    assert names == ({"[MASK]"} if kind == "bert" else set())


@pytest.mark.torch
def test_ids_are_those_of_the_library(kind, folders, loaded):
    found = loaded.encode(TEXTS)
    assert all(each.dtype == np.int32 for each in found)
    if kind == "byte":
        theirs = [[byte + 3 for byte in text.encode()] for text in TEXTS]
        codec = loaded.codec.tokenizer  # the library itself, with the same table
        each = codec.encode_batch(TEXTS, add_special_tokens=False)
        assert [encoding.ids for encoding in each] == theirs
    elif loaded.is_sentencepiece:
        theirs = loaded.processor.encode(TEXTS)
    else:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folders[kind])(TEXTS, add_special_tokens=False)
        theirs = theirs["input_ids"]
    assert [ids.tolist() for ids in found] == theirs


def test_text_without_the_library(kind, loaded):
    for text, ids in zip(TEXTS, loaded.encode(TEXTS), strict=True):
        # An object without the codec, as the trainer has it.
        ids_alone = loaded.record.ids(loaded.model)
        shown = decode.decode(ids.tolist(), ids_alone)
        expected = loaded.codec.decode(ids.tolist())
        if kind == "bert":  # whose decoder also removes the spaces before punctuation
            shown, expected = shown.replace(" ", ""), expected.replace(" ", "")
        assert shown == expected.removeprefix(" ")
        if kind not in ("bert", "unigram"):  # these know no character outside their text
            assert expected.removeprefix(" ") == text
        with_more = [*ids.tolist(), loaded.special.eos, loaded.size - 1]
        assert decode.decode(with_more, ids_alone) == decode.decode(ids.tolist(), ids_alone)
        assert (
            vocabulary.Vocabulary(loaded.model, loaded.record)
            .decode(np.array(with_more))
            .endswith("<extra_id_0>")
        )


def test_words_begin_where_spaces_are(kind, loaded):
    if kind == "byte":
        assert np.flatnonzero(loaded.ids.word_starts[3:259]).tolist() == [ord(" ")]
        return
    (ids,) = loaded.encode(["of the list of the list"])
    starts = loaded.ids.word_starts[ids]
    # A tokenizer without a space before the first word says so.
    assert int(starts.sum()) == 6 - (kind in ("gpt2", "llama3", "gemma"))


def test_a_cache_reads_what_a_build_loaded(kind, loaded, tmp_path):
    (tmp_path / loaded.record.file_name).write_bytes(loaded.model)
    again = vocabulary.of_cache(str(tmp_path), loaded.record)
    assert again == loaded
    assert again.counts_agree()
    fewer = dataclasses.replace(loaded.record, pieces=loaded.record.pieces - 1)
    assert not vocabulary.Vocabulary(loaded.model, fewer).counts_agree()
    (tmp_path / loaded.record.file_name).write_bytes(loaded.model + b" ")
    with pytest.raises(UserError, match="is damaged: its sha256 is"):
        vocabulary.of_cache(str(tmp_path), loaded.record)


@pytest.mark.tensorflow
def test_bytes_are_those_of_seqio(folders):
    import seqio

    ours, theirs = vocabulary.load("bytes", 100), seqio.ByteVocabulary(extra_ids=100)
    assert (ours.size, ours.special.eos, ours.special.unk) == (
        theirs.vocab_size, theirs.eos_id, theirs.unk_id,
    )  # fmt: skip
    text = "tab\t</s> <unk> 日本"
    assert ours.encode([text])[0].tolist() == theirs.encode(text)
    # All bytes, and no others, have a piece.
    assert sorted(byte_level.alphabet().values()) == list(range(256))


def test_texts_cannot_spell_control_pieces(folders):
    loaded = vocabulary.load(folders["gpt2"])
    (ids,) = loaded.encode(["before <|endoftext|> after"])
    assert loaded.special.eos in ids
    assert loaded.reserved[ids].any()
    assert not loaded.reserved[loaded.encode(["before after"])[0]].any()


def test_an_eos_is_added_where_there_is_none(folders, tmp_path):
    value = json.loads(pathlib.Path(folders["gpt2"], "tokenizer.json").read_text())
    value["added_tokens"] = []
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(value))
    loaded = vocabulary.load(str(path), SENTINELS)
    assert loaded.special.eos == 400 == len(loaded.ids.pieces) - 1
    assert loaded.special_pieces() == {"eos": "</s>"}
    assert (loaded.record.pieces, loaded.record.extra_ids) == (400, SENTINELS + 1)
    assert loaded.record.added_sentinels == loaded.record.sentinels == SENTINELS
    assert loaded.counts_agree()


def changed(folders, tmp_path, kind, change):
    """Writes a copy of a tokenizer.json and of the files beside it; returns its folder."""
    value = json.loads(pathlib.Path(folders[kind], "tokenizer.json").read_text())
    change(value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    return str(tmp_path)


def without_unknown(value):
    value["model"]["unk_token"] = "[NONE]"


def with_sentinel(value):
    value["added_tokens"].append({**value["added_tokens"][0], "id": 0, "content": "<extra_id_0>"})


# A change of a tokenizer.json, and what is said of it.
REFUSED = [
    ("bert", without_unknown, "neither an unknown token nor all"),
    ("gpt2", with_sentinel, "has <extra_id_0> as id 0, and sentinels must be"),
    ("gpt2", lambda value: value["model"].update(dropout=0.1), r"BPE-dropout \(0.1\), .*: set dro"),
    ("bert", lambda value: value["model"]["vocab"].update(far=2**31), "has the id 2,147,483,648, "),
    ("bert", lambda value: value["model"]["vocab"].pop("[UNK]"), r"token \(\[UNK\]\) that its mo"),
    ("unigram", lambda value: value["model"].update(unk_id=9999), r"an unknown token \(9999\)"),
]


@pytest.mark.parametrize(("kind", "change", "says"), REFUSED)
def test_a_tokenizer_that_cannot_be_used(kind, change, says, folders, tmp_path):
    with pytest.raises(UserError, match=says):
        vocabulary.load(changed(folders, tmp_path, kind, change))


def with_a_gap(value):
    value["added_tokens"][-1]["id"] += 5


def out_of_order(value):
    added = value["added_tokens"]
    size = len(value["model"]["vocab"])
    value["added_tokens"] = [
        {**added[0], "id": size + 1, "content": "<a>"},
        {**added[0], "id": size, "content": "<b>"},
    ]


@pytest.mark.parametrize("change", [with_a_gap, out_of_order])
def test_added_tokens_that_the_library_numbers_otherwise(change, folders, tmp_path):
    path = changed(folders, tmp_path, "gpt2", change)
    for config in tmp_path.glob("*_config.json"):
        config.unlink()
    with pytest.raises(UserError, match=r"the added token <.*> has the id 40., but") as found:
        vocabulary.load(path)
    assert "\n" not in str(found.value)


def test_mistakes_take_one_line(folders, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_bytes(pathlib.Path(folders["gpt2"], "tokenizer.json").read_bytes()[:1000])
    other = tmp_path / "other.json"
    other.write_text('{"model": {}}')
    with_bad_config = tmp_path / "config"
    with_bad_config.mkdir()
    changed(folders, with_bad_config, "bert", lambda value: None)
    (with_bad_config / "special_tokens_map.json").write_text('{"eos_token": "</end>"}')
    for path, message in (
        (str(broken), "is not a tokenizer.json of Hugging Face's tokenizers, or is damaged"),
        (str(other), "is not a tokenizer.json of Hugging Face's tokenizers, or is damaged"),
        (str(with_bad_config), "has no token </end>"),
        (str(tmp_path / "nowhere"), "no vocabulary at .*nowhere/sentencepiece.model"),
        ("google/t5-small", "a name on the Hugging Face Hub is not fetched: hf download it"),
    ):
        with pytest.raises(UserError, match=message) as found:
            vocabulary.load(path)
        assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="but this needs a SentencePiece model"):
        _ = vocabulary.load("bytes").processor


@pytest.mark.parametrize(
    ("kind", "type_"), [("gpt2", "BPE"), ("bert", "WordPiece"), ("unigram", "Unigram")]
)
def test_a_model_that_does_not_name_its_type(kind, type_, folders, tmp_path):
    def nameless(value):
        del value["model"]["type"]

    loaded = vocabulary.load(changed(folders, tmp_path, kind, nameless))
    assert loaded.ids.pieces == vocabulary.load(folders[kind]).ids.pieces
    assert "type" not in json.loads(loaded.model)["model"]
    assert tokenizer_json.parsed(loaded.model)["model"]["type"] == type_


def test_a_text_on_which_the_library_fails_is_named(folders, tmp_path, capfd):
    """Two tokens take the same white space, and `tokenizers` panics."""

    def with_white_space(value):
        plain = {"single_word": False, "normalized": False, "special": False}
        size = 1 + max(each["id"] for each in value["added_tokens"])
        value["added_tokens"] += [
            {**plain, "id": size, "content": "<m>", "lstrip": False, "rstrip": True},
            {**plain, "id": size + 1, "content": "\n", "lstrip": True, "rstrip": False},
        ]

    loaded = vocabulary.load(changed(folders, tmp_path, "gpt2", with_white_space))
    assert len(loaded.encode(["a <m> b"])) == 1
    with pytest.raises(UserError, match=r"tokenizers cannot encode the text 'a <m> \\n b': "):
        loaded.encode(["fine", "a <m>  \n  b"])
