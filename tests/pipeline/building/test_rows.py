"""Compiled rows equal the bytes of the plain codec, which is tested against TensorFlow's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.building.rows import framed
from tests.support import plain_records

ids = st.lists(st.integers(0, 2**31 - 1), max_size=200)


@given(st.lists(st.tuples(ids, ids), max_size=5))
def test_bytes_and_bounds(rows):
    data, bounds = framed(
        np.array([token for targets, _ in rows for token in targets], np.int32),
        np.array([len(targets) for targets, _ in rows], np.int64),
        np.array([start for _, starts in rows for start in starts], np.int32),
        np.array([len(starts) for _, starts in rows], np.int64),
    )
    plain = [
        plain_records.frame(plain_records.encode_row(np.array(targets, int), np.array(starts, int)))
        for targets, starts in rows
    ]
    assert data.tobytes() == b"".join(plain)
    assert np.diff(bounds).tolist() == [len(record) for record in plain]
