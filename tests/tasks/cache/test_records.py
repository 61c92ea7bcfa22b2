"""Records are compared with TensorFlow's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.cache import records
from tests.support import foreign_caches, plain_records

ids = st.lists(st.integers(0, 2**31 - 1), max_size=60).map(lambda v: np.array(v, np.int64))


@pytest.mark.tensorflow
@settings(deadline=None)  # the first example imports TensorFlow
@given(ids, ids)
def test_tensorflow_writes_the_same_bytes(targets, starts):
    import tensorflow as tf

    def feature(values):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    example = tf.train.Example(
        features=tf.train.Features(
            feature={"targets": feature(targets), "document_starts": feature(starts)}
        )
    )
    data = plain_records.encode_row(targets, starts)
    assert data == example.SerializeToString(deterministic=True)
    row = records.decode_row(records.unframe(plain_records.frame(data)))
    np.testing.assert_array_equal(row.targets, targets)
    np.testing.assert_array_equal(row.document_starts, starts)


@pytest.mark.tensorflow
def test_tensorflow_reads_the_framing(tmp_path):
    import tensorflow as tf

    rows = [plain_records.encode_row(np.arange(n) + 3, np.array([0])) for n in (0, 1, 568)]
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(b"".join(map(plain_records.frame, rows)))
    assert [bytes(data.numpy()) for data in tf.data.TFRecordDataset(str(path))] == rows


@given(st.integers(0, 70))
def test_a_truncated_record_is_detected(length):
    record = plain_records.frame(plain_records.encode_row(np.arange(50) + 3, np.array([0])))
    assert len(record) > 70
    with pytest.raises(records.CorruptRecord):
        records.unframe(record[:length])


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    lengths = (568, 1, 568, 40, 3, 568, 200)
    return [(generator.random(n) ** 12 * 2**28).astype(np.int64) for n in lengths]


def as_we_write(row):
    return plain_records.encode_row(row, np.arange(len(row) // 100))


def together(rows, encode=as_we_write):
    framed = [plain_records.frame(encode(row)) for row in rows]
    bounds = np.cumsum([0, *map(len, framed)])
    return b"".join(framed), bounds, np.array([len(row) for row in rows], np.int64)


def written_by_tensorflow(row):
    """Encodes a row with a feature after `targets`, unlike pipeline.build."""
    import tensorflow as tf

    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=row))
    features = tf.train.Features(feature={"targets": feature, "zzz": feature})
    return tf.train.Example(features=features).SerializeToString(deterministic=True)


def wide(row):
    """Encodes a row in which some ids take five bytes."""
    row[::7] += 2**30
    return as_we_write(row)


def emptied(row):
    """Encodes a row, without its tokens if it has one token."""
    return as_we_write(row if len(row) != 1 else row[:0])


def unpacked(row):
    return foreign_caches.encode({"targets": row.tolist()}, foreign_caches.unpacked)


def in_pieces(row):
    return foreign_caches.encode({"targets": row.tolist()}, foreign_caches.in_pieces)


@pytest.mark.tensorflow
def test_tensorflow_reads_lists_that_are_unpacked_or_in_pieces(rows):
    import tensorflow as tf

    for encode in (unpacked, in_pieces):
        for row in rows:
            features = tf.train.Example.FromString(encode(row)).features.feature
            assert list(features["targets"].int64_list.value) == row.tolist()
            assert records.decode_row(encode(row)).targets.tolist() == row.tolist()


@pytest.mark.parametrize(
    "encode",
    [
        as_we_write,
        pytest.param(written_by_tensorflow, marks=pytest.mark.tensorflow),
        wide,
        emptied,
        unpacked,
        in_pieces,
    ],
)
def test_records_read_together_equal_records_read_one_by_one(rows, encode):
    rows = [row.copy() for row in rows]
    data, bounds, tokens = together(rows, encode)
    if encode is emptied:
        rows[1], tokens[1] = rows[1][:0], 0
    read = records.Records(data, bounds, tokens)
    parts = [(2, 3, 500), (0, 0, 568), (1, 0, len(rows[1])), (3, 39, 1), (6, 199, 0), (0, 567, 1)]
    found = read.tokens(*np.array(parts).T)
    assert found.dtype == np.int32
    expected = [rows[row][skip : skip + count] for row, skip, count in parts]
    assert found.tolist() == np.concatenate(expected).tolist()
    none = read.tokens(*np.zeros((3, 0), np.int64))
    assert (none.dtype, none.shape) == (np.int32, (0,))
    assert (read._targets.heads is None) == (encode not in (as_we_write, wide))


@given(st.data())
def test_a_changed_byte_is_detected_in_its_record(rows, data):
    whole, bounds, tokens = together(rows)
    changed = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    record = int(np.searchsorted(bounds, place, side="right")) - 1
    with pytest.raises(records.CorruptRecord) as alone:
        records.unframe(changed[bounds[record] : bounds[record + 1]])
    with pytest.raises(records.CorruptRecord) as among:
        records.Records(bytes(changed), bounds, tokens)
    assert among.value.record == record
    assert str(among.value) == str(alone.value)


@pytest.mark.parametrize("change", [-1, 1, -568, 10_000])
def test_an_unexpected_number_of_tokens_is_detected(rows, change):
    whole, bounds, tokens = together(rows)
    tokens[2] += change
    with pytest.raises(
        records.CorruptRecord, match=f"has 568 tokens, .* have {568 + change}"
    ) as found:
        records.Records(whole, bounds, tokens)
    assert found.value.record == 2


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x03\x0a\x01\x80", b"\x08\x01", b""])
def test_bytes_that_are_not_a_row_are_rejected(data):
    with pytest.raises(records.CorruptRecord):
        records.decode_row(data)
