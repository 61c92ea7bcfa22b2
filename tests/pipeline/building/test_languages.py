"""Several languages built as one task: each cache is that of the language alone."""

import functools
import pathlib
import shutil

import pytest

from pipeline.build import main
from tasks.cache import language_set
from tasks.storage import files, lock
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import NEW_LAW
from tests.pipeline.exclusion.named_documents import build as build
from tests.pipeline.exclusion.named_documents import text, write
from tests.support import small_tokenizers
from tests.support.corpora import write_json

TASK = "books_span_corruption"
OF = ("en", "ro")


@pytest.fixture(scope="module")
def folders(documents, tmp_path_factory):
    """Returns a folder with a folder of JSON lines for each language, and an empty one."""
    root = tmp_path_factory.mktemp("languages")
    texts = list(documents.items())
    for place, language in enumerate((*OF, "sw")):
        (root / language).mkdir()
        write_json(root / language / "1.jsonl", dict(texts[place::5][: 200 - 50 * place]))
    return root


@pytest.fixture(scope="module")
def arguments(folders, vocabulary):
    """Returns a function: folder of caches and further flags -> the command's arguments."""

    def of(cache_dir, *more, corpus="{language}", name="books"):
        return [
            "--task=span_corruption",
            *([f"--name={name}"] if name else []),
            f"--vocabulary={vocabulary}",
            "--extra_ids=100",
            f"--cache_dir={cache_dir}",
            f"--corpus=json:{folders}/{corpus}/*.jsonl?validation=0.1",
            *more,
        ]

    return of


@pytest.fixture(scope="module")
def built(arguments, tmp_path_factory):
    cache_dir = tmp_path_factory.mktemp("caches")
    main(arguments(cache_dir, "--languages=en,ro"))
    return cache_dir


def caches(cache_dir, checksums):
    return {
        name: checksums(cache_dir / f"books_{name}_span_corruption")
        for name in (*OF, "sw")
        if (cache_dir / f"books_{name}_span_corruption").exists()
    }


def test_each_language_has_the_bytes_of_a_build_of_it_alone(
    arguments, built, tmp_path, checksums, capsys
):
    for language in OF:
        main(arguments(tmp_path, name=f"books_{language}", corpus=language))
    assert caches(built, checksums) == caches(tmp_path, checksums)
    assert language_set.languages(str(built), TASK) == list(OF)
    before = caches(built, checksums)
    capsys.readouterr()
    main(arguments(built, "--languages=ro,en"))
    said = capsys.readouterr().out
    assert said.count("is complete and valid: nothing to do") == 2
    assert caches(built, checksums) == before
    assert language_set.languages(str(built), TASK) == list(OF)
    (header,) = (line for line in said.splitlines() if line.startswith("language  "))
    assert header.split()[:4] == ["language", "documents", "tokens", "rows"]
    assert "--task=books_span_corruption" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("--mixing.alpha=0.3")


def test_of_one_language_nothing_is_mixed(arguments, tmp_path, capsys):
    main(arguments(tmp_path, "--languages=sw"))
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next:"))
    assert "--task=books_span_corruption" in command
    assert "--mixing" not in command


def test_languages_are_added_by_extend(arguments, built, tmp_path, checksums):
    with pytest.raises(UserError, match="has the languages en, ro, not sw: pass --extend"):
        main(arguments(built))
    before = caches(built, checksums)
    main(arguments(built, "--extend", "--languages=sw"))
    assert language_set.languages(str(built), TASK) == ["en", "ro", "sw"]
    assert {name: caches(built, checksums)[name] for name in OF} == before
    main(arguments(tmp_path))
    assert caches(built, checksums) == caches(tmp_path, checksums)
    # The languages serve other objectives, as caches do.
    relatives = {"books_ul2", TASK}
    names = language_set.tasks_of(str(built), "books_ul2", relatives)
    assert names == ["books_en_ul2", "books_ro_ul2", "books_sw_ul2"]


def test_what_a_killed_part_left_is_removed(arguments, tmp_path):
    for name in ("1/2", "2/2"):
        main(arguments(tmp_path, "--languages=en,ro", f"--part={name}"))
    folder = tmp_path / TASK
    (folder / f"{lock.LOCK}-5-of-5").touch()
    (folder / f"{files.PARTIAL}0-languages.json").touch()
    main(arguments(tmp_path, "--languages=en,ro", "--part=2/2"))
    assert [path.name for path in folder.iterdir()] == ["languages.json"]


def test_what_a_killed_build_left_among_the_lists_is_removed(arguments, built, tmp_path):
    cache_dir = pathlib.Path(shutil.copytree(built, tmp_path / "caches"))
    left = cache_dir / TASK / f"{files.PARTIAL}0-exclude"
    left.touch()
    main(arguments(cache_dir, "--languages=en,ro"))
    assert not left.exists()
    folder = str(cache_dir / TASK)
    with lock.held(folder, "build", "--cache_dir"), pytest.raises(UserError, match="another build"):
        main(arguments(cache_dir, "--languages=en,ro"))


def test_mistakes_are_one_line(arguments, folders, built, tmp_path):
    (tmp_path / "empty" / "fi").mkdir(parents=True)
    for flags, says in (
        (arguments(tmp_path, name=None), "several languages need --name=NAME"),
        (arguments(tmp_path, "--languages=en,en"), "names en twice"),
        (arguments(tmp_path, "--languages=en,xx"), "language xx: no file matches"),
        (arguments(built, "--languages=en", corpus="ro"), "has no {language}"),
        (arguments(tmp_path, "--corpus=text:a.txt"), "has no name"),
        (arguments(tmp_path, "--languages=full", name="lm"), "language full: no file matches"),
    ):
        with pytest.raises(UserError, match=says):
            main(flags)
    assert not any((tmp_path / f"books_{name}_span_corruption").exists() for name in OF)
    main(arguments(tmp_path, corpus="en", name="books"))
    with pytest.raises(UserError, match="is a cache of one corpus"):
        main(arguments(tmp_path, "--languages=en"))
    main(arguments(tmp_path / "more", "--languages=en"))
    with pytest.raises(UserError, match=r"language ro would have other rows .*sentencepiece_law: "):
        main(
            arguments(
                tmp_path / "more", "--languages=ro", "--extend", f"--sentencepiece_law={NEW_LAW}"
            )
        )


def test_the_list_of_languages_is_no_cache(built):
    from tasks.cache.cache import Cache

    with pytest.raises(UserError, match="lists languages, each with its own cache"):
        Cache.open(str(built / TASK))


def test_a_language_is_not_built_if_another_is_refused(build, tmp_path):
    for language in OF:
        write(tmp_path / "c", language, {})
    languages = tmp_path / "c" / "{language}" / "*.jsonl"
    cache_dir = build(languages)
    write(tmp_path / "c", "ar", {})
    with pytest.raises(UserError, match=r"language en: .*packing: \"best_fit\", there: \"concat\""):
        build(languages, "--extend", "--packing=best_fit")
    with pytest.raises(
        UserError, match=r"language ar would have other rows than x_en_lm \(packing"
    ):
        build(languages, "--extend", "--packing=best_fit", "--languages=ar")
    assert not (cache_dir / "x_ar_lm").exists()
    build(languages, "--extend")
    assert (cache_dir / "x_ar_lm" / "COMPLETED").exists()


def test_a_further_language_treats_spelt_tokens_as_the_others_do(tmp_path):
    for language in OF:
        write(tmp_path / "c", language, {})
    vocabulary = small_tokenizers.gpt2(tmp_path / "gpt2", [text("en1")])
    build = functools.partial(
        list.__add__,
        ["--task=lm", "--name=x", f"--corpus=json:{tmp_path}/c/{{language}}/*.jsonl?validation=0",
         f"--vocabulary={vocabulary}", "--row_tokens=64", f"--cache_dir={tmp_path}/caches"],
    )  # fmt: skip
    main(build([]))
    write(tmp_path / "c", "ar", {})
    more = ["--extend", "--languages=ar"]
    with pytest.raises(UserError, match=r"language ar would have other rows .*spelling"):
        main(build([*more, "--special_tokens=text"]))
    main(build(more))
