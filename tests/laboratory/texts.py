"""Drawn corpora: files of every format, and what must be read of them, by this module's own rules.

Nothing here calls the project, so that its readers are compared with something else.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

_SENTENCE = (
    "the cache of a corpus is read row by row and în pădure çà et là a fost odată ca niciodată "
    "naïve Straße 日本語 данные tokens; numbers: 3.14, 1e-05! (brackets) x=y don't http://a.b/c "
    "”quoted” supercalifragilisticexpialidocious 0123456789 _ -- …"
)
_SYMBOLS = (
    "a\0b ▁ ▁▁x 👩\u200d👧\u200d👦 🇷🇴 e\u0301 \u202bעברית\u202c \ufeff \u200b ﬁ① \" ' , "
    "; {} \\n #part2 </s> <pad> <unk> <extra_id_7> <|endoftext|> [SEP] [UNK] <0x41>"
)
_WORDS = _SENTENCE.split()
_SPACES = ("\t", "  ", "\x1c", "\u3000", "x\x85y", "\u2028", "\xa0\xa0")
_ODD = (*_SYMBOLS.split(), *_SPACES)
_MARK = "\ufeff".encode()  # no text at the beginning of a file
_PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
_PLAIN, _TABLES = ("text", "file", "block"), ("parquet", "arrow")
_PAIRED = ("json", "array", "csv", "tsv", *_TABLES)
_FORMATS = (*_PLAIN, *_PAIRED, "wet")
# Problem of a document -> the formats that can have it.
_BAD = {
    "invalid UTF-8": (*_PLAIN, *_PAIRED[:1], *_PAIRED[2:], "wet"),
    "null": ("json", "array", *_TABLES),
    "missing column": ("json", "array"),
    "not a string": ("json", "array"),
    "invalid JSON": ("json",),
    "wrong number of fields": ("csv", "tsv"),
    "a response, not text": ("wet",),
}
_WITHOUT_ID = ("invalid JSON", "wrong number of fields")


class Read(NamedTuple):
    """A document that must be read: its columns, text or inputs and targets; or a problem."""

    id: str
    place: str
    columns: tuple[bytes, ...]
    problem: str = ""
    number: int = 0  # of a part, from 1; 0 for a whole document


class Kind(NamedTuple):
    """How the files of a corpus are made."""

    format: str
    packing: str  # an ending in _PACKED
    archive: str  # "", ".tar", ".tar.gz" or ".zip"
    ids: str  # "places", "column", "repeated", "numbers", "bytes" or "nested"
    pairs: bool
    bad: float  # share of bad documents
    longest: int  # words of a document

    @property
    def options(self) -> list[str]:
        found = [f"document={self.format}"] * (self.format in ("file", "block"))
        inner = "doc." * (self.ids == "nested")
        if self.pairs:
            found += [f"inputs=say {{{inner}text}}!", f"targets={inner}more"]
        elif inner:
            found.append("column=doc.text")
        return [*found, "id=doc.name"] if inner else found

    @property
    def reader(self) -> str:
        return "text" if self.is_plain else self.format.replace("array", "json")

    @property
    def is_plain(self) -> bool:
        return self.format in _PLAIN

    @property
    def ending(self) -> str:
        return f".{self.reader}{self.packing}{self.archive}"


def draw_kind(
    generator: random.Random, pairs: bool, absent: Container[str] = (), archives: bool = True
) -> Kind:
    """Draws a kind of none of the formats that are `absent`, perhaps in archives."""
    pick = generator.choice
    form = pick([each for each in (_PAIRED if pairs else _FORMATS) if each not in absent])
    nested, tables = form in ("json", "array", *_TABLES), form in _TABLES
    packing = pick(("", ".gz")) if form == "wet" else "" if tables else pick(("", *_PACKED))
    in_files = tables or packing or not archives
    archive = "" if in_files else pick(("", "", ".tar", ".tar.gz", ".zip"))
    ids = ["places", *["column", "repeated"] * (form not in _PLAIN)]
    ids += ["numbers", "nested"] * nested + ["bytes"] * tables
    return Kind(
        form, packing, archive, pick(ids), pairs, pick((0, 0, 0.03, 0.15)), pick((12, 60, 60, 400))
    )


def file_of(
    generator: random.Random, kind: Kind, name: str, count: int
) -> tuple[bytes, list[Read]]:
    """Draws a file of about `count` documents; returns it and what must be read of it."""
    if not kind.archive:
        data, reads = _made(generator, kind, name, count)
        return (data if kind.format == "wet" else packed(generator, kind.packing, data)), reads
    members, reads = {}, list[Read]()
    for number in range(generator.randint(1, 3)):
        member = f"{generator.choice(('', 'in/'))}m{number}.{kind.reader}"
        members[member], some = _made(generator, kind, f"{name}::{member}", max(count // 3, 1))
        reads += some
    out = io.BytesIO()
    if kind.archive == ".zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in {"in/": b"", **members}.items():
                archive.writestr(member, data)
        return out.getvalue(), reads
    with tarfile.open(fileobj=out, mode="w:gz" if kind.archive == ".tar.gz" else "w") as tar:
        for member, data in {"._hidden": b"x", **members}.items():
            info = tarfile.TarInfo(f"./{member}" if generator.random() < 0.5 else member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue(), reads


def packed(generator: random.Random, packing: str, data: bytes) -> bytes:
    """Returns data compressed in one to three streams; xz allows zeros after each."""
    cuts = sorted(generator.randint(0, len(data)) for _ in range(generator.choice((0, 0, 1, 2))))
    parts = [data[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(data)))]
    padding = bytes(4) * (packing == ".xz" and generator.random() < 0.3)
    return b"".join(_PACKED[packing](part) + padding for part in parts)


def damaged(generator: random.Random, packing: str, data: bytes) -> bytes:
    """Returns a compressed file that was cut, or has a flipped bit or foreign bytes at its end."""
    how = generator.choice(("cut", "flip", "flip", "flip", "end"))
    if how == "cut":
        return data[: generator.randrange(1, len(data))]
    if how == "end":
        return data + generator.choice((b"x", b"\n", b"not a stream", bytes(3)))
    # Streams of zstd need not have checksums.
    magic, out = b"\x28\xb5\x2f\xfd", bytearray(data)
    place = data.rindex(magic) if packing == ".zst" else generator.randrange(len(data))
    out[place] ^= 1 << generator.randrange(8)
    return bytes(out)


def _text(generator: random.Random, longest: int) -> str:
    words = generator.choices(_WORDS, k=int(longest ** generator.random()))
    for _ in range(generator.choice((0, 0, 0, 1, 3))):
        words.insert(generator.randint(0, len(words)), generator.choice(_ODD))
    spaces = generator.choices((" ", "\n", "  "), (9, 1, 0.3), k=len(words))
    text = "".join(map("".join, zip(words, spaces, strict=True)))
    if generator.random() < 0.05:  # a first part that is blank, or nothing
        return generator.choice(("", " " * 200 + text))
    return text if generator.random() < 0.2 else text.strip(" \n")


def _rows(generator: random.Random, kind: Kind, name: str, count: int) -> list[dict[str, Any]]:
    rows = []
    problems = [why for why, forms in _BAD.items() if kind.format in forms]
    for number in range(count):
        more = generator.choice(("", "#part2", ":7", " ü" * (kind.format != "wet")))
        named: str | int = f"{name[0]}-{number}{more}"
        if kind.ids in ("repeated", "numbers"):
            fresh = number + ord(name[0]) * 10**6
            named = fresh if kind.ids == "numbers" else f"same {generator.randrange(4)}"
        bad = generator.choice(problems) if number and generator.random() < kind.bad else ""
        texts = [_text(generator, kind.longest) for _ in range(1 + kind.pairs)]
        if kind.format in ("text", "tsv"):
            texts = [text.replace("\n", " ").replace("\t", " ") for text in texts]
        if kind.format == "block":
            texts = ["\n".join(line for line in texts[0].split("\n") if line.encode().strip())]
        rows.append({"id": named, "texts": texts, "bad": bad})
    return rows


def _made(generator: random.Random, kind: Kind, name: str, count: int) -> tuple[bytes, list[Read]]:
    rows = _rows(generator, kind, name, count)
    if kind.format == "file":
        text = b"\xff" * any(row["bad"] for row in rows) + rows[-1]["texts"][0].encode()
        read = Read(f"{name}:0", f"{name}:0", (text.removeprefix(_MARK),))
        # A file without a byte holds no document; a compressed one has bytes, and a blank document.
        return text, [read] if text or kind.packing else []
    if kind.format in _TABLES:
        return _table(generator, rows, kind), [
            _read(row, kind, f"{name}:{number}") for number, row in enumerate(rows)
        ]
    encode = {"wet": _record, "csv": _fields, "tsv": _fields, "json": _object, "array": _object}
    columns = ["id"] * (kind.ids != "places") + ["text", "more"][: 1 + kind.pairs] + ["last"]
    delimiter = {"csv": ",", "tsv": "\t"}.get(kind.format)
    out, reads = b"[ \n" * (kind.format == "array"), []
    out += f"{delimiter.join(columns)}\n".encode() if delimiter else b""
    for row in rows:
        before, data, after = encode.get(kind.format, _plain)(generator, row, kind)
        text, place = (data if out else data.removeprefix(_MARK)), len(out) + len(before)
        if kind.format == "block" and text.startswith(b"\n"):  # a line with nothing but the mark
            text, place = text[1:], place + len(_MARK) + 1
        read = _read(row, kind, f"{name}:{place}", text)
        reads += [read] if not kind.is_plain or text.strip() else []
        comma = b"," * (kind.format == "array" and row is not rows[-1])
        out += before + data + comma + after
    if kind.format == "array":
        return out + b"]\n", reads
    return (out.rstrip(b"\r\n") if kind.is_plain and generator.random() < 0.5 else out), reads


def _read(row: dict[str, Any], kind: Kind, place: str, data: bytes = b"") -> Read:
    """Returns what is read of a row, which plain text has as `data`."""
    if kind.is_plain:
        return Read(place, place, (data,))
    named = kind.format == "wet" or (kind.ids != "places" and row["bad"] not in _WITHOUT_ID)
    id_ = f"<urn:{row['id']}>" if kind.format == "wet" else str(row["id"])
    texts = [text.encode() for text in row["texts"]]
    columns = (b"say " + texts[0] + b"!", texts[1]) if kind.pairs else tuple(texts)
    return Read(id_ if named else place, place, () if row["bad"] else columns, row["bad"])


# Encoders of a row return the bytes before its place, its own, and those after it.
_Encoded = tuple[bytes, bytes, bytes]


def _plain(generator: random.Random, row: dict[str, Any], kind: Kind) -> _Encoded:
    after = (b"\n\n", b"\n \t\n", b"\n\r\n\n") if kind.format == "block" else (b"\n", b"\r\n")
    return b"", b"\xff" * bool(row["bad"]) + row["texts"][0].encode(), generator.choice(after)


def _object(generator: random.Random, row: dict[str, Any], kind: Kind) -> _Encoded:
    bad, key = row["bad"], "name" if kind.ids == "nested" else "id"
    values: dict[str, Any] = {} if kind.ids == "places" else {key: row["id"]}
    values |= dict(zip(("text", "more"), row["texts"], strict=False))
    values["text"] = {"null": None, "not a string": [1]}.get(bad, values["text"])
    if bad == "missing column":
        del values["text"]
    whole = {"n": 1, "doc": values} if kind.ids == "nested" else values
    data = json.dumps(whole, ensure_ascii=generator.random() < 0.5).encode()
    if bad == "invalid UTF-8":
        data = data.replace(b'"text": "', b'"text": "\xff')
    ends = (b"\n", b" ", b"") if kind.format == "array" else (b"\n", b"\n\n", b"\r\n")
    return b"", data[:-1] if bad == "invalid JSON" else data, generator.choice(ends)


def _fields(generator: random.Random, row: dict[str, Any], kind: Kind) -> _Encoded:
    texts = ["\udcff" * (row["bad"] == "invalid UTF-8") + row["texts"][0], *row["texts"][1:]]
    fields = [str(row["id"])] * (kind.ids != "places") + texts
    wrong = row["bad"] == "wrong number of fields"
    # One more rather than one less, where the line would be blank, which is no row.
    fields += ["z"] * (2 if wrong and not "".join(fields).strip() else not wrong)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow(fields)
    line = text.getvalue() if kind.format == "csv" else "\t".join(fields) + "\n"
    return b"", line.encode(errors="surrogateescape"), b""


def _record(generator: random.Random, row: dict[str, Any], kind: Kind) -> _Encoded:
    def record(of: str, block: bytes, *more: str) -> bytes:
        headers = [f"WARC-Type: {of}", *more, f"Content-Length: {len(block)}"]
        return "\r\n".join(["WARC/1.0", *headers, "\r\n"]).encode() + block + b"\r\n\r\n"

    block = b"\xff" * (row["bad"] == "invalid UTF-8") + row["texts"][0].encode()
    of = "response" if row["bad"].startswith("a response") else "conversion"
    before = record("metadata", b"x") if generator.random() < 0.1 else b""
    pack = _PACKED[kind.packing]
    data = record(of, block, f"WARC-Record-ID: <urn:{row['id']}>")
    return before and pack(before), pack(data), b""


def _table(generator: random.Random, rows: list[dict[str, Any]], kind: Kind) -> bytes:
    """Returns a Parquet file, or an Arrow file or stream."""
    bad, texts = [row["bad"] for row in rows], [row["texts"][0].encode() for row in rows]
    made = {"null": lambda _: None, "invalid UTF-8": lambda text: b"\xff" + text}
    raw = [made.get(why, bytes)(text) for why, text in zip(bad, texts, strict=True)]
    types = [pa.binary(), pa.large_binary()]
    types += [pa.string(), pa.large_string()] * ("invalid UTF-8" not in bad)
    columns: dict[str, Any] = {"text": pa.array(raw, pa.binary()).cast(generator.choice(types))}
    if kind.ids != "places":
        ids = [row["id"].encode() if kind.ids == "bytes" else row["id"] for row in rows]
        columns["name" if kind.ids == "nested" else "id"] = pa.array(ids)
    if kind.pairs:
        columns["more"] = pa.array([row["texts"][1] for row in rows])
    if kind.ids == "nested":
        columns = {"doc": pa.StructArray.from_arrays([*columns.values()], [*columns])}
    table, out, group = pa.table(columns), io.BytesIO(), generator.randint(5, 40)
    if kind.format == "parquet":
        pq.write_table(table, out, row_group_size=group)
        return out.getvalue()
    new = generator.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    return out.getvalue()


def parts(read: Read, longest: int, is_plain: bool) -> list[Read]:
    """Returns the parts of a text; blank parts of plain text are no documents."""
    if read.problem:
        return [read]
    cut = split(read.columns[0].decode(errors="surrogateescape"), longest)
    found = []
    for number, part in enumerate(cut, 1):
        data, several = part.encode(errors="surrogateescape"), len(cut) > 1
        name = f"{read.id}#part{number}" if number > 1 else read.id
        problem = "invalid UTF-8" * data.startswith(b"\xff")
        if data.strip() or not (is_plain and several):
            found.append(Read(name, read.place, (data,), problem, number * several))
    return found


def split(text: str, longest: int) -> list[str]:
    """Cuts a text at the last white space within `longest` bytes, which goes, or inside a word."""
    found = []
    while sum(map(_bytes, text)) > longest:
        size = space = end = 0
        while size + _bytes(text[end]) <= longest:
            size, end = size + _bytes(text[end]), end + 1
            space = end if text[end].isspace() else space
        found.append(text[: space or end])
        text = text[space + 1 if space else end :]
    return [*found, text]


def _bytes(character: str) -> int:
    return len(character.encode(errors="surrogateescape"))
