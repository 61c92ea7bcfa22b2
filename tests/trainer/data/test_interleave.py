"""Mixing: exact rates, random access, and changes of rates."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from trainer.data.interleave import Interleave, MixingSchedule

RATES = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=12).filter(any)


def one_by_one(rates, number):
    """Returns places by the definition: a position reads the source whose window is due first."""
    rates = np.asarray(rates) / np.sum(rates)
    read = np.zeros(len(rates), int)
    places = []
    for _ in range(number):
        with np.errstate(divide="ignore"):
            source = int(np.argmin((read + 0.5) / rates))
        places.append((source, read[source]))
        read[source] += 1
    return places


@given(RATES, st.integers(0, 150), st.integers(0, 60))
def test_any_position_is_reached_without_those_before(rates, first, number):
    sources, ranks = Interleave(rates).places(first, number)
    expected = one_by_one(rates, first + number)[first:]
    assert list(zip(sources.tolist(), ranks.tolist(), strict=True)) == expected


@given(RATES, st.integers(0, 2**45))
def test_every_source_has_its_share_at_any_position(rates, position):
    counts = Interleave(rates).counts(position)
    assert counts.sum() == position
    # Beyond that bound a product of a position and a rate is itself rounded.
    slack = (len(rates) + 1) / 2 + position * 1e-15 * len(rates)
    assert (abs(counts - position * (np.array(rates) / sum(rates))) <= slack).all()
    assert not counts[np.array(rates) == 0].any()


def test_far_positions_are_consistent():
    interleave = Interleave([0.7, 0.2, 1e-6, 0.1])
    first = 10**13 + 7
    sources, ranks = interleave.places(first, 1000)
    assert np.array_equal(interleave.counts(first)[sources[:1]], ranks[:1])
    for offset in (1, 500, 999):
        later = interleave.places(first + offset, 1000 - offset)
        assert np.array_equal(later[0], sources[offset:])
        assert np.array_equal(later[1], ranks[offset:])


def test_a_change_of_rates_repeats_and_skips_no_window():
    changes = [(0, [3, 1, 0]), (101, [1, 1, 1]), (102, [0, 0, 1]), (300, [1, 5, 2])]
    schedule = MixingSchedule(changes)
    sources, ranks = schedule.places(0, 1000)
    for source in range(3):
        mine = ranks[sources == source]
        assert mine.tolist() == list(range(len(mine)))
    assert set(sources[102:300].tolist()) == {2}
    assert np.bincount(sources[:101]).tolist() == pytest.approx([75.75, 25.25], abs=1)
    # From any position on, over the changes too.
    for first in (0, 90, 101, 250, 299, 600):
        later = schedule.places(first, 210)
        assert np.array_equal(later[0], sources[first : first + 210])
        assert np.array_equal(later[1], ranks[first : first + 210])
