"""A file's content, not its name, tells its compression."""

import bz2
import functools
import gzip
import io
import lzma

import fsspec
import pytest
import zstandard

from tasks.reading import compression
from tasks.reading.formats import lines
from tasks.terminal.command_line import UserError
from tests.support.corpora import encoded, known, read

ROWS = [{"id": f"{n}", "text": f"text {n}, of many"} for n in range(300)]
LINES = encoded("json", ROWS)


def long_window(data, log):
    """Compresses as `zstd --long=LOG` does from a pipe."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=log, enable_ldm=True, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def skippable(data):
    """Returns a skippable frame, as the seekable format and pzstd write them."""
    return b"\x5e\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


PACK = {
    "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress,
    "lzma": functools.partial(lzma.compress, format=lzma.FORMAT_ALONE),
    "zstd": zstandard.ZstdCompressor().compress,
}  # fmt: skip
NAMES = {
    "gzip": ("gz", "GZ", "gzip", "tgz"), "bzip2": ("bz2", "BZ2"), "xz": ("xz", "Xz"),
    "lzma": ("lzma",), "zstd": ("zst", "zstd", "ZST"),
}  # fmt: skip
# The bytes that begin each stream. lzma has none, nor checksums.
MAGIC = {"gzip": 3, "bzip2": 3, "xz": 6, "lzma": 0, "zstd": 4}
ALL_NAMES = [(name, ending) for name, endings in NAMES.items() for ending in (*endings, "", "dat")]


def texts(spec, *how):
    return [row["text"] for row in read(spec, *how)]


@pytest.mark.parametrize(("name", "ending"), ALL_NAMES)
@pytest.mark.parametrize("form", known("json", "csv", "text", "tsv"))
def test_a_compressed_file_is_read_whatever_its_name(tmp_path, monkeypatch, form, name, ending):
    monkeypatch.setattr(lines, "_SMALL_BYTES", 100)
    data = LINES if form == "text" else encoded(form, ROWS)
    (tmp_path / f"a.{ending}").write_bytes(PACK[name](data))
    spec = f"{form}:{tmp_path}/a.{ending}?validation=0" + "&quote=%22" * (form == "tsv")
    expected = [row["text"] for row in ROWS]
    assert texts(spec, 100) == (LINES.decode().splitlines() if form == "text" else expected)


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_an_ending_that_is_wrong_is_named_or_harmless(tmp_path, pack):
    for ending in ("gz", "zst"):  # one of them is wrong
        (tmp_path / f"a.{ending}").write_bytes(pack(LINES))
        assert len(texts(f"json:{tmp_path}/a.{ending}")) == 300
    (tmp_path / "a.bz2").write_bytes(LINES)
    with pytest.raises(
        UserError, match=r"a\.bz2 is not bzip2, though its name says so .*rename it"
    ):
        texts(f"json:{tmp_path}/a.bz2")


@pytest.mark.parametrize("form", ["json", "text"])
def test_in_a_store_names_tell_which_files_are_cut(form):
    fs = fsspec.filesystem("memory")
    for name, data in (("a.JSONL.GZ", gzip.compress(LINES)), ("b.jsonl", gzip.compress(LINES))):
        fs.pipe(f"/packed/{name}", data)
    try:
        assert len(texts(f"{form}:memory://packed/a.JSONL.GZ")) == 300
        with pytest.raises(UserError, match=r"b\.jsonl is compressed or an archive: say so by the"):
            texts(f"{form}:memory://packed/b.jsonl", 100)
        assert len(texts(f"{form}:memory://packed/b.jsonl")) == 300
    finally:
        fs.rm("/packed", recursive=True)


@pytest.mark.parametrize("log", [27, 28, 31])
def test_zstd_with_a_long_window_is_read(tmp_path, log):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(long_window(LINES, log))
    assert len(texts(f"json:{path}")) == 300
    path.write_bytes(PACK["zstd"](LINES) + long_window(LINES, log))  # of a later frame
    assert len(texts(f"json:{path}")) == 600
    path.write_bytes(long_window(LINES, log)[:-30])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst cannot be read: it is cut short"):
        texts(f"json:{path}")


def test_all_frames_of_zstd_are_read_at_any_step(tmp_path, monkeypatch):
    path, pack = tmp_path / "a.jsonl.zst", PACK["zstd"]
    data = skippable(b"table") + pack(LINES) + pack(b"") + skippable(b"") + pack(LINES)
    for step in (1, 7, 16 << 10):
        monkeypatch.setattr(compression, "_PACKED_BYTES", step)
        path.write_bytes(data + skippable(b"index" * 99))
        assert len(texts(f"json:{path}")) == 600
        path.write_bytes(data[:-1])
        with pytest.raises(UserError, match="cut short"):
            texts(f"json:{path}")
    stream = compression.decompress(io.BytesIO(data), "a")
    assert stream.read(50) == LINES[:50]
    for place in (7, len(LINES) + 9, 3):
        assert stream.seek(place) == place
        assert stream.read(20) == (2 * LINES)[place : place + 20]


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("step", [1, 16 << 10])
def test_every_stream_is_read_or_named(tmp_path, monkeypatch, name, step):
    monkeypatch.setattr(compression, "_PACKED_BYTES", step)
    path, stream = tmp_path / "a.jsonl", PACK[name](LINES)
    path.write_bytes(10 * stream)
    assert len(texts(f"json:{path}")) == 3000
    for place in range(MAGIC[name]):
        data = bytearray(10 * stream)
        data[3 * len(stream) + place] ^= 1
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.jsonl cannot be read: "):
            texts(f"json:{path}")
    for rest in (b"x", b"rest", b"BZ", b"a long rest that is no stream"):
        path.write_bytes(stream + rest)
        with pytest.raises(UserError, match=r"a\.jsonl cannot be read: "):
            texts(f"json:{path}")


@pytest.mark.parametrize("step", [1, 3, 16 << 10])
def test_padding_of_xz_is_read(tmp_path, monkeypatch, step):
    monkeypatch.setattr(compression, "_PACKED_BYTES", step)
    path, stream = tmp_path / "a.xz", PACK["xz"](LINES)
    for between, after in ((0, 4), (8, 0), (4, 20_000)):
        path.write_bytes(stream + bytes(between) + stream + bytes(after))
        assert len(texts(f"json:{path}")) == 600
    for between, after in ((0, 3), (5, 0), (0, 20_001)):
        path.write_bytes(stream + bytes(between) + stream + bytes(after))
        with pytest.raises(UserError, match="zeros follow a stream"):
            texts(f"json:{path}")


@pytest.mark.parametrize("name", PACK)
def test_damage_is_one_line(tmp_path, name):
    path = tmp_path / "a.jsonl"
    for place in (20, -30):
        data = bytearray(PACK[name](LINES))
        data[place] ^= 0x55
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.jsonl cannot be read: ") as caught:
            texts(f"json:{path}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", known("json", "text", "wet"))
def test_a_file_compressed_twice_is_named(tmp_path, form):
    (tmp_path / "a.gz").write_bytes(gzip.compress(PACK["zstd"](LINES)))
    with pytest.raises(UserError, match=r"a\.gz is compressed twice: decompress it once"):
        read(f"{form}:{tmp_path}/a.gz")


def test_text_that_resembles_compressed_data_is_text(tmp_path):
    for data in (
        b"BZh9 is bzip2's mark\n",
        b"]\0\0 is lzma's\n",
        b"PK is zip's\n",
        b"(\xc2\xb5/\n",
    ):
        (tmp_path / "a.txt").write_bytes(data)
        assert texts(f"text:{tmp_path}/a.txt") == [data.decode().removesuffix("\n")]
