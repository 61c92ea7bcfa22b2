"""Unigram models of a tokenizer.json have the ids of Hugging Face's `tokenizers`."""

import collections
import functools
import json
import pathlib
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from pipeline.tokenizer import tokenizer_file
from pipeline.tokenizer.word_tokenizer import Unsupported
from tasks.vocabularies.tokenizer_json import TokenizersCodec
from tests.laboratory.tokenizers import _GRAPHEMES, _ODD, charsmap
from tests.pipeline.tokenizer.test_word_tokenizer import assert_equal

LINES = pathlib.Path(__file__).with_name("texts.txt").read_text().splitlines()
BYTES = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
COLLAPSE = normalizers.Replace(Regex(" {2,}"), " ")
MARKS = normalizers.Replace(Regex(" {2,}"), "▁")
STRIP = normalizers.Strip(False, True)


@functools.cache
def pieces() -> list[tuple[str, float]]:
    """Returns characters and parts of words, many of the same score; some characters are none."""
    words = collections.Counter(f"▁{word}" for line in LINES for word in line.split())
    parts = {word[:end] for word in words for end in (2, 3, 5, 9)} | {*words} | {"▁", "ab", "bc"}
    parts |= {each for word in words for each in word if ord(each) % 7}
    return [("<unk>", 0.0), *((each, -2.0 - len(each) // 2) for each in sorted(parts - {"<unk>"}))]


def made(steps=(), splits=False, scheme="always", falls_back=False, tokens=(), rules="nmt_nfkc"):
    tokenizer = Tokenizer(
        models.Unigram(pieces() + (BYTES if falls_back else []), 0, byte_fallback=falls_back)
    )
    first = [normalizers.Precompiled(charsmap(rules))] if rules else []
    if first or steps:
        tokenizer.normalizer = normalizers.Sequence([*first, *steps])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    both = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.pre_tokenizer = both if splits else metaspace
    tokenizer.add_tokens([*tokens])
    return tokenizer


def of(tokenizer: Tokenizer):
    model = tokenizer.to_str().encode()
    codec = TokenizersCodec(model, "tokenizer.json")
    return tokenizer_file.tokenizer(model, codec), codec


SPACING = {
    "XLM-R": {"splits": True},
    "T5": {"steps": [STRIP, MARKS]},
    "one space": {"steps": [COLLAPSE]},
    "every space": {},
    "no prefix": {"scheme": "never", "steps": [COLLAPSE, STRIP]},
    "bytes": {"falls_back": True},
    "no rules": {"rules": "", "splits": True},
    "a token": {"tokens": [AddedToken("<s>", normalized=False)]},
    "a late token": {"tokens": [AddedToken("<s>", normalized=True)]},
}


@pytest.mark.parametrize("name", SPACING)
def test_any_text(name):
    pair = of(made(**SPACING[name]))
    draw = random.Random(name)
    texts = ["", " ", "   ", "\n", "\u200b", "\0", *LINES, "  ".join(LINES), "\n".join(LINES)]
    parts = (*_ODD, *_GRAPHEMES, *_GRAPHEMES, *LINES, " ", "  ", "<s>", "＜s>", "word " * 40)
    texts += ["".join(draw.choices(parts, k=draw.randrange(9))) for _ in range(1500)]
    assert_equal(pair, texts)
    assert pair[0].refused < 0.3 * len(texts)


def test_real_text_and_long_words():
    fast, codec = of(made(**SPACING["T5"]))
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzșțăâî中文字"
    texts = ["a" * 50_000, "".join(draw.choices(letters, k=20_000)), " " * 5000, "ab" * 40, *LINES]
    assert_equal((fast, codec), [*texts, " ".join(LINES * 9)])
    assert not fast.refused


def test_the_first_of_equal_paths_is_kept():
    """With scores of tenths, rounding in float64 decides, by the order of the sums."""
    scores = {"▁": -0.1, "a": -0.1, "b": -0.2, "c": -0.3, "ab": -0.3, "bc": -0.5, "abc": -0.6}
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *scores.items()], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    draw = random.Random(1)
    assert_equal(of(tokenizer), ["".join(draw.choices("aabbcc? ", k=50)) for _ in range(500)])


def _json(change) -> Tokenizer:
    value = json.loads(made(**SPACING["T5"]).to_str())
    change(value["model"])
    return Tokenizer.from_str(json.dumps(value))


REFUSED = {
    "normalizer NFKC": lambda: made(steps=[normalizers.NFKC()]),
    "normalizer Strip": lambda: made(steps=[MARKS, STRIP]),
    "keeps repeated ones": lambda: made(steps=[STRIP]),
    "does not cut words": lambda: made(scheme="first"),
    "pre-tokenizer WhitespaceSplit, Metaspace": lambda: made(steps=[MARKS], splits=True),
    "found in normalised text, has a space": lambda: made(tokens=[AddedToken("a b")]),
    "changes the added token": lambda: made(tokens=[AddedToken("Ａ")]),
    "zero byte, or is there twice": lambda: _json(lambda model: model["vocab"].append(["\0", -1])),
    "part of other pieces": lambda: _json(lambda model: model["vocab"].append(["a<unk>", -1])),
    "lacks a byte": lambda: _json(lambda model: model.update(byte_fallback=True)),
    "has a positive score": lambda: _json(lambda model: model["vocab"].__setitem__(0, ["?", 9.0])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    with pytest.raises(Unsupported, match=reason):
        of(REFUSED[reason]())
