"""Lists of other patterns: they name the documents that they were made of, and no others."""

import csv
import itertools
import json
import pathlib
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import verify
from pipeline.annexes.deduplication import dedup
from pipeline.build import main
from pipeline.excluding import lists, origins
from pipeline.excluding.lists import ExcludeList
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tests.support.packed import tar
from tests.support.plain_records import read_rows

pytestmark = pytest.mark.processes

LANGUAGES = ("en", "ro")


def text(name: str) -> str:
    return f"<{name}> " + " ".join(f"{name}w{number}" for number in range(20))


def write(folder: pathlib.Path, language: str, twins: dict[str, str], **ids) -> None:
    """Writes ten documents, some with the text of another; a row is called LANGUAGE and number."""
    path = folder / language / "data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(10):
        name = f"{language}{number}"
        # A twin differs in case, so that one reads which of both a cache holds.
        row = {"text": text(twins[name]).upper() if name in twins else text(name)}
        rows.append({**({"id": f"doc{number}"} if ids.get("ids") else {}), **row})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# A twin of the same language and one of another; and the last is clean.
TWINS = {"en3": "en1", "ro5": "ro2", "ro7": "en4"}


def pack(path: pathlib.Path) -> None:
    """Replaces a file by an archive of it."""
    data = tar({".hidden/a.jsonl": "no JSON", f"in/{path.name}": path.read_bytes()})
    path.write_bytes(data)


@pytest.fixture(params=["places", "column", "archives", "column in archives"])
def corpus(request, tmp_path) -> pathlib.Path:
    """Returns a folder of two languages, whose ids are places, or the same column in both."""
    for language in LANGUAGES:
        write(tmp_path / "my corpus", language, TWINS, ids="column" in request.param)
        if "archives" in request.param:
            pack(tmp_path / "my corpus" / language / "data.jsonl")
    return tmp_path / "my corpus"


@pytest.fixture
def build(tmp_path):
    def run(pattern, *more, name="x", cache_dir=tmp_path / "caches"):
        main([
            "--task=lm", f"--name={name}", f"--corpus=json:{pattern}?validation=0",
            "--vocabulary=bytes", "--extra_ids=100", f"--cache_dir={cache_dir}",
            "--row_tokens=64", "--shard_bytes=500", *more,
        ])  # fmt: skip
        return cache_dir

    return run


def held(cache_dir: pathlib.Path) -> set[str]:
    """Returns the names of all documents in the records of caches, in capitals if of a twin."""
    data = b""
    for path in sorted(cache_dir.glob("*/*.tfrecord-*")):
        rows = read_rows(path.read_bytes())
        tokens = itertools.chain.from_iterable(row["targets"] for row in rows)
        data += bytes(token - 3 for token in tokens if token > 2)
    return set(re.findall("<([A-Za-z0-9]+)>", data.decode()))


EVERY = {f"{language}{number}" for language in LANGUAGES for number in range(10)}
CLEAN = EVERY - TWINS.keys()


def search(folder, pattern, output="out", *more) -> pathlib.Path:
    dedup.main([f"--corpus=json:{pattern}", f"--output={folder}/{output}", *more])
    return folder / output / "exclude.arrow"


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
    (only,) = origins.matches(ours, {"": origins.Origin("", tuple(theirs))}).items()
    assert (only[0], only[1].file.name) == (1, "ro/data")


def test_several_corpora_with_columns_of_their_own(build, tmp_path, capsys):
    folder = tmp_path / "two words"
    folder.mkdir()
    rows = {name: [text(f"{name}{number}") for number in range(5)] for name in "abc"}
    rows["b"][2], rows["c"][4] = rows["a"][1].upper(), rows["b"][3].upper()
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows["a"]))
    pq.write_table(pa.table({"content": rows["b"]}), folder / "b.parquet")
    with open(folder / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([["words"], *([row] for row in rows["c"])])
    for number in range(2):
        path = folder / f"test {number}.jsonl"
        path.write_text(json.dumps({"text": rows["c"][number]}) + "\n")
    corpora = [
        f"a=json:{folder}/a.jsonl?column=body",
        f"b=parquet:{folder}/b.parquet?column=content",
        f"c=csv:{folder}/c.csv?column=words",
    ]
    flags = [f"--corpus={each}" for each in corpora]
    against = [f"--against=json:{folder}/test {number}.jsonl" for number in range(2)]
    dedup.main([*flags, *against, f"--output={tmp_path}/out"])
    path = tmp_path / "out" / "exclude.arrow"
    assert re.search(r"against json:.*two\+?.*0.jsonl +1 examples", capsys.readouterr().out)
    assert sorted(row["twin"][:2] for row in ExcludeList(str(path))) == ["a:", "b:", "js", "js"]
    joined = " ".join(each.removeprefix("--against=") for each in against)
    dedup.main([*flags, f"--against={joined}", f"--output={tmp_path}/again"])
    again = ExcludeList(str(tmp_path / "again" / "exclude.arrow"))
    assert str(list(again)) == str(list(ExcludeList(str(path))))
    main([
        "--task=lm", "--name=x", *(f"{flag}&validation=0" for flag in flags), "--vocabulary=bytes",
        "--extra_ids=100", f"--cache_dir={tmp_path}/caches", f"--exclude={path}",
    ])  # fmt: skip
    everything = {f"{name}{number}" for name in "abc" for number in range(5)}
    assert held(tmp_path / "caches") == everything - {"b2", "c4", "c0", "c1"}


@pytest.mark.parametrize("packed", [False, True])
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
    header |= {"corpus": "json:somewhere", "files": origins.digest(record)}
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


def test_a_line_that_stands_for_a_document_is_not_blank(build, tmp_path, capsys):
    write(tmp_path / "c", "en", {}, ids=True)
    (tmp_path / "ids").write_text("doc1\n\n   \n")
    build(tmp_path / "c/en/*.jsonl", f"--exclude={tmp_path}/ids")
    assert "skipped 1 line of white space" in capsys.readouterr().err


@pytest.mark.parametrize("longest", [500, 3000])
def test_a_document_whose_first_part_is_blank_is_taken_down(build, tmp_path, longest, checksums):
    """Blank parts are not kept, so no file of the cache has the id of the document itself."""
    (tmp_path / "c").mkdir()
    for name in ("other", "secret"):
        lines = "".join(f"<{name}{number}> says it.\n" for number in range(30))
        (tmp_path / "c" / f"{name}.txt").write_text(" " * 1200 * (name == "secret") + lines)
    (tmp_path / "ids").write_text("secret.txt:0\n")
    flags = [
        "--task=lm", "--name=x", f"--corpus=text:{tmp_path}/c/*.txt?document=file&validation=0",
        "--vocabulary=bytes", "--extra_ids=100", f"--max_document_bytes={longest}",
    ]  # fmt: skip
    given = f"--exclude={tmp_path}/ids"
    cache = tmp_path / "a" / "x_lm"
    main([*flags, f"--cache_dir={cache.parent}"])
    assert "secret29" in held(cache.parent)
    assert verify.main([f"--cache={cache}", given]) == 1
    main([*flags, f"--cache_dir={cache.parent}", given])
    assert not any("secret" in name for name in held(cache.parent))
    assert verify.main([f"--cache={cache}", given]) == 0
    for folder in cache.glob(".before-*"):
        shutil.rmtree(folder)
    main([*flags, f"--cache_dir={tmp_path}/b", given])
    assert checksums(cache) == checksums(tmp_path / "b" / "x_lm")


def test_ids_of_several_documents_are_counted(build, tmp_path, capsys, monkeypatch):
    rows = [{"id": f"k{number % 7}", "text": text(f"d{number}")} for number in range(70)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids").write_text("k1\nk9\n")
    build(tmp_path / "a.jsonl")
    line = "63 of 70 documents have the id of another one, such as 'k0', which 10 have: a list of"
    assert line in capsys.readouterr().out
    cache_dir = build(tmp_path / "a.jsonl", f"--exclude={tmp_path}/ids")
    said = capsys.readouterr().out
    assert "left out 10 documents or parts of them, which have 1 ids" in said
    assert "1 of 2 ids are not in the corpus: 'k9'" in said
    assert len(held(cache_dir)) == 60
    assert verify.main([f"--cache={cache_dir}/x_lm", f"--exclude={tmp_path}/ids"]) == 0
    said = capsys.readouterr().out
    assert "absent: all 2 documents of" in said
    assert "1 left out, 1 not in the corpus ('k9')" in said
    # Of a large cache some shards are looked at.
    monkeypatch.setattr("pipeline.building.repeated_ids._MOST", 40)
    build(tmp_path / "a.jsonl", cache_dir=tmp_path / "b")
    assert "documents looked at have the id of another one" in capsys.readouterr().out
    for row in rows:
        del row["id"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(tmp_path / "a.jsonl", cache_dir=tmp_path / "d")
    assert "have the id of another" not in capsys.readouterr().out


def test_documents_of_one_id_that_are_all_held_out(tmp_path):
    rows = [{"id": "same", "text": text(f"d{number}")} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task=lm", "--name=x", "--vocabulary=bytes", "--extra_ids=100"]
    with pytest.raises(UserError, match=r"holds out all 9 for validation, as documents of one id"):
        main(
            [
                *flags,
                f"--corpus=json:{tmp_path}/a.jsonl?validation=0.999",
                f"--cache_dir={tmp_path}",
            ]
        )


def test_a_takedown_by_ids_of_bytes(tmp_path):
    ids = pa.array([f"x{number}".encode() for number in range(9)], pa.binary())
    texts = [text(f"d{number}") for number in range(9)]
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "a.parquet")
    (tmp_path / "ids").write_text("x3\n")
    flags = [
        "--task=lm", "--name=x", "--vocabulary=bytes", "--extra_ids=100",
        f"--cache_dir={tmp_path}/c", f"--corpus=parquet:{tmp_path}/a.parquet?validation=0",
    ]  # fmt: skip
    main(flags)
    main([*flags, f"--exclude={tmp_path}/ids"])
    assert held(tmp_path / "c") == {f"d{number}" for number in range(9)} - {"d3"}
