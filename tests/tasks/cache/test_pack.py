"""Packing loses and repeats nothing, keeps the row length, and records where documents are."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.cache import pack
from tasks.vocabulary import EOS_ID

corpora = st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=40), max_size=60)
settings = {
    "documents": corpora,
    "row_tokens": st.integers(1, 17),
    "separator": st.sampled_from(["none", "eos"]),
}


def batch(documents, first):
    return pack.Documents(
        ids=pa.array([str(first + number) for number in range(len(documents))], pa.string()),
        tokens=np.array([token for document in documents for token in document], np.int32),
        lengths=np.array([len(document) for document in documents], np.int64),
    )


def packed(packing, documents, row_tokens, separator, batch_documents=7):
    """Returns (rows, lineage): a list of records.Row, and (id, row, position, tokens, offset)s."""
    packer = pack.packer(packing, row_tokens, separator)
    parts = [
        packer.add(batch(documents[first : first + batch_documents], first))
        for first in range(0, len(documents), batch_documents)
    ]
    rows, lineage = [], []
    for part in [*parts, packer.finish()]:
        columns = (part.row + len(rows), part.position, part.piece_tokens, part.document_offset)
        lineage += zip(part.ids.to_pylist(), *(column.tolist() for column in columns), strict=True)
        rows += part
    return rows, lineage


def with_separator(documents, separator):
    return [document + [EOS_ID] * (separator == "eos") for document in documents]


@given(**settings)
def test_concat_concatenates_the_documents(documents, row_tokens, separator):
    rows, lineage = packed("concat", documents, row_tokens, separator)
    stream = [token for row in rows for token in row.targets.tolist()]
    whole = with_separator(documents, separator)
    assert stream == list(itertools.chain.from_iterable(whole))
    assert all(len(row.targets) == row_tokens for row in rows[:-1])
    assert all(1 <= len(row.targets) <= row_tokens for row in rows[-1:])
    assert [name for name, *_ in lineage] == [str(number) for number in range(len(documents))]
    for document, (_, row, position, tokens, offset) in zip(whole, lineage, strict=True):
        begin = row * row_tokens + position
        assert stream[begin : begin + tokens] == document
        assert offset == 0


@given(**settings)
def test_best_fit_cuts_only_documents_longer_than_a_row(documents, row_tokens, separator):
    rows, lineage = packed("best_fit", documents, row_tokens, separator)
    whole = with_separator(documents, separator)
    assert all(1 <= len(row.targets) <= row_tokens for row in rows)
    assert sum(len(row.targets) for row in rows) == sum(map(len, whole))
    pieces = {}
    for name, row, position, tokens, offset in lineage:
        pieces[int(name), offset] = rows[row].targets[position : position + tokens].tolist()
    assert len(pieces) == len(lineage)
    for number, document in enumerate(whole):
        cuts = sorted(offset for name, offset in pieces if name == number)
        assert cuts == list(range(0, len(document), row_tokens))
        assert [token for cut in cuts for token in pieces[number, cut]] == document


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(**settings)
def test_document_starts_agree_with_lineage(packing, documents, row_tokens, separator):
    rows, lineage = packed(packing, documents, row_tokens, separator)
    assert [entry[1:3] for entry in lineage] == sorted(entry[1:3] for entry in lineage)
    for number, row in enumerate(rows):
        starts = [position for _, of, position, *_ in lineage if of == number]
        assert row.document_starts.tolist() == starts
        assert packing == "concat" or starts[0] == 0


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(batch_documents=st.integers(1, 60), **settings)
def test_rows_do_not_depend_on_batches(packing, documents, row_tokens, separator, batch_documents):
    rows, lineage = packed(packing, documents, row_tokens, separator)
    others, other_lineage = packed(packing, documents, row_tokens, separator, batch_documents)
    assert lineage == other_lineage
    assert [row.targets.tolist() for row in rows] == [row.targets.tolist() for row in others]


def test_best_fit_chooses_the_row_with_the_least_space_and_bounds_open_rows():
    rows, lineage = packed("best_fit", [[3] * 6, [4] * 7, [5] * 4, [6] * 3, [7] * 6], 10, "none")
    assert [row.targets.tolist() for row in rows] == [[3] * 6 + [5] * 4, [4] * 7 + [6] * 3, [7] * 6]
    assert [name for name, *_ in lineage] == ["0", "2", "1", "3", "4"]

    packer = pack.packer("best_fit", 10, "none")
    closed = packer.add(batch([[3] * 6] * (pack.OPEN_ROWS + 5), 0))
    assert len(closed.lengths) == 5
