"""Listing the files that a pattern matches: links are followed, files that are not read named."""

import os
import pathlib

import fsspec
import pytest

from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.corpora import known, read


def listed(text):
    """Returns the names of a corpus's files, and its notes on them, without the SPEC."""
    corpus = sources.resolve(sources.parse(text))
    *of_files, of_documents = (note.removeprefix(f"{text}: ") for note in corpus.notes)
    assert "is a document" in of_documents
    return [file["name"] for file in corpus.record["files"]], of_files


def write(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")


def test_links_to_files_are_read_as_in_a_snapshot_of_the_hub(tmp_path):
    write(tmp_path, "blobs/0123", "blobs/4567", "snapshot/data/real.txt")
    for name, blob in (("a.txt", "0123"), ("b.txt", "4567")):
        (tmp_path / "snapshot/data" / name).symlink_to(f"../../blobs/{blob}")
    expected = ["a.txt", "b.txt", "real.txt"]
    assert listed(f"text:{tmp_path}/snapshot/data/*.txt") == (expected, [])
    assert listed(f"text:{tmp_path}/snapshot/**/*.txt")[0] == [f"data/{name}" for name in expected]
    texts = [row["text"] for row in read(f"text:{tmp_path}/snapshot/data/*.txt?validation=0")]
    assert texts == ["blobs/0123", "blobs/4567", "snapshot/data/real.txt"]


def test_links_to_folders_are_followed_and_no_folder_is_read_twice(tmp_path):
    write(tmp_path, "elsewhere/x.txt", "corpus/z-real/y.txt")
    (tmp_path / "corpus/linked").symlink_to("../elsewhere")
    assert listed(f"text:{tmp_path}/corpus/*/*.txt") == (["linked/x.txt", "z-real/y.txt"], [])
    assert listed(f"text:{tmp_path}/corpus/**/*.txt") == (["linked/x.txt", "z-real/y.txt"], [])
    (tmp_path / "corpus/latest").symlink_to("z-real")
    (tmp_path / "corpus/z-real/up").symlink_to("..")
    names, notes = listed(f"text:{tmp_path}/corpus/**/*.txt")
    assert names == ["linked/x.txt", "z-real/y.txt"]
    assert notes == ["not read: links to folders also matched by another name, 2"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("cur*/*.txt", ["current/x.txt"]),
        ("m*/**/*.txt", ["main/r1/z.txt"]),
        ("**/en/*.txt", ["en/w.txt", "french/en/y.txt"]),
        ("current/*.txt", ["x.txt"]),
    ],
)
def test_a_link_is_followed_where_its_target_does_not_match(tmp_path, pattern, names):
    write(tmp_path, "v3/x.txt", "snapshots/r1/z.txt", "english/w.txt", "french/en/y.txt")
    for name, target in (("current", "v3"), ("main", "snapshots"), ("en", "english")):
        (tmp_path / name).symlink_to(target)
    assert listed(f"text:{tmp_path}/{pattern}")[0] == names


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_first_name_of_a_linked_folder_counts(tmp_path, names):
    write(tmp_path, "elsewhere/x.txt")
    (tmp_path / "corpus").mkdir()
    for name in names:
        (tmp_path / "corpus" / name).symlink_to("../elsewhere")
    assert listed(f"text:{tmp_path}/corpus/*/x.txt")[0] == ["a/x.txt"]


def test_what_the_pattern_does_not_match_does_no_harm(tmp_path):
    write(tmp_path, "part-1/x.txt", "b.txt", "*.txt")
    (tmp_path / "self").symlink_to("self")
    assert listed(f"text:{tmp_path}/part-*/*.txt") == (["part-1/x.txt"], [])
    assert listed(f"text:{tmp_path}/*.txt") == (["*.txt", "b.txt"], [])


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "gone.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, pattern):
    write(tmp_path, "a.txt")
    (tmp_path / "gone.txt").symlink_to("not-here")
    with pytest.raises(UserError, match=r"gone\.txt is a link to not-here, which cannot be read"):
        listed(f"text:{tmp_path}/{pattern}")
    assert listed(f"text:{tmp_path}/a*.txt") == (["a.txt"], [])


def test_what_matches_and_is_not_read_is_counted(tmp_path):
    write(tmp_path, "a.txt", ".hidden.txt", ".more.txt", "folder/b.txt")
    os.mkfifo(tmp_path / "pipe")
    names, notes = listed(f"text:{tmp_path}/*")
    assert names == ["a.txt"]
    assert notes == [
        "not read: folders, 1",
        "not read: hidden files, 2",
        "not read: pipes and devices, 1",
    ]
    with pytest.raises(UserError, match=r"no file matches .*; not read: hidden files, 2"):
        listed(f"text:{tmp_path}/.*.txt")


def test_words_in_paths_leave_nothing_out(tmp_path):
    names = ["arxiv-2019", "books.dev-edition", "eval_cases", "github-unit-test-logs"]
    names += ["test/x", "val-de-marne"]
    write(tmp_path, *(f"{name}.txt" for name in names))
    found, notes = listed(f"text:{tmp_path}/**/*.txt")
    assert sorted(found) == sorted(f"{name}.txt" for name in names)
    assert notes == [
        "read like all others: 5 files with test or validation in their paths; "
        "?split=train would set them apart"
    ]
    found, notes = listed(f"text:{tmp_path}/**/*.txt?split=train")
    assert sorted(found) == ["arxiv-2019.txt", "books.dev-edition.txt", "val-de-marne.txt"]
    assert notes == [
        "read as validation: 2 files (0.0 MB), and no documents are held out",
        "not read: 3 files (0.0 MB) of the split test; ?split=test reads them",
    ]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.{txt,md}", ["a.md", "a.txt", "b.txt"]),
        ("**/*.{md,txt,md}", ["a.md", "a.txt", "b.txt", "one/c.md", "two/d.txt"]),
        ("{one,two,three}/*", ["one/c.md", "two/d.txt"]),
        ("{a.{md,txt},two/d.txt}", ["a.md", "a.txt", "two/d.txt"]),
        ("a{,.x}.txt", ["a.txt"]),
    ],
)
def test_braces_stand_for_alternatives(tmp_path, pattern, names):
    write(tmp_path, "a.txt", "a.md", "b.txt", "one/c.md", "two/d.txt", "e.rst")
    assert listed(f"text:{tmp_path}/{pattern}") == (names, [])
    corpus = sources.resolve(sources.parse(f"text:{tmp_path}/{pattern}"))
    assert corpus.record["spec"] == f"text:{pattern}"


def test_braces_that_are_part_of_names_are_matched_as_before(tmp_path):
    write(tmp_path, "set{a,b}/x{1,2}.txt", "set{a,b}/y.txt", "seta/x1.txt", "{language}.txt")
    assert listed(f"text:{tmp_path}/set{{a,b}}/x{{1,2}}.txt") == (["x{1,2}.txt"], [])
    assert listed(f"text:{tmp_path}/set{{a,b}}/*.txt") == (["x{1,2}.txt", "y.txt"], [])
    assert listed(f"text:{tmp_path}/{{language}}.txt") == (["{language}.txt"], [])
    with pytest.raises(UserError, match=r"^no file matches .*/\{x,y\}\*$"):
        listed(f"text:{tmp_path}/{{x,y}}*")


@pytest.mark.parametrize("kind", known("json", "csv", "text"))
def test_braces_stand_for_alternatives_in_a_store(kind):
    fs = fsspec.filesystem("memory")
    for name in ("ro/a.jsonl", "ro/b.csv", "en/c.jsonl", "en/d.txt"):
        fs.pipe(f"/braces/{name}", b'{"text": "a"}\n' if name.endswith("l") else b"text\na\n")
    ends = {"json": "jsonl", "csv": "csv", "text": "{txt,jsonl}"}
    try:
        corpus = sources.resolve(sources.parse(f"{kind}:memory://braces/{{ro,en}}/*.{ends[kind]}"))
        assert [each["name"] for each in corpus.record["files"]] == {
            "json": ["en/c.jsonl", "ro/a.jsonl"], "csv": ["ro/b.csv"],
            "text": ["en/c.jsonl", "en/d.txt", "ro/a.jsonl"],
        }[kind]  # fmt: skip
    finally:
        fs.rm("/braces", recursive=True)


def test_a_pattern_that_cannot_be_is_one_line(tmp_path):
    write(tmp_path, "a.txt")
    with pytest.raises(UserError, match=r"'\*\*' can only be an entire.*/\*\*/\*\.txt matches"):
        listed(f"text:{tmp_path}/**.txt")


def test_a_name_that_is_not_utf8_is_shown(tmp_path):
    write(tmp_path, "a.txt")
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"x\n")
    with pytest.raises(UserError) as caught:
        listed(f"text:{tmp_path}/*.txt")
    assert "/caf\\xe9.txt is not UTF-8: rename the file" in str(caught.value)
    str(caught.value).encode()


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, "closed/a.txt", "b.txt")
    usual = os.scandir

    def closed(path):  # root may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return usual(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UserError, match=r"cannot be listed.*Permission denied.*closed"):
        listed(f"text:{tmp_path}/**/*.txt")
