"""Archives: their files are read like files of the corpus, or the archive is named."""

import bz2
import gzip
import json
import lzma
import tarfile
import zipfile

import fsspec
import pytest

from tasks.reading.formats import lines as lines_format
from tasks.terminal.command_line import UserError
from tests.support.corpora import FORMATS, encoded, file_name, pieces_and_rows, read
from tests.support.packed import tar, zipped, zstd

PAGES = {f"{n:03d}-page.txt": f"Page {n} tells.\n\nIt has more.\n" for n in range(60)}


ARCHIVES = {
    "a.tar": tar, "a": tar, "data.xz": lambda members: lzma.compress(tar(members)),
    "a.tar.gz": lambda members: gzip.compress(tar(members)),
    "a.TGZ": lambda members: gzip.compress(tar(members)),
    "a.tbz": lambda members: bz2.compress(tar(members)),
    "a.tar.zst": lambda members: zstd(tar(members)),
    "a.tar.lzma": lambda members: lzma.compress(tar(members), lzma.FORMAT_ALONE),
    "gnu.tar": lambda members: tar(members, format=tarfile.GNU_FORMAT),
    "a.zip": zipped,
}  # fmt: skip


def found(spec, *how):
    return [(row["id"], row["text"], row["problem"]) for row in read(f"{spec}&validation=0", *how)]


def refused(spec):
    with pytest.raises(UserError) as caught:
        read(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_file_in_an_archive_is_a_file_of_the_corpus(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lines_format, "_SMALL_BYTES", 100)
    (tmp_path / name).write_bytes(ARCHIVES[name](PAGES))
    expected = [(f"{name}::{member}:0", text, None) for member, text in PAGES.items()]
    spec = f"text:{tmp_path}/{name}"
    assert found(f"{spec}?document=file") == expected
    lines = [text.splitlines()[0] for text in PAGES.values()]
    assert [text for _, text, _ in found(f"{spec}?document=line")][::2] == lines
    assert len(found(f"{spec}?document=block")) == 2 * len(PAGES)
    pieces, rows = pieces_and_rows(f"{spec}?document=line&validation=0", 100, 7)
    assert len(pieces) == 1
    rows = [(row["id"], row["text"], row["problem"]) for row in rows]
    assert rows == found(f"{spec}?document=line")


@pytest.mark.parametrize("form", [each for each in FORMATS if each not in ("parquet", "arrow")])
@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.tar"])
def test_every_format_of_streams_is_read_from_archives(tmp_path, form, name):
    rows = [{"id": f"{n}", "text": f"text {n}, of many"} for n in range(90)]
    members = {file_name(form, n): encoded(form, rows[30 * n : 30 * n + 30]) for n in range(3)}
    packed = encoded(form, [{"id": "x", "text": "packed"}])
    members["packed"] = packed if form == "wet" else gzip.compress(packed)
    (tmp_path / name).write_bytes(ARCHIVES[name](members))
    quote = "?quote=%22" if form == "tsv" else "?split=train"
    expected = [(row["id"], row["text"], None) for row in rows]
    assert found(f"{form}:{tmp_path}/{name}{quote}") == [*expected, ("x", "packed", None)]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("name", "pack", "what"),
    [
        ("a.tar", lambda data: tar({"x": data}), "tar"),
        ("a.zip", lambda data: zipped({"x": data}), "zip"),
        ("a.parquet", gzip.compress, "gzip"),
    ],
)
def test_formats_that_are_read_in_places_name_what_they_got(tmp_path, form, name, pack, what):
    (tmp_path / name).write_bytes(pack(encoded(form, [{"id": "a", "text": "b"}])))
    line = refused(f"{form}:{tmp_path}/{name}")
    assert f"{name} is packed by {what}, from which files of this format are not read" in line


def test_archives_in_an_archive_are_read_as_well(tmp_path):
    subsets = (lzma.compress(tar({f"{n}.txt": f"text {n}"})) for n in range(3))
    whole = tar({f"openwebtext/subset{n}_data.xz": subset for n, subset in enumerate(subsets)})
    (tmp_path / "owt.tar").write_bytes(whole)
    assert found(f"text:{tmp_path}/owt.tar?document=file") == [
        (f"owt.tar::openwebtext/subset{n}_data.xz::{n}.txt:0", f"text {n}", None) for n in range(3)
    ]
    deep = b"text"
    for name in "abcde":
        deep = tar({name: deep})
    (tmp_path / "deep.tar").write_bytes(deep)
    assert "is an archive in 3 others: unpack them first" in refused(f"text:{tmp_path}/deep.tar")


def test_two_zips_in_one_file_are_refused(tmp_path):
    one, other = zipped({"a.txt": "one"}), zipped({"b.txt": "two"})
    (tmp_path / "a.zip").write_bytes(one + other)
    assert "perhaps another archive" in refused(f"text:{tmp_path}/a.zip")


@pytest.mark.parametrize(
    "rest",
    [zipped({"b.txt": "two"})[:-30], b"text\n" * 99, b"\0", b"PK\5\6" + bytes(40), zipped({})],
    ids=["a damaged archive", "text", "a zero", "a second end", "an empty archive"],
)
def test_bytes_after_a_zip_are_refused(tmp_path, rest):
    (tmp_path / "a.zip").write_bytes(zipped({"a.txt": "one"}) + rest)
    assert "perhaps another archive" in refused(f"text:{tmp_path}/a.zip")


def test_a_zip_with_a_comment_is_read(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped({"a.txt": "one"}))
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        archive.comment = b"a comment " * 9
    assert found(f"text:{tmp_path}/a.zip?document=line") == [("a.zip::a.txt:0", "one", None)]


@pytest.mark.parametrize("split", ["", "?split=train"])
def test_an_archive_is_of_one_split(tmp_path, split):
    (tmp_path / "a.tar").write_bytes(tar({"train/a.txt": "one", "sets/b-test.txt": "two"}))
    spec = f"text:{tmp_path}/a.tar{split or '?'}"
    if split:
        assert "the path of sets/b-test.txt names another split" in refused(spec)
    else:
        assert len(found(spec)) == 2
    (tmp_path / "test.tar").write_bytes(tar({"a.txt": "one"}))
    assert len(found(f"text:{tmp_path}/*.tar?split=test")) == 1


def test_folders_links_and_hidden_files_are_passed_over(tmp_path):
    for name in ("real.txt", ".hidden.txt", "._real.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to("real.txt")
    (tmp_path / "out").mkdir()
    with tarfile.open(tmp_path / "out" / "a.tar", "w") as archive:
        archive.add(tmp_path, ".", filter=lambda each: None if "out" in each.name else each)
    expected = [("a.tar::real.txt:0", "real.txt", None)]
    assert found(f"text:{tmp_path}/out/a.tar?document=line") == expected
    with zipfile.ZipFile(tmp_path / "out" / "a.zip", "w") as archive:
        archive.mkdir("folder")
        archive.writestr("folder/real.txt", "text")
        archive.writestr(".git/config", "hidden")
        archive.writestr("__MACOSX/folder/._real.txt", b"\0\5\x16\7")
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "folder/real.txt")
    assert found(f"text:{tmp_path}/out/a.zip?document=line") == [
        ("a.zip::folder/real.txt:0", "text", None)
    ]


def test_the_columns_of_an_archive_are_checked_when_it_is_listed(tmp_path):
    rows = b'{"text": "a"}\n'
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar({"none.jsonl": b"", "a.jsonl": rows})))
    line = refused(f"json:{tmp_path}/a.tar.gz?column=txet")
    assert "a.tar.gz::a.jsonl has no column txet (did you mean text?)" in line
    (tmp_path / "empty.tar.gz").write_bytes(gzip.compress(tar({"none.jsonl": b""})))
    assert "is empty" in refused(f"json:{tmp_path}/empty.tar.gz")


def damaged(members, place, data):
    whole = bytearray(tar(members))
    whole[place : place + len(data)] = data
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.tar", tar(PAGES)[: 1024 * 7], "it is cut short"),
        ("a.tar", tar(PAGES)[: 1024 * 7 + 99], "it is cut short"),
        ("a.tar", tar(PAGES)[: 1024 * 7 + 520], "unexpected end of data"),
        ("a.tar", damaged(PAGES, 7 * 1024 + 5, b"\xff"), "a header in it is corrupt: bad checksum"),
        ("a.tar", tar(PAGES) + tar(PAGES), "it continues after its end"),
        ("a.tar.gz", gzip.compress(tar(PAGES))[:-200], "end-of-stream marker"),
        ("a.tar", tar([("a", "x"), ("b", "y"), ("a", "z")]), "has two files a: unpack it first"),
        ("a.tar", b"text", "is not tar, though its name says so (it begins with b'text')"),
        ("a.zip", b"text", "is not zip, though its name says so"),
        ("a.gz", b"text", "is not gzip, though its name says so"),
        ("a.zip", zipped(PAGES)[:-9], "File is not a zip file"),
        ("a.zip", zipped({"a": "text"})[:32] + b"x" + zipped({"a": "text"})[33:], "cannot be read"),
        ("a.docx", zipped({"word/document.xml": "<w:t>"}), "a zip archive, as Office documents"),
        ("a.txt", b"7z\xbc\xaf\x27\x1c\0\4", "is packed by 7-Zip, which is not read: unpack it"),
        ("a.txt", b"Rar!\x1a\x07\1\0", "is packed by RAR"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    assert says in refused(f"text:{tmp_path}/{name}")


def test_an_encrypted_zip_is_named(tmp_path):
    data = bytearray(zipped({"a.txt": "text"}))
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    assert "a.txt is encrypted" in refused(f"text:{tmp_path}/a.zip")


def test_a_faulty_file_in_an_archive_is_named(tmp_path):
    members = {"good.txt.gz": gzip.compress(b"text\n"), "bad.txt.gz": gzip.compress(b"x" * 99)[:-5]}
    (tmp_path / "a.tar").write_bytes(tar(members))
    assert "a.tar::bad.txt.gz cannot be read: Compressed file ended" in refused(
        f"text:{tmp_path}/a.tar"
    )


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_in_a_store_are_told_by_their_names_too(name):
    fs = fsspec.filesystem("memory")
    fs.pipe(f"/archives/{name}", ARCHIVES[name](PAGES))
    try:
        if name == "a":  # a file without an ending is cut before it is read
            with pytest.raises(UserError, match="an archive: say so by the ending of its name"):
                found("text:memory://archives/a?document=line", 100)
            return
        texts = [text for _, text, _ in found(f"text:memory://archives/{name}?document=file")]
        assert texts == list(PAGES.values())
        assert len(found(f"text:memory://archives/{name}?document=line")) == 120
        rows = {f"{n}.jsonl": json.dumps({"text": f"row {n}"}) for n in range(9)}
        fs.pipe(f"/archives/{name}", ARCHIVES[name](rows))
        assert len(found(f"json:memory://archives/{name}?split=train")) == 9
    finally:
        fs.rm("/archives", recursive=True)


def test_text_that_has_a_tars_length_and_nulls_is_no_tar(tmp_path):
    for data in (b"\0" * 1024, b"a" * 100 + b"\0" * 412 + b"text", tar(PAGES)[:511]):
        (tmp_path / "a.txt").write_bytes(data)
        assert found(f"text:{tmp_path}/a.txt?document=file") == [("a.txt:0", data.decode(), None)]
