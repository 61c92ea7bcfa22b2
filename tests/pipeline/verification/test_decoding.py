"""Rows that are verified many at a time are those that are read one at a time."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.building.rows import framed
from pipeline.verification import decoding
from tasks.cache import records
from tasks.cache.manifest import PAIRS, QUARANTINE, PairLimits, Plan
from tasks.storage import protobuf
from tasks.vocabulary import VocabularyRecord
from tests.support import plain_records

TEXT = Plan("task", {}, VocabularyRecord("", 500, 0, 0), "concat", 100, "eos", {"train": 1})
OF_PAIRS = dataclasses.replace(
    TEXT, packing=PAIRS, row_tokens=0, pairs=PairLimits(0, 0, QUARANTINE)
)
PLANS = {"text": TEXT, "pairs": OF_PAIRS}
lists = st.lists(
    st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=9
)


def written(plan, targets, others):
    """Returns the records of rows as the build writes them, and where they begin and end."""
    targets, others = targets[: len(others)], others[: len(targets)]
    parts = []
    for each in (targets, others):
        values, counts = [*itertools.chain(*each)], [*map(len, each)]
        parts += [np.array(values, np.int64), np.array(counts, np.int64)]
    data, bounds = framed(*parts, "inputs" if plan.pairs else "document_starts")
    return data.tobytes(), bounds


def assert_equal(found, wanted):
    for field in dataclasses.fields(found):
        values = (getattr(each, field.name) for each in (found, wanted))
        np.testing.assert_array_equal(*values, field.name)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(deadline=None, max_examples=50)
@given(targets=lists, others=lists)
def test_rows_as_we_write_them(plan, targets, others):
    data, bounds = written(plan, targets, others)
    assert decoding._as_we_write(data, bounds, plan) is not None
    found = decoding.decoded(data, bounds, plan)
    for lists_of, mine in zip(
        decoding._as_we_write(data, bounds, plan),
        decoding._one_by_one(data, bounds, plan),
        strict=True,
    ):
        np.testing.assert_array_equal(lists_of, mine)
    count = min(len(targets), len(others))
    tokens = [(others[row] if plan.pairs else []) + targets[row] for row in range(count)]
    assert found.lengths.tolist() == list(map(len, tokens))
    assert found.text.tolist() == [sum(token != 1 for token in row) for row in tokens]
    assert found.most == max(itertools.chain(*tokens), default=0)


def test_rows_in_another_form_are_read_too():
    rows = [([5, 1, 7], [0, 2]), ([], []), ([300, 1], [1])]
    data = bytearray()
    for targets, starts in rows:
        entry = protobuf.fields(memoryview(plain_records.encode_row(targets, starts)))
        entries = [each for _, _, each in protobuf.fields(next(entry)[2])]
        other_order = b"".join(protobuf.field(1, bytes(each)) for each in reversed(entries))
        data += plain_records.frame(protobuf.field(1, other_order))
    bounds = np.array(decoding._bounds(bytes(data)))
    assert decoding._as_we_write(bytes(data), bounds, TEXT) is None
    ours, _ = written(TEXT, *zip(*rows, strict=True))
    found = decoding.decoded(bytes(data), bounds, TEXT)
    assert_equal(found, decoding.decoded(ours, bounds, TEXT))
    assert found.ends.tolist() == [1, 4]


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_any_changed_byte_is_found_in_its_row(monkeypatch, block):
    monkeypatch.setattr(decoding, "_BLOCK_BYTES", block)
    targets = [[row * 50 + each for each in range(30)] for row in range(9)]
    data, bounds = written(TEXT, targets, [[0, 7]] * 9)

    def read(data):
        rows, parts = 0, []
        for offset, part, limits in decoding.blocks(io.BytesIO(data).read):
            assert data[offset : offset + len(part)] == part
            try:
                parts.append(decoding.decoded(part, limits, TEXT))
            except records.CorruptRecord as error:
                return rows + error.record
            rows += len(limits) - 1
        return decoding.joined(parts)

    assert_equal(
        dataclasses.replace(read(data), offsets=bounds[:-1]), decoding.decoded(data, bounds, TEXT)
    )
    for place in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[place] ^= 0x21
        assert read(bytes(damaged)) == np.searchsorted(bounds, place, side="right") - 1
    assert read(data[:-3]) == 8


@pytest.mark.parametrize(("plan", "other"), [(TEXT, OF_PAIRS), (OF_PAIRS, TEXT)])
def test_rows_of_the_other_kind_are_damage(plan, other):
    data, bounds = written(other, [[5], [6]], [[0], [0]])
    with pytest.raises(records.CorruptRecord, match="but the plan has"):
        decoding.decoded(data, bounds, plan)
