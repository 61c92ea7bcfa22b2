"""Texts that spell special tokens or sentinels are encoded as chosen, by all tokenizers alike."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.tokenizer import spelling, tokenize
from tasks import vocabulary
from tasks.cache.manifest import KEEP, QUARANTINE, SENTINELS, SPECIAL_TOKENS, TEXT, Spelling
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from vocab.train import add_sentinels

KINDS = ("gpt2", "llama3", "bert", "unigram")
PLAIN = Spelling(QUARANTINE, TEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("spelling")
    lines = small_tokenizers.documents(200)
    made = {kind: small_tokenizers.KINDS[kind](root / kind, lines) for kind in KINDS}
    model = small_tokenizers.t5(root / "t5", lines, 500)
    with open(model, "rb") as file:
        data = add_sentinels(file.read(), 20)
    (root / "with.model").write_bytes(data)
    return made | {"t5": str(root / "with.model"), "t5_added": model}


def spelt(loaded, choice, engine, texts):
    """Returns (ids of each text, kept, failures)."""
    array = pa.array(texts)
    tokens, lengths = tokenize.Tokenizer(loaded, engine).encode(array)
    found = spelling.Speller(loaded, choice, engine)(array, tokens, lengths)
    ends = np.cumsum(found.lengths)[:-1]
    return [ids.tolist() for ids in np.split(found.tokens, ends)], found.kept, found.failures


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_plain_text(folders, kind):
    loaded = vocabulary.load(folders[kind], 20)
    names = [*loaded.special_pieces().values()]
    texts = ["a document", *(f"one{name}two {name} {name}{name}" for name in names), "the last ☃"]
    plain = loaded.encode(texts)
    fast, kept, _ = spelt(loaded, PLAIN, tokenize.FAST, texts)
    library, _, _ = spelt(loaded, PLAIN, tokenize.LIBRARY, texts)
    assert fast == library
    assert kept[SPECIAL_TOKENS].tolist() == [False, *[True] * len(names), False]
    assert not kept[SENTINELS].any()
    roles = {loaded.special.pad, loaded.special.eos, loaded.special.bos} - {None}
    for text, ids in zip(texts[1:-1], fast[1:-1], strict=True):
        assert not roles & {*ids}
        letters = "".join(loaded.decode(np.array(ids)).split()).lower()
        assert letters == "".join(text.split()).lower() or loaded.special.unk in ids
    for number in (0, len(texts) - 1):
        assert fast[number] == plain[number].tolist()


def test_sentinels_are_ids_as_in_a_prompt_or_plain_text(folders):
    texts = ["no mark", "<extra_id_0> <extra_id_0> Met <extra_id_19>", "<extra_id_20>"]
    for kind in ("t5", "t5_added"):
        loaded = vocabulary.load(folders[kind], 0 if kind == "t5" else 20)
        found, kept, failures = spelt(loaded, Spelling(KEEP, QUARANTINE), tokenize.FAST, texts)
        expected = vocabulary.encode_with_sentinels(loaded, texts[1])
        assert found[1] == expected.tolist()
        assert found[1][:2] == [loaded.size - 1] * 2
        assert found[1][-1] == loaded.first_sentinel
        assert kept[SENTINELS].tolist() == [False, True, False]
        assert "has no <extra_id_20>" in failures[2]
        other = spelt(loaded, Spelling(KEEP, QUARANTINE), tokenize.FAST, ["<extra_id_00>"])
        assert max(other[0][0]) < loaded.first_sentinel
        assert not any(other[1][SENTINELS])
    loaded = vocabulary.load(folders["t5"])
    fast, kept, _ = spelt(loaded, Spelling(TEXT, QUARANTINE), tokenize.FAST, texts[:2])
    assert fast == spelt(loaded, Spelling(TEXT, QUARANTINE), tokenize.LIBRARY, texts[:2])[0]
    assert max(fast[1]) < loaded.first_sentinel
    assert kept[SENTINELS].tolist() == [False, True]
    # Without sentinels of its own, the vocabulary spells them this way.
    bare = vocabulary.load(folders["t5_added"])
    assert fast == [ids.tolist() for ids in bare.encode(texts[:2])]


@pytest.mark.parametrize(
    ("kind", "choice", "is_pairs", "message"),
    [
        ("t5", Spelling(KEEP, QUARANTINE), False, "--sentinels=keep is for pairs"),
        ("t5_added", Spelling(KEEP, QUARANTINE), True, "has no sentinels; add --extra_ids=100"),
        ("t5_added", Spelling(TEXT, QUARANTINE), True, "--sentinels=text has no effect"),
        ("t5", PLAIN, True, "--special_tokens=text has no effect"),
        ("bytes", PLAIN, True, "--special_tokens=text has no effect"),
    ],
)
def test_choices_without_effect_are_refused(folders, kind, choice, is_pairs, message):
    loaded = vocabulary.load(folders.get(kind, kind))
    with pytest.raises(UserError, match=message):
        spelling.check(loaded, choice, is_pairs)
