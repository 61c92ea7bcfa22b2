"""Corpora of several languages, as --corpus and --languages name them."""

import json

import pytest

from tasks.reading import languages
from tasks.reading.spec import parse
from tasks.terminal.command_line import UserError


@pytest.fixture
def folders(tmp_path):
    for name in ("ro", "en", "sr-Latn"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.txt").write_text("a\n")
    (tmp_path / "data" / "README").write_text("not a language\n")
    (tmp_path / "data" / ".cache").mkdir()
    return tmp_path / "data"


def test_one_corpus_has_no_languages():
    assert languages.specs(["text:a?document=file"], None) == {"": parse("text:a?document=file")}
    template = "json:a.jsonl?inputs={language} x&targets=y"
    assert languages.specs([template], None) == {"": parse(template)}


def test_languages_are_the_folders_or_files_that_are_there(folders):
    found = languages.specs([f"text:{folders}/{{language}}/*.txt?split=train"], None)
    assert list(found) == ["en", "ro", "sr-Latn"]
    assert found["ro"] == parse(f"text:{folders}/ro/*.txt?split=train")
    (folders / "mc4.fi.txt").write_text("x")
    assert list(languages.specs([f"text:{folders}/mc4.{{language}}.txt"], None)) == ["fi"]
    languages.check(found)


def test_alternatives_in_braces_go_with_languages(folders):
    for name in ("ro/2.md", "mc4.fi.txt", "mc4.fi.md", "wiki.et.md"):
        (folders / name).write_text("x")
    found = languages.specs([f"text:{folders}/{{language}}/*.{{txt,md}}"], None)
    assert found["ro"] == parse(f"text:{folders}/ro/*.{{txt,md}}")
    assert list(found) == ["en", "ro", "sr-Latn"]
    languages.check(found)
    names = languages.specs([f"text:{folders}/{{mc4,wiki}}.{{language}}.{{txt,md}}"], None)
    assert list(names) == ["et", "fi"]
    languages.check(names)
    with pytest.raises(UserError, match="name its languages"):
        languages.specs([f"text:{folders}/{{a,b}}/{{language}}/*"], None)


def test_languages_are_named(folders):
    found = languages.specs(["hf:allenai/c4:{language}@v1"], "ro, en")
    assert found == {"ro": parse("hf:allenai/c4:ro@v1"), "en": parse("hf:allenai/c4:en@v1")}
    found = languages.specs(["ro=text:x=1/*", "en=python_docs"], None)
    assert found == {"ro": parse("text:x=1/*"), "en": parse("python_docs")}


@pytest.mark.parametrize(
    ("texts", "names", "says"),
    [
        (["text:d/{language}"], "ro,en,ro", "names ro twice"),
        (["ro=text:a", "ro=text:b"], None, "names ro twice"),
        (["text:a"], "ro", "has no {language}"),
        (["text:a", "text:b"], None, "--corpus=text:a has no name"),
        (["ro=text:a", "en=text:b"], "ro,en", "goes with one --corpus"),
        (["text:d/{language}"], "r/o", "'r/o' is not a valid name"),
        (["text:d/{language}"], "ro,,en", "'' is not a valid name"),
        (["hf:allenai/c4:{language}"], None, "name its languages, for example --languages=ro,en"),
        (["text:no/such/{language}/*"], None, "there is no folder no/such"),
    ],
)
def test_mistakes_are_one_line(texts, names, says):
    with pytest.raises(UserError, match=says):
        languages.specs(texts, names)


def test_an_empty_folder_is_named(folders):
    (folders / "fi").mkdir()
    found = languages.specs([f"text:{folders}/{{language}}/*.txt"], None)
    with pytest.raises(UserError, match="language fi: no file matches"):
        languages.check(found)
    (folders / "fi" / "1.txt").write_text("")
    with pytest.raises(UserError, match=r"language fi: corpus .* is empty"):
        languages.check(found)
    with pytest.raises(UserError, match="has no folders named after languages"):
        languages.specs([f"text:{folders}/ro/{{language}}/*.txt"], None)


def test_folders_whose_names_cannot_be_languages_are_named(folders):
    for name in ("a b", "ελληνικά", "_zh", "zh(TW)"):
        (folders / name).mkdir()
    with pytest.raises(
        UserError, match=r"'_zh', 'a b', 'zh\(TW\)', 'ελληνικά' in .*,ro,"
    ) as caught:
        languages.specs([f"text:{folders}/{{language}}/*.txt"], None)
    assert "--languages=en,ro,sr-Latn" in str(caught.value)
    found = languages.specs([f"text:{folders}/{{language}}/*.txt"], "en,ro")
    assert list(found) == ["en", "ro"]


def test_a_missing_column_of_the_last_language_is_known_before_the_first_is_built(tmp_path):
    for name, column in (("en", "text"), ("ro", "body")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "1", column: "a"}))
    with pytest.raises(UserError, match=r"language ro: .*has no column text"):
        languages.check(languages.specs([f"json:{tmp_path}/{{language}}.jsonl"], None))


def test_an_error_of_a_corpus_without_a_name_speaks_of_no_language(tmp_path):
    with pytest.raises(UserError) as caught:
        languages.check(languages.specs([f"text:{tmp_path}/none.txt"], None))
    assert str(caught.value) == f"no file matches {tmp_path}/none.txt"
    two = languages.specs([f"text:{tmp_path}/{name}.txt" for name in "ab"], None, unnamed=True)
    with pytest.raises(UserError) as caught:
        languages.check(two)
    assert str(caught.value) == f"--corpus=text:{tmp_path}/a.txt: no file matches {tmp_path}/a.txt"
