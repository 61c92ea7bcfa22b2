"""Lists of other patterns: they name the documents that they were made of, and no others."""

import json
import pathlib
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import verify
from pipeline.annexes.foreign_lists import matching
from pipeline.build import main
from pipeline.exclusion import lists, origins
from pipeline.exclusion.lists import ExcludeList
from tasks import annexes
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tests.pipeline.annexes.foreign_lists import copies
from tests.pipeline.exclusion.named_documents import LANGUAGES, held, text, write
from tests.pipeline.exclusion.named_documents import build as build
from tests.support.packed import tar

pytestmark = pytest.mark.processes

# A twin of the same language and one of another; and the last is clean.
TWINS = {"en3": "en1", "ro5": "ro2", "ro7": "en4"}


def pack(path: pathlib.Path) -> None:
    """Replaces a file by an archive of it."""
    data = tar({".hidden/a.jsonl": "no JSON", f"in/{path.name}": path.read_bytes()})
    path.write_bytes(data)


_ARCHIVES = ["archives", "column in archives"] if annexes.entries("archives") else []


@pytest.fixture(params=["places", "column", *_ARCHIVES])
def corpus(request, tmp_path) -> pathlib.Path:
    """Returns a folder of two languages, whose ids are places, or the same column in both."""
    for language in LANGUAGES:
        write(tmp_path / "my corpus", language, TWINS, ids="column" in request.param)
        if "archives" in request.param:
            pack(tmp_path / "my corpus" / language / "data.jsonl")
    return tmp_path / "my corpus"


EVERY = {f"{language}{number}" for language in LANGUAGES for number in range(10)}
CLEAN = EVERY - TWINS.keys()


def search(folder, pattern, output="out") -> pathlib.Path:
    return copies.search(folder, f"json:{pattern}", output=output)


PATTERNS = ["*/*.jsonl", "{language}/*.jsonl"]


@pytest.mark.parametrize("searched", PATTERNS)
@pytest.mark.parametrize("built", PATTERNS)
def test_a_list_reaches_a_build_of_another_pattern(
    corpus, build, tmp_path, searched, built, capsys
):
    path = search(tmp_path, corpus / searched)
    assert ExcludeList(str(path)).header["counts"]["documents"] == 3
    capsys.readouterr()
    cache_dir = build(corpus / built, f"--exclude={path}")
    assert held(cache_dir) == CLEAN
    assert "not in the corpus" not in capsys.readouterr().out
    proved = 0
    for cache in sorted(path.parent for path in cache_dir.glob("*/manifest.json")):
        assert verify.main([f"--cache={cache}", f"--exclude={path}"]) == 0
        said = capsys.readouterr().out
        count, left_out = re.search(
            r"absent: all (\d+) documents of .*: (\d+) left out, 0", said
        ).groups()
        assert count == left_out
        proved += int(count)
    assert proved == 3
    before = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")}
    build(corpus / built, f"--exclude={path}")
    build(corpus / built)
    assert capsys.readouterr().out.count("nothing to do") == 2 * (2 if "{" in built else 1)
    kept = {path: path.stat().st_mtime_ns for path in before if ".jsonl" in path.name}
    assert all(before[path] == time for path, time in kept.items())


def test_a_takedown_by_a_list_of_another_pattern(corpus, build, tmp_path, checksums):
    path = search(tmp_path, corpus / "{language}/*.jsonl")
    for pattern in PATTERNS:
        cache_dir = build(corpus / pattern, cache_dir=tmp_path / f"a{len(pattern)}")
        assert held(cache_dir) == {name.upper() for name in TWINS.values()} | CLEAN
        build(corpus / pattern, f"--exclude={path}", cache_dir=cache_dir)
        other = build(
            corpus / pattern, f"--exclude={path}", cache_dir=tmp_path / f"b{len(pattern)}"
        )
        assert held(cache_dir) == CLEAN
        for folder in [*cache_dir.glob("*/.before-*")]:
            shutil.rmtree(folder)
        for cache in [each.parent for each in other.glob("*/manifest.json")]:
            assert checksums(cache) == checksums(cache_dir / cache.name)
            assert verify.main([f"--cache={cache}", f"--exclude={path}"]) == 0


def test_a_list_of_one_language_takes_nothing_from_another(corpus, build, tmp_path, capsys):
    path = search(tmp_path, corpus / "ro" / "*.jsonl")
    everything = CLEAN | {name.upper() for name in TWINS.values()}
    cache_dir = build(corpus / "{language}/*.jsonl", f"--exclude={path}")
    assert held(cache_dir) == everything - {"RO2"}
    capsys.readouterr()
    assert verify.main([f"--cache={cache_dir}/x_ro_lm", f"--exclude={path}"]) == 0
    assert "absent: all 1 documents" in capsys.readouterr().out
    assert verify.main([f"--cache={cache_dir}/x_en_lm", f"--exclude={path}"]) == 0
    said = capsys.readouterr().out
    assert "out/exclude.arrow: not one of them is in the corpus" in said
    assert "1 entries are of other corpora" in said
    with pytest.raises(UserError, match=r"names no document of json:.*/en/.*make the list from"):
        build(corpus / "en" / "*.jsonl", f"--exclude={path}", name="y")
    assert not list((cache_dir / "y_lm").iterdir())


def test_a_list_holds_for_a_copy_of_its_corpus(corpus, build, tmp_path):
    path = search(tmp_path, corpus / "*/*.jsonl")
    shutil.copytree(corpus, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(corpus)
    pattern = tmp_path / "elsewhere" / "**" / "*.jsonl"
    assert held(build(pattern, f"--exclude={path}")) == CLEAN


@pytest.mark.parametrize("corpus", ["places", "column"], indirect=True)
def test_of_a_changed_file_only_documents_with_ids_are_told(corpus, build, tmp_path, capsys):
    path = search(tmp_path, corpus / "*/*.jsonl")
    has_ids = "doc" in (corpus / "ro" / "data.jsonl").read_text()
    lines = (corpus / "ro" / "data.jsonl").read_text().splitlines()
    (corpus / "ro" / "data.jsonl").write_text("\n".join([*lines[:4], *lines[5:]]) + "\n")
    cache_dir = build(corpus / "*/*.jsonl", f"--exclude={path}")
    said = capsys.readouterr().out
    # Both languages have the same ids, which their places told apart, but no more in ro.
    assert "1 of its 3 entries are of this corpus" in said
    assert held(cache_dir) == CLEAN - {"ro4"} | {"RO2", "EN4"}
    path = search(tmp_path, corpus / "ro/*.jsonl", "ro")
    (corpus / "ro" / "data.jsonl").write_text("\n".join(lines) + "\n")
    if has_ids:
        build(corpus / "ro/*.jsonl", f"--exclude={path}", cache_dir=tmp_path / "ro_only")
        assert "RO2" not in held(tmp_path / "ro_only")
    else:
        with pytest.raises(UserError, match="or changed ones: make the list from this corpus"):
            build(corpus / "ro/*.jsonl", f"--exclude={path}", cache_dir=tmp_path / "ro_only")


def test_equal_files_are_told_by_their_paths(build, tmp_path):
    for language in LANGUAGES:
        write(tmp_path / "c", language, {})
    shutil.copy(tmp_path / "c/en/data.jsonl", tmp_path / "c/ro/data.jsonl")
    path = search(tmp_path, tmp_path / "c" / "{language}" / "*.jsonl")
    # Every document of ro is a twin, and none of en.
    with pytest.raises(UserError, match="names no document of"):
        build(tmp_path / "c" / "en" / "*.jsonl", f"--exclude={path}")
    with pytest.raises(UserError, match=r"empty corpus: .*; left out: 10 excluded: exact dup"):
        build(tmp_path / "c" / "ro" / "*.jsonl", f"--exclude={path}", name="y")
    ours = [origins.File("/c/", f"{name}/data", 9, (("sha256", "a"),)) for name in LANGUAGES]
    theirs = [origins.File("/d/", f"{name}/data", 9, (("sha256", "a"),)) for name in ("ro", "fr")]
    (only,) = matching.matches(ours, {"": origins.Origin("", tuple(theirs))}).items()
    assert (only[0], only[1].file.name) == (1, "ro/data")


def test_several_corpora_with_columns_of_their_own(tmp_path):
    folder = tmp_path / "two words"
    folder.mkdir()
    rows = {name: [text(f"{name}{number}") for number in range(5)] for name in "ab"}
    rows["b"][2] = rows["a"][1].upper()
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows["a"]))
    pq.write_table(pa.table({"content": rows["b"]}), folder / "b.parquet")
    corpora = [
        f"a=json:{folder}/a.jsonl?column=body", f"b=parquet:{folder}/b.parquet?column=content"
    ]  # fmt: skip
    path = copies.search(tmp_path, *corpora)
    main([
        "--task=lm", "--name=x", *(f"--corpus={each}&validation=0" for each in corpora),
        "--vocabulary=bytes", "--extra_ids=100", f"--cache_dir={tmp_path}/caches",
        f"--exclude={path}",
    ])  # fmt: skip
    everything = {f"{name}{number}" for name in "ab" for number in range(5)}
    assert held(tmp_path / "caches") == everything - {"b2"}


@pytest.mark.parametrize("packed", [False, True] if _ARCHIVES else [False])
def test_a_line_of_ids_ends_like_the_path_of_its_file(build, tmp_path, capsys, packed):
    for language in LANGUAGES:
        write(tmp_path / "all" / "c", language, {})
    languages = tmp_path / "all" / "c" / "{language}" / "*.jsonl"
    place = len((tmp_path / "all/c/ro/data.jsonl").read_text().splitlines()[0]) + 1
    begin = f":in/data.jsonl:{place}" if packed else place
    for language in LANGUAGES if packed else ():
        pack(tmp_path / "all" / "c" / language / "data.jsonl")
    ids = tmp_path / "ids"
    ids.write_text(f"data.jsonl:{begin}\n")
    with pytest.raises(UserError, match=r"data.jsonl:.*\d may name a document of .*en.* or .*ro"):
        build(languages, f"--exclude={ids}")
    assert not (tmp_path / "caches").exists()
    ids.write_text(f"ro/data.jsonl:{begin}\nno/such:7\n")
    cache_dir = build(languages, f"--exclude={ids}")
    assert held(cache_dir) == EVERY - {"ro1"}
    said = capsys.readouterr().out
    assert said.count("1 of 2 ids are not in the corpus: 'no/such:7'") == 1
    assert "1 of 1 ids are not in the corpus: 'no/such:7'" in said
    for language in LANGUAGES:
        assert verify.main([f"--cache={cache_dir}/x_{language}_lm", f"--exclude={ids}"]) == 0
    said = capsys.readouterr().out
    assert "absent: all 1 documents of" in said
    assert "1 left out, 1 not in the corpus ('no/such:7')" in said
    assert "1 entries are of other corpora" in said
    # One language alone may be named by --languages.
    ids.write_text(f"data.jsonl:{begin}\n")
    build(languages, "--languages=en", f"--exclude={ids}")
    assert held(cache_dir) == EVERY - {"ro1", "en1"}
    # The same id under a wider pattern.
    ids.write_text(f"c/en/data.jsonl:{begin}\n")
    assert held(
        build(tmp_path / "all/**/*.jsonl", f"--exclude={ids}", cache_dir=tmp_path / "d")
    ) == (EVERY - {"en1"})
    ids.write_text(f"data.jsonl:{begin}\n")
    with pytest.raises(UserError, match=r"may name a document of .*: write more of its path$"):
        build(tmp_path / "all/**/*.jsonl", f"--exclude={ids}", cache_dir=tmp_path / "e")


def test_lists_of_version_0_2_0(corpus, build, tmp_path, capsys):
    """They have no files: they serve the corpus that they were made from, by its ids."""
    new = ExcludeList(str(search(tmp_path, corpus / "ro" / "*.jsonl")))
    rows = list(new)
    columns = {name: [row[name] for row in rows] for name in lists._SCHEMA.names}
    columns["reason"] = [new.reasons.index(row["reason"]) for row in rows]
    cache_dir = build(corpus / "ro" / "*.jsonl")
    record = CacheManifest.load(f"{cache_dir}/x_lm").plan.corpus
    header = {key: new.header[key] for key in ("kind", "reasons", "counts", "max_document_bytes")}
    header |= {"corpus": "json:somewhere", "files": matching.digest(record)}
    with open(tmp_path / "old.arrow", "wb") as file:
        lists.write(file, header, [columns])
    build(corpus / "ro" / "*.jsonl", f"--exclude={tmp_path}/old.arrow")
    assert "RO2" not in held(cache_dir)
    with pytest.raises(UserError, match=r"version 0.2.0 made this list from other files .*again"):
        build(corpus / "en" / "*.jsonl", f"--exclude={tmp_path}/old.arrow", name="y")
    # In force it stays, also for files that an extension adds.
    write(tmp_path / "more", "ro", {})
    (tmp_path / "more/ro/data.jsonl").rename(corpus / "ro" / "new.jsonl")
    build(corpus / "ro" / "*.jsonl", "--extend", f"--exclude={tmp_path}/old.arrow")
    assert verify.main([f"--cache={cache_dir}/x_lm", f"--exclude={tmp_path}/old.arrow"]) == 0


def test_an_extension_under_a_list_takes_no_new_document(build, tmp_path, capsys):
    """A column's ids repeat: the list means the documents of the files that it was made from."""
    write(tmp_path / "c", "ro", TWINS, ids=True)
    pattern = tmp_path / "c" / "**" / "*.jsonl"
    path = search(tmp_path, pattern)
    cache_dir = build(pattern, f"--exclude={path}")
    write(tmp_path / "c", "en", {}, ids=True)
    build(pattern, "--extend", f"--exclude={path}")
    assert held(cache_dir) == {name for name in EVERY if name not in ("ro5", "ro7")} | {"EN4"}
    capsys.readouterr()
    assert verify.main([f"--cache={cache_dir}/x_lm", f"--exclude={path}"]) == 0
    assert "absent: all 1 documents of" in capsys.readouterr().out
