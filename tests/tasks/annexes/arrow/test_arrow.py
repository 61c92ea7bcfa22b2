"""Arrow: the documents of Parquet with the same ids, wherever a file is cut; saved data sets."""

import json
import struct

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from tasks.annexes.arrow import arrow
from tasks.reading import languages, sources
from tasks.terminal.command_line import UserError
from tests.support.corpora import pieces_and_rows as read
from tests.support.servers.gcs import GcsServer

ANY_FOLDER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(path, table, kind="stream", rows=1000, **options):
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(**options)
    with new(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


@ANY_FOLDER
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=30)), min_size=1, max_size=60),
    kind=st.sampled_from(["stream", "file"]),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    legacy=st.booleans(),
    rows=st.integers(1, 20),
    piece_bytes=st.integers(1, 400),
    count=st.integers(1, 7),
)
def test_every_row_is_read_once_whatever_the_pieces(
    tmp_path, monkeypatch, texts, kind, compression, legacy, rows, piece_bytes, count
):
    monkeypatch.setattr(arrow, "_CUT_BYTES", 1)
    monkeypatch.setattr("tasks.reading.cutting._LEAST_PIECE_BYTES", 1)
    options = {"compression": compression, "use_legacy_format": legacy}
    table = pa.table({"other": list(range(len(texts))), "text": texts})
    write(tmp_path / "a.arrow", table, kind, rows, **options)
    pieces, got = read(f"arrow:{tmp_path}/a.arrow?validation=0", piece_bytes, count)
    assert [(row["id"], row["text"], row["problem"]) for row in got] == [
        (f"a.arrow:{i}", text, "null" if text is None else None) for i, text in enumerate(texts)
    ]
    if len(texts) > 4 * rows and piece_bytes < 50:
        assert len(pieces) > 2


COLUMNS = [
    pa.array(["a", None, "b"]).dictionary_encode(),
    pa.array(["a", None, "b"], pa.large_string()),
    pa.array(["a", None, "b"], pa.string_view()),
    pa.array([b"a", None, b"\xff"], pa.binary()),
    pa.array([b"a", None, b"\xff"]).dictionary_encode(),
    pa.Array.from_buffers(  # a string that is not UTF-8, as other programs write
        pa.string(), 3, pa.array([b"a", None, b"\xff"], pa.binary()).buffers()
    ),
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_columns_of_all_kinds_are_those_of_parquet(tmp_path, column):
    table = pa.table({"id": [7, None, 9], "text": column})
    write(tmp_path / "a.arrow", table)
    pq.write_table(table, tmp_path / "a.parquet")
    for options in ("?validation=0", "?inputs={id} {text}&targets=text&validation=0"):
        of_arrow = read(f"arrow:{tmp_path}/a.arrow{options}")[1]
        of_parquet = read(f"parquet:{tmp_path}/a.parquet{options}")[1]
        for row, other in zip(of_arrow, of_parquet, strict=True):
            same = {name: str(value).replace(".parquet", ".arrow") for name, value in other.items()}
            assert {name: str(value) for name, value in row.items()} == same
    assert of_arrow[0]["targets"] == "a"


def test_dictionaries_that_change_are_read_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_CUT_BYTES", 1)
    kind = pa.dictionary(pa.int8(), pa.string())
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema({"text": kind})) as writer:
        for word in "abc":
            column = pa.array([word, word * 2]).dictionary_encode().cast(kind)
            writer.write_batch(pa.record_batch({"text": column}))
    pieces, got = read(f"arrow:{tmp_path}/a.arrow?validation=0", 1)
    assert len(pieces) == 1
    assert [row["text"] for row in got] == ["a", "aa", "b", "bb", "c", "cc"]


def moved(data, gap):
    """Returns a pyarrow IPC file as other writers lay it out.

    `gap` bytes precede the schema and each message that the footer names.
    """
    (size,) = struct.unpack_from("<I", data, len(data) - 10)
    begin = len(data) - 10 - size
    footer = bytearray(data[begin : len(data) - 10])
    out, at = bytearray(data[:8]), 8
    (root,) = struct.unpack_from("<I", footer)
    places = []
    for number in (2, 3):
        place = arrow._field(footer, root, number)
        place += struct.unpack_from("<I", footer, place)[0]
        count = struct.unpack_from("<I", footer, place)[0]
        places += [place + 4 + 24 * each for each in range(count)]
    for place in sorted(places, key=lambda place: struct.unpack_from("<q", footer, place)):
        (offset,) = struct.unpack_from("<q", footer, place)
        if at == 8:
            out += bytes(gap)
        out += data[at:offset] + bytes(gap)
        struct.pack_into("<q", footer, place, len(out))
        at = offset
    return bytes(out + data[at:begin] + footer + data[-10:])


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_with_gaps_between_messages_are_read_by_their_footer(
    tmp_path, monkeypatch, compression
):
    monkeypatch.setattr(arrow, "_CUT_BYTES", 1)
    monkeypatch.setattr("tasks.reading.cutting._LEAST_PIECE_BYTES", 1)
    words = pa.array([f"word {i}" for i in range(40)])
    table = pa.table({"kind": words.dictionary_encode(), "text": words})
    write(tmp_path / "a.arrow", table, "file", 10, compression=compression)
    data = (tmp_path / "a.arrow").read_bytes()
    expected = read(f"arrow:{tmp_path}/a.arrow?id=kind&validation=0", 1)[1]
    for gap in (8, 56, 4096):
        (tmp_path / "a.arrow").write_bytes(moved(data, gap))
        pieces, got = read(f"arrow:{tmp_path}/a.arrow?id=kind&validation=0", 1)
        assert len(pieces) == 4
        assert [row["text"] for row in got] == words.to_pylist()
        assert [{**row, "place": ""} for row in got] == [{**row, "place": ""} for row in expected]


def test_a_footer_that_contradicts_the_messages_is_an_error(tmp_path):
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": ["one", "two"]}), "file")
    data = bytearray(path.read_bytes())
    for change, says in ((8, "which contradicts its footer"), (1 << 40, "it misplaces a message")):
        footer = bytearray(data)
        (size,) = struct.unpack_from("<I", data, len(data) - 10)
        base = len(data) - 10 - size
        root = struct.unpack_from("<I", data, base)[0]
        place = arrow._field(data[base:], root, 3)
        place += struct.unpack_from("<I", data, base + place)[0] + 4 + 16
        (body,) = struct.unpack_from("<q", data, base + place)
        struct.pack_into("<q", footer, base + place, body + change)
        path.write_bytes(footer)
        with pytest.raises(UserError, match=says):
            read(f"arrow:{path}")


def test_feather_is_read_and_others_are_named(tmp_path):
    table = pa.table({"text": ["one", "two"]})
    feather.write_feather(table, tmp_path / "a.feather")
    found = read(f"arrow:{tmp_path}/a.feather?validation=0")[1]
    assert [row["text"] for row in found] == ["one", "two"]
    (tmp_path / "b.feather").write_bytes(b"FEA1" + bytes(100))  # Arrow writes none any more
    pq.write_table(table, tmp_path / "c.arrow")
    (tmp_path / "d.arrow").write_text("text\n" * 9)
    (tmp_path / "e.arrow").write_bytes(b"")
    (tmp_path / "f.arrow").write_bytes((tmp_path / "a.feather").read_bytes()[:8])
    for name, says in {
        "b.feather": "is Feather version 1: rewrite it as version 2",
        "c.arrow": "is Parquet: read it as parquet:",
        "d.arrow": "cannot be read",
        "e.arrow": "cannot be read: it is empty",
        "f.arrow": "its footer is missing",
    }.items():
        with pytest.raises(UserError, match=f"{name}.*{says}") as caught:
            read(f"arrow:{tmp_path}/{name}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_file_cut_anywhere_is_named(tmp_path, kind):
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": [f"row {i}" for i in range(30)]}), kind, 10)
    data = path.read_bytes()
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"a\.arrow cannot be read"):
            read(f"arrow:{path}")
    path.write_bytes(data + data)
    with pytest.raises(UserError, match="it continues after its end"):
        read(f"arrow:{path}")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_corrupt_byte_is_an_error_or_other_text_and_never_a_crash(tmp_path, kind):
    path = tmp_path / "a.arrow"
    table = pa.table({"id": list(range(30)), "text": [f"row {i}" for i in range(30)]})
    write(path, table, kind, 10)
    data, messages = path.read_bytes(), []
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x81]) + data[place + 1 :])
        try:
            assert len(read(f"arrow:{path}?validation=0")[1]) <= 30
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


# --- folders of save_to_disk


@pytest.fixture
def saved(tmp_path):
    rows = [{"id": i, "text": f"row {i}"} for i in range(100)]
    data_set = datasets.Dataset.from_list(rows)
    whole = datasets.DatasetDict(
        train=data_set.select(range(80)),
        dev=data_set.select(range(80, 90)),
        test=data_set.select(range(90, 100)),
    )
    whole.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "dev": 1, "test": 1})
    return tmp_path / "saved"


def ids(spec):
    return [(row["split"], int(row["id"])) for row in read(spec)[1]]


def test_a_saved_data_set_has_its_own_splits(saved):
    train, dev = [("train", i) for i in range(80)], [("validation", i) for i in range(80, 90)]
    assert ids(f"arrow:{saved}") == train + dev
    assert ids(f"arrow:{saved}/?split=validation") == dev
    assert ids(f"arrow:{saved}?split=test") == [("train", i) for i in range(90, 100)] + dev
    assert ids(f"arrow:{saved}/train?validation=0") == train
    with pytest.raises(UserError, match="has no split nope"):
        read(f"arrow:{saved}?split=nope")


@pytest.mark.google
def test_a_saved_data_set_in_a_failing_bucket_is_read(saved, in_bucket):
    with GcsServer(faults=0.1, seed=5) as gcs:
        in_bucket(gcs)
        gcs.store.fill(saved, "corpus/saved")
        assert ids("arrow:gs://bucket/corpus/saved") == ids(f"arrow:{saved}")


def test_files_left_from_another_save_are_not_read(saved):
    name = "data-00000-of-00009.arrow"
    (saved / "train" / name).write_bytes((saved / "test/data-00000-of-00001.arrow").read_bytes())
    corpus = sources.resolve(sources.parse(f"arrow:{saved}"))
    assert len(corpus.record["files"]) == 4
    assert any("not part of the data set, 1" in note for note in corpus.notes)


def state(**members):
    def damage(saved):
        path = saved / "train/state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **members}))

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda saved: next(saved.glob("train/data-00001*")).unlink(),
            "-of-00003.arrow is missing",
        ),
        (lambda saved: (saved / "train/state.json").unlink(), "train/state.json is missing"),
        (lambda saved: (saved / "train/state.json").write_text("{"), "is not valid JSON"),
        (state(_data_files=None), "has no list _data_files"),
        (state(_data_files=[1]), "has no list _data_files"),
        (state(_data_files=[{}]), "has a file without a filename"),
        (lambda saved: (saved / "train/state.json").write_text("[1]"), "has no list _data_files"),
        (lambda saved: (saved / "dataset_dict.json").write_text('{"splits": [5]}'), "no list spl"),
        (state(_indices_data_files=[{}]), "flatten_indices"),
        (lambda saved: (saved / "dataset_dict.json").unlink(), "is a folder: name its files"),
    ],
)
def test_a_damaged_folder_is_one_line(saved, damage, says):
    damage(saved)
    with pytest.raises(UserError, match=says) as caught:
        read(f"arrow:{saved}")
    assert str(saved) in str(caught.value)


def test_folders_of_saved_data_sets_are_languages(tmp_path):
    for name in ("ro", "en"):
        datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / name)
    for end in ("", "/", "/*.arrow"):
        found = languages.specs([f"arrow:{tmp_path}/{{language}}{end}"], None)
        assert list(found) == ["en", "ro"]
        languages.check(found)
    (tmp_path / "ro" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"language ro: .* save the data set again"):
        languages.check(languages.specs([f"arrow:{tmp_path}/{{language}}"], None))


def test_a_path_without_a_kind_gets_its_own():
    with pytest.raises(UserError, match=r"did you mean arrow:/a/b\.feather\?"):
        sources.parse("/a/b.feather")
