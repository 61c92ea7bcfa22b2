"""WARC and WET: text records are documents, broken ones are counted, and none hides another."""

import bz2
import gzip
import itertools

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.annexes.warc import warc
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.corpora import read

ANY_FOLDER = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def record(kind, block: bytes, name="", length=None, **headers):
    size = len(block) if length is None else length
    lines = [f"WARC-Type: {kind}", f"Content-Length: {size}"]
    lines += [f"WARC-Record-ID: {name}"] * bool(name)
    lines += [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return b"WARC/1.0\r\n" + "\r\n".join(lines).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"


def conversion(number, text=None):
    text = f"Text of page {number}.\nWARC is no header here.\n" if text is None else text
    return record(
        "conversion", text.encode(), f"<urn:uuid:{number}>",
        WARC_Target_URI=f"https://example.org/{number}",
        WARC_Identified_Content_Language="ron,eng",
        Content_Type="text/plain",
    )  # fmt: skip


INFO = record("warcinfo", b"Software-Info: x\r\n", Content_Type="application/warc-fields")


def problems(spec):
    return [(row["id"], row["problem"]) for row in read(spec)]


def texts(spec):
    return [(row["id"], row["text"], row["problem"]) for row in read(spec)]


def members(*records):
    return b"".join(gzip.compress(each, mtime=0) for each in records)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("a.warc.wet.gz", members),
        ("a.warc.wet", lambda *records: b"".join(records)),
        ("whole.warc.wet.gz", lambda *records: gzip.compress(b"".join(records))),
        ("a.warc.wet.bz2", lambda *records: bz2.compress(b"".join(records))),
        ("a.warc.wet.zst", lambda *records: zstandard.compress(b"".join(records))),
    ],
)
def test_the_texts_of_a_crawl_are_documents(tmp_path, name, packed):
    pages = [conversion(number) for number in range(300)]
    (tmp_path / name).write_bytes(packed(INFO, *pages))
    for kind in ("wet", "warc"):
        found = texts(f"{kind}:{tmp_path}/{name}?validation=0")
        assert found == [
            (f"<urn:uuid:{n}>", f"Text of page {n}.\nWARC is no header here.\n", None)
            for n in range(300)
        ]
    rows = read(f"wet:{tmp_path}/{name}?id=WARC-Target-URI&validation=0", count=7)
    assert rows[3]["id"] == "https://example.org/3"
    assert len({row["place"] for row in rows}) == 300


def test_headers_are_columns_of_pairs(tmp_path):
    (tmp_path / "a.wet.gz").write_bytes(
        members(INFO, conversion(1), record("conversion", b"\xff", "b", WARC_Target_URI="u"))
    )
    spec = f"wet:{tmp_path}/a.wet.gz?inputs={{warc-target-uri}}: {{text}}&targets=text&validation=0"
    first, second = read(spec)
    assert first["inputs"] == f"https://example.org/1: {first['targets']}"
    assert (second["inputs"], second["problem"]) == (None, "invalid UTF-8")


def test_other_records_are_passed_over_or_counted(tmp_path):
    (tmp_path / "a.warc").write_bytes(
        b"".join([
            INFO, conversion(1), record("request", b"GET /"), record("metadata", b"x: y"),
            record("response", b"HTTP/1.1 200 OK\r\n\r\n<p>x", "r"),
            record("resource", b"plain", "p", Content_Type="text/plain; charset=utf-8"),
            record("resource", b"\x89PNG", "i", Content_Type="image/png"),
            record("conversion", b"\xff", "bad"), conversion(2),
        ])
    )  # fmt: skip
    assert problems(f"warc:{tmp_path}/a.warc?validation=0") == [
        ("<urn:uuid:1>", None), ("r", "a response, not text"), ("p", None), ("i", "not plain text"),
        ("bad", "invalid UTF-8"), ("<urn:uuid:2>", None),
    ]  # fmt: skip


@ANY_FOLDER
@given(
    broken=st.integers(0, 9),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    more=st.booleans(),
)
def test_a_corrupt_member_is_one_document_and_all_others_are_read(
    tmp_path, monkeypatch, broken, place, flip, more
):
    monkeypatch.setattr(warc, "_BLOCK_BYTES", 64 if more else 1 << 20)
    packed = [gzip.compress(conversion(number), mtime=0) for number in range(10)]
    member = bytearray(packed[broken])
    member[int(place * len(member))] ^= flip
    begin = sum(map(len, packed[:broken]))
    packed[broken] = bytes(member)
    (tmp_path / "a.wet.gz").write_bytes(b"".join(packed))
    found = read(f"wet:{tmp_path}/a.wet.gz?validation=0")
    good = [f"<urn:uuid:{number}>" for number in range(10) if number != broken]
    assert [row["id"] for row in found if row["problem"] is None and row["id"] in good] == good
    if len(found) > 9:
        bad = found[broken]
        text = bad["problem"] in ("corrupt record", "record cut short")
        # Of a gzip header, some bytes mean nothing: the time and the system.
        assert text or bad["text"] == f"Text of page {broken}.\nWARC is no header here.\n"
        assert bad["place"] == f"a.wet.gz:{begin}"
    assert len(found) == 10


@pytest.mark.parametrize("kept", [1, 11, 100, 150])
def test_a_file_cut_short_ends_in_one_bad_record(tmp_path, kept):
    pages = members(*(conversion(number) for number in range(5)))
    (tmp_path / "a.wet.gz").write_bytes(pages + gzip.compress(conversion(5))[:kept])
    found = texts(f"wet:{tmp_path}/a.wet.gz?validation=0")
    assert [problem for _, _, problem in found] == [None] * 5 + ["record cut short"]
    plain = b"".join(conversion(number) for number in range(5))
    (tmp_path / "a.wet").write_bytes(plain + conversion(5)[: kept + 180])
    found = texts(f"wet:{tmp_path}/a.wet?validation=0")
    ends = len(conversion(5)) - 4  # two line ends follow a record
    assert [problem for _, _, problem in found] == [
        *[None] * 5, "record cut short" if kept + 180 < ends else None,
    ]  # fmt: skip


def test_a_broken_record_of_a_plain_file_ends_where_the_next_begins(tmp_path):
    wrong = record("conversion", b"text of a wrong length", "w", length=5)
    no_length = record("conversion", b"x", "n", length="many")
    data = conversion(0) + wrong + conversion(1) + b"garbage\n" + no_length + conversion(2)
    (tmp_path / "a.wet").write_bytes(data)
    assert problems(f"wet:{tmp_path}/a.wet?validation=0") == [
        ("<urn:uuid:0>", None),
        ("w", "corrupt record"),  # five bytes of it are not its text
        ("<urn:uuid:1>", None),
        (f"a.wet:{data.index(b'garbage')}", "corrupt record"),
        ("n", "corrupt record"),
        ("<urn:uuid:2>", None),
    ]  # fmt: skip


def test_damaged_headers_give_no_id(tmp_path):
    whole, begin = conversion(0), len(conversion(0))
    broken = record("conversion", b"x", "<urn:uuid:1>\r\t\nContent-Type: text/plain")
    (tmp_path / "a.wet").write_bytes(whole + broken + conversion(2))
    found = problems(f"wet:{tmp_path}/a.wet?validation=0")
    assert [name for name, _ in found] == ["<urn:uuid:0>", f"a.wet:{begin}", "<urn:uuid:2>"]
    cut = record("conversion", b"x", "<urn:uuid:1>").partition(b":1>")[0]
    (tmp_path / "b.wet").write_bytes(whole + cut.replace(b"Content-Length: 1\r\n", b""))
    assert problems(f"wet:{tmp_path}/b.wet?validation=0")[1][0] == f"b.wet:{begin}"


def test_a_broken_member_of_several_records_is_an_error(tmp_path):
    whole = gzip.compress(b"".join(conversion(number) for number in range(50)))
    path = tmp_path / "a.wet.gz"
    for data in (whole[:-20], whole[:-6] + b"\0" + whole[-5:]):
        path.write_bytes(data)
        reason = "CRC check failed|Compressed file ended"
        with pytest.raises(UserError, match=rf"a\.wet\.gz cannot be read: ({reason})"):
            read(f"wet:{path}")


def test_a_record_that_is_too_long_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(warc, "_LONGEST_BYTES", 2000)
    monkeypatch.setattr(warc, "_LONGEST_HEADERS", 1000)
    pages = [conversion(0), conversion(1, "x" * 5000), conversion(2)]
    for name, data in (("a.wet", b"".join(pages)), ("a.wet.gz", members(*pages))):
        (tmp_path / name).write_bytes(data)
        found = texts(f"wet:{tmp_path}/{name}?validation=0")
        assert [(each, problem) for each, _, problem in found] == [
            ("<urn:uuid:0>", None),
            ("<urn:uuid:1>", "a record longer than 64 MiB"),
            ("<urn:uuid:2>", None),
        ]


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (members(INFO, record("response", b"HTTP/1.1")), "", "server responses, not text"),
        (members(INFO, conversion(1)), "?id=WARC-Uri", "no column WARC-Uri; it has text"),
        (gzip.compress(b"text\n" * 100, mtime=0), "", "it does not begin with WARC records"),
        (b"text", "", "cannot be read: it does not begin with WARC records"),
        (b"", "", "is empty"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, content, options, says):
    (tmp_path / "a.warc.gz").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(f"warc:{tmp_path}/a.warc.gz{options}")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# 10 is the length of "short", of the line ends after it, and of the next record's first byte.
@pytest.mark.parametrize(
    ("place", "length"), [(2, 10), (2, 400), (39, 400), (1, 3000), (1, 10**12)]
)
def test_a_length_that_is_too_large_hides_no_record(tmp_path, monkeypatch, place, length):
    monkeypatch.setattr(warc, "_LONGEST_BYTES", 2000)
    pages = [conversion(number) for number in range(40)]
    wrong = record("conversion", b"short", "w", length=length)
    data = b"".join([*pages[:place], wrong, *pages[place:]])
    (tmp_path / "a.wet").write_bytes(data)
    found = problems(f"wet:{tmp_path}/a.wet?validation=0")
    expected = [(f"<urn:uuid:{number}>", None) for number in range(40)]
    assert found == [*expected[:place], ("w", "corrupt record"), *expected[place:]]


def test_a_block_may_have_lines_that_begin_as_records_do(tmp_path):
    page = conversion(1, "a\r\nWARC/1.0\r\nb")
    (tmp_path / "a.wet").write_bytes(page + conversion(2))
    assert texts(f"wet:{tmp_path}/a.wet?validation=0")[0][1].endswith("b")


def test_a_flipped_bit_in_a_name_or_a_type_hides_no_record(tmp_path):
    pages = [conversion(number) for number in range(4)]
    header = pages[2].index(b"Content-Length")
    begin = pages[2].index(b"WARC-Type")
    places = [*range(begin, begin + len("WARC-Type: conversion")), *range(header, header + 15)]
    problems_of = set()
    for place, bit in itertools.product(places, range(8)):
        page = bytearray(pages[2])
        page[place] ^= 1 << bit
        (tmp_path / "a.wet").write_bytes(b"".join([*pages[:2], page, pages[3]]))
        found = texts(f"wet:{tmp_path}/a.wet?validation=0")
        assert len(found) == 4, (place, bit)
        assert [found[at][0] for at in (0, 1, 3)] == [f"<urn:uuid:{n}>" for n in (0, 1, 3)]
        _, text, problem = found[2]
        assert problem or text == "Text of page 2.\nWARC is no header here.\n"
        problems_of.add(problem)
    assert problems_of == {None, "no known WARC-Type", "corrupt record"}


def test_continuations_are_counted(tmp_path):
    data = conversion(1) + record("continuation", b"more", "c") + conversion(2)
    (tmp_path / "a.wet").write_bytes(data)
    found = problems(f"wet:{tmp_path}/a.wet?validation=0")
    assert found[1] == ("c", "continuation of another record")
    assert len(found) == 3


@pytest.mark.parametrize("kind", ["warc", "wet"])
def test_a_path_without_a_kind_gets_its_own(kind):
    with pytest.raises(UserError, match=rf"did you mean {kind}:/a/b\.{kind}\.gz\?"):
        sources.parse(f"/a/b.{kind}.gz")
