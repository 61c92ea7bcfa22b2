"""Decoding equals SentencePiece's."""

import random

import pytest

from tasks import vocabulary
from tasks.decode import decode, texts
from tasks.reading import stdlib_docs
from tests.support.small_tokenizers import t5

SCRIPTS = (
    "The quick brown fox — “naïve” façade, 12,345.67 €",
    "自然言語処理は、計算機科学と言語学の一分野である。",
    "我能吞下玻璃而不伤身体。한국어 문장입니다.",
    "👩‍👩‍👧‍👦 family, 🇷🇴 flag, e\u0301 combining, n\u0303, क्षत्रिय",
    "\u202bעברית\u202c مرحبا بالعالم right to left",
    "tabs\tand  many   spaces ",
)


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "unknown"])
def loaded(request, tmp_path_factory):
    """Returns a vocabulary with byte pieces, or one with an unknown piece."""
    documents = list(stdlib_docs.documents().values())[:300]
    lines = [line for text in documents for line in text.split("\n")[:20]]
    prefix, more = tmp_path_factory.mktemp("vocabulary") / "sentencepiece", ["[code]"]
    path = t5(prefix, lines, 600, byte_fallback=request.param, user_defined_symbols=more)
    return vocabulary.load(path, extra_ids=100)


@pytest.mark.parametrize("text", SCRIPTS)
def test_text_is_decoded_as_sentencepiece_does(loaded, text):
    tokens = loaded.processor.encode(text + " [code] end")
    assert decode(tokens, loaded.ids) == loaded.processor.decode(tokens)
    assert len(texts(tokens, loaded.ids)) == len(tokens)


def test_a_character_is_the_text_of_its_first_byte(loaded):
    found = texts(loaded.processor.encode("自x"), loaded.ids)
    if loaded.processor.is_byte(4):
        assert found == [" ", "自", "", "", "x"]
    else:
        assert found == [" ", " \u2047 ", "x"]


def test_any_ids_are_decoded_as_sentencepiece_does(loaded):
    generator = random.Random(5)
    byte_pieces = range(3, loaded.record.pieces if loaded.processor.is_byte(4) else 5)
    for _ in range(400):
        # Cut anywhere, even inside a character, and add bytes that form no character.
        tokens = loaded.processor.encode(generator.choice(SCRIPTS))
        begin = generator.randrange(len(tokens))
        tokens = tokens[begin : begin + generator.randrange(1, 40)]
        tokens += generator.choices(byte_pieces, k=generator.randrange(12))
        # SentencePiece removes leading spaces.
        found = decode(tokens, loaded.ids).lstrip(" ")
        assert found == loaded.processor.decode(tokens).lstrip(" ")
