"""Compares vocabularies of every kind on the same text."""

import json

import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tests.support import corpora, small_tokenizers
from tests.support.pages import Page
from vocab import fit
from vocab.annexes.comparing_vocabularies import compare

LINES = {
    "en": ["the cat sat, 12 cats.", "A Cat\tand a hat", "plain words only here"] * 20,
    "ru": ["кот и шапка", "кот сел 世"] * 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with texts in two languages, a GPT-2 and a BERT of theirs."""
    root = tmp_path_factory.mktemp("compare")
    for language, lines in LINES.items():
        corpora.write_json(root / f"{language}.jsonl", lines)
    lines = small_tokenizers.documents(60) + LINES["en"]
    small_tokenizers.gpt2(root / "gpt2", lines)
    small_tokenizers.bert(root / "bert", lines)
    small_tokenizers.llama(root / "llama", lines)
    return root


@pytest.fixture(scope="module")
def found(folder):
    """Returns the JSON of the command, by (vocabulary, corpus), and the page."""
    compare.main(
        [
            *(f"--vocabulary={folder}/{name}" for name in ("gpt2", "bert", "llama")),
            "--vocabulary=bytes",
            f"--corpus=json:{folder}/{{language}}.jsonl?validation=0",
            f"--json={folder}/out.json",
            f"--output={folder}/out.html",
        ]
    )
    value = json.loads((folder / "out.json").read_text())
    measured = {
        (each["vocabulary"].rpartition("/")[2], each["corpus"]): each for each in value["measured"]
    }
    return value["vocabularies"], measured, (folder / "out.html").read_text()


def test_all_kinds_are_measured_on_the_same_text(found):
    vocabularies, measured, _ = found
    kinds = ["byte-level BPE", "WordPiece", "SentencePiece bpe", "bytes"]
    assert [each["kind"] for each in vocabularies] == kinds
    assert len(measured) == 8
    for language, lines in LINES.items():
        of_language = [each for (_, corpus), each in measured.items() if corpus == language]
        size = sum(len(line.encode()) for line in lines)
        assert {each["bytes"] for each in of_language} == {size}
        assert {each["documents"] for each in of_language} == {len(lines)}
        assert measured["bytes", language]["tokens"] == size
        assert measured["bytes", language]["bytes_per_token"] == 1


def test_bytes_a_token_by_script_by_hand(found):
    _, measured, _ = found
    scripts = measured["bytes", "ru"]["by_script"]
    assert list(scripts) == ["Cyrillic", "Han"]
    # With the space before each: кот и шапка, кот сел.
    assert scripts["Cyrillic"]["tokens"] == 20 * (7 + 3 + 11 + 7 + 7)
    assert scripts["Han"]["bytes"] == 20 * 4
    assert measured["bert", "ru"]["by_script"]["Han"]["unknown_rate"] == 1


def test_round_trips_by_hand(found):
    _, measured, _ = found
    for language in LINES:
        assert measured["bytes", language]["exact_documents"] == 1
        assert measured["gpt2", language]["exact_documents"] == 1
        assert measured["gpt2", language]["difference"] is None
    # BERT loses the capitals and the tab of the second line.
    assert measured["bert", "en"]["exact_documents"] == pytest.approx(2 / 3)
    assert measured["bert", "en"]["exact_lines"] == pytest.approx(2 / 3)
    assert measured["bert", "en"]["difference"] == ["A Cat\tand a hat", "a cat and a hat"]
    assert measured["llama", "ru"]["byte_rate"] > 0


def test_the_page_is_html_and_names_everything(found):
    _, _, page = found
    Page(page)
    for word in ("Vocabularies compared", "WordPiece", "Cyrillic", "exact lines", "Round trips"):
        assert word in page
    assert "http" not in page.partition("</style>")[2]


def test_differences_are_shown_with_what_is_around_them():
    assert compare.difference("a" * 50 + "b", "a" * 50 + "c") == ("a" * 24 + "b", "a" * 24 + "c")
    assert compare.difference("ab", "a") == ("ab", "a")


def test_mistakes_are_one_line(folder):
    corpus = f"--corpus=json:{folder}/en.jsonl"
    with pytest.raises(UserError, match="--vocabulary=bytes is given twice"):
        compare.main(["--vocabulary=bytes", "--vocabulary=bytes", corpus])
    with pytest.raises(UserError, match="no vocabulary at"):
        compare.main([f"--vocabulary={folder}/none", corpus])


def test_a_vocabulary_that_adds_a_space_gets_none(folder):
    loaded = vocabulary.load(f"{folder}/llama")
    found = fit.of_texts(loaded, "train", ["xx"], space=" ").by_script["Latin"]
    assert found.tokens == len(loaded.encode(["xx"])[0])
    assert len(loaded.encode([" xx"])[0]) > found.tokens
    assert found.bytes == 3  # with its space


def test_files_are_checked_before_anything_is_measured(folder):
    flags = ["--vocabulary=bytes", "--corpus=json:nowhere.jsonl"]
    with pytest.raises(UserError, match="is a folder: name a file"):
        compare.main([*flags, f"--json={folder}"])
    with pytest.raises(UserError, match=r"there is no folder .*/none"):
        compare.main([*flags, f"--output={folder}/none/page.html"])
    with pytest.raises(UserError, match="is also --output"):
        compare.main([*flags, f"--json={folder}/new", f"--output={folder}/new"])


def test_only_its_own_files_are_written_over(found, folder):
    texts = folder / "en.jsonl"
    before = texts.read_bytes()
    flags = ["--vocabulary=bytes", f"--corpus=json:{texts}"]
    for flag, path in (("json", texts), ("output", texts), ("json", folder / "out.html")):
        with pytest.raises(UserError, match="holds something else: name another file"):
            compare.main([*flags, f"--{flag}={path}"])
    assert texts.read_bytes() == before
    for suffix in ("json", "html"):
        (folder / f"again.{suffix}").write_bytes((folder / f"out.{suffix}").read_bytes())
    compare.main([*flags, f"--json={folder}/again.json", f"--output={folder}/again.html"])
    assert len(json.loads((folder / "again.json").read_text())["vocabularies"]) == 1
