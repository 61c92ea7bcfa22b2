"""The record codec, against TensorFlow's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import records

ids = st.lists(st.integers(0, 2**31 - 1), max_size=60).map(lambda v: np.array(v, np.int64))


@given(ids)
def test_varints_round_trip(values):
    np.testing.assert_array_equal(records.decode_varints(records.encode_varints(values)), values)


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
    data = records.encode_row(targets, starts)
    assert data == example.SerializeToString(deterministic=True)
    row = records.decode_row(records.unframe(records.frame(data)))
    np.testing.assert_array_equal(row.targets, targets)
    np.testing.assert_array_equal(row.document_starts, starts)


def test_tensorflow_reads_the_framing(tmp_path):
    import tensorflow as tf

    rows = [records.encode_row(np.arange(n) + 3, np.array([0])) for n in (0, 1, 568)]
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(b"".join(map(records.frame, rows)))
    assert [bytes(data.numpy()) for data in tf.data.TFRecordDataset(str(path))] == rows


@given(st.data())
def test_a_changed_byte_is_noticed(data):
    record = bytearray(records.frame(records.encode_row(np.arange(50) * 700, np.array([0, 20]))))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(records.CorruptRecord):
        records.unframe(record)


@given(st.integers(0, 70))
def test_a_record_cut_short_is_noticed(length):
    record = records.frame(records.encode_row(np.arange(50) + 3, np.array([0])))
    assert len(record) > 70
    with pytest.raises(records.CorruptRecord):
        records.unframe(record[:length])


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x03\x0a\x01\x80", b"\x08\x01", b""])
def test_what_is_no_row_is_refused(data):
    with pytest.raises(records.CorruptRecord):
        records.decode_row(data)
