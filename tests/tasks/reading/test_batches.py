"""Batches that are joined, without a document lost, moved or held for long."""

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reading import batches

BATCHES = st.lists(
    st.tuples(
        st.sampled_from(["train", "validation"]),
        st.lists(st.integers(0, 40), min_size=1, max_size=4),
        st.sampled_from([pa.string(), pa.large_string()]),
    )
)


@given(BATCHES)
def test_joined_batches_hold_the_same_documents_in_the_same_order(drawn):
    before, number = [], 0
    for split, lengths, kind in drawn:
        texts = [f"{number + at} ".ljust(length) for at, length in enumerate(lengths)]
        number += len(texts)
        before.append((split, pa.record_batch({"text": pa.array(texts, kind)})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_BYTES", 100)
        found = list(batches.gathered(before))
    for split in ("train", "validation"):
        ours, theirs = ([each for of, each in some if of == split] for some in (found, before))
        texts = lambda some: [text for each in some for text in each["text"].to_pylist()]  # noqa: E731
        assert texts(ours) == texts(theirs)
        assert all(each.nbytes <= 100 or each in theirs for each in ours)
        for one, other in itertools.pairwise(ours):  # none could hold the next one, too
            first = next(each for each in theirs if each.slice(0, 1).equals(other.slice(0, 1)))
            assert one.schema != first.schema or one.nbytes + first.nbytes > 100
