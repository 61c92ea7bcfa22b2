"""Arrays equal those that Arrow itself makes."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import arrow

texts = st.lists(st.none() | st.text(max_size=5), max_size=20)


@given(texts)
def test_texts(values):
    assert arrow.of_texts(values).equals(pa.array(values, pa.large_string()))
    assert arrow.of_names(values).equals(pa.array(values, pa.string()))


@given(texts, st.sampled_from([pa.string(), pa.large_binary()]), st.data())
def test_sizes(values, kind, data):
    array = pa.array(values, pa.string()).cast(kind)
    begin = data.draw(st.integers(0, len(array)))
    part = array.slice(begin, data.draw(st.integers(0, len(array) - begin)))
    assert arrow.sizes(part).tolist() == pc.fill_null(pc.binary_length(part), 0).to_pylist()


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32])
def test_numbers(kind):
    values = np.arange(9, dtype=kind)[::2]
    array = arrow.of_numbers(values)
    assert array.equals(pa.array(values))
    if kind is not np.float32:
        assert arrow.numbers(array[1:4]).tolist() == [2, 4, 6]


def test_masks_and_repeated_texts():
    mask = np.arange(19) % 3 == 0
    assert arrow.of_mask(mask).equals(pa.array(mask))
    assert arrow.repeated("é:", 3).to_pylist() == ["é:"] * 3
    assert arrow.repeated("", 2).to_pylist() == ["", ""]
