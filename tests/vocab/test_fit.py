"""Reports on how well a vocabulary fits a corpus: rates by script."""

import json
from typing import ClassVar

import pytest

from tasks import vocabulary
from tasks.reading import sources
from tasks.vocabulary import SpecialIds
from vocab import fit, train
from vocab.word_splitter import normaliser


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("word Über (naïve) ½a", "Latin"),
        ("слово ёж", "Cyrillic"),
        ("λόγος ἐν", "Greek"),
        ("世界 々 〇", "Han"),
        ("ひらがな", "Hiragana"),
        ("カタカナ ー", "Katakana"),
        ("한국어 ㄱ", "Hangul"),
        ("كتاب", "Arabic"),
        ("ספר", "Hebrew"),
        ("पुस्तक", "Devanagari"),
        ("หนังสือ", "Thai"),
        ("2024 ٣ -5 $1,000", "digits"),
        ("... — € 。", "punctuation"),
        ("ქართული 𐎀", "other"),
    ],
)
def test_the_script_of_a_word(words, script):
    assert {word: fit.script_of(word) for word in words.split()} == dict.fromkeys(
        words.split(), script
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    texts = {"a": "the cat sat, 12 cats. " * 20, "b": "кот the сел " * 10 + "世"}
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    corpus = sources.resolve(sources.parse(f"json:{folder}/a.jsonl?validation=0"))
    options = train.Options(19, extra_ids=2, character_coverage=1.0)
    train.train(options, corpus, str(folder / "vocabulary"))
    return folder


def test_counts_by_script_by_hand(folder):
    loaded = train.vocabulary.load(str(folder / "vocabulary"))
    corpus = sources.resolve(sources.parse(f"json:{folder}/b.jsonl?validation=0"))
    found = fit.measure(loaded, corpus)
    assert (found.documents, found.words) == (1, 31)
    assert found.characters == 10 * 9 + 1
    assert found.covered == 10 * 3
    assert found.character_coverage == pytest.approx(30 / 91)
    assert list(found.by_script) == ["Latin", "Cyrillic", "Han"]
    latin, cyrillic, han = found.by_script.values()
    assert (latin.words, latin.bytes, latin.characters, latin.covered) == (10, 30, 30, 30)
    assert (cyrillic.words, cyrillic.bytes, cyrillic.covered) == (20, 120, 0)
    assert (han.words, han.bytes, han.characters) == (1, 3, 1)
    # SentencePiece joins unknown characters that follow each other: ▁ and <unk> for each word.
    assert (cyrillic.tokens, cyrillic.unknown_tokens) == (40, 20)
    assert cyrillic.tokens_per_word == 2
    assert latin.unknown_tokens == 0
    assert latin.tokens == 10 * len(loaded.processor.encode("the"))
    assert found.tokens == latin.tokens + cyrillic.tokens + han.tokens
    assert fit.Report.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_the_normaliser_follows_the_named_rule():
    assert normaliser("identity", True, ("\n",)) != normaliser("nmt_nfkc", True, ("\n",))


class Dna:
    """Encodes four letters and nothing else."""

    pieces: ClassVar = ["<pad>", "</s>", "<unk>", *"ACGT"]
    special = SpecialIds()

    def encode(self, text):
        return [self.pieces.index(each) for each in text]

    def decode(self, ids):
        return "".join(self.pieces[number] for number in ids)


def test_a_class_need_not_encode_what_no_text_has():
    vocabulary.register("dna_of_the_report", Dna)
    found = fit.of_texts(vocabulary.load("dna_of_the_report"), "train", ["ACGT", "GATTACA"])
    assert (found.tokens, found.pieces_used) == (11, 4)
