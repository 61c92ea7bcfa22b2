"""The order of data beside Megatron-LM's, which t5-experiments uses, as docs/migrating.md says."""

import numpy as np
import pytest

from trainer.data.interleave import Interleave
from trainer.data.order import GlobalOrder

# Rates -> the farthest that the counts of Megatron-LM and ours are from them, and from each other.
MIXTURES = {
    (0.5, 0.5): (0.5, 0.5, 0),
    (0.7, 0.3): (0.7, 0.5, 1),
    (0.5, 0.3, 0.2): (0.6, 0.5, 1),
    (0.4, 0.3, 0.15, 0.1, 0.05): (0.8, 0.6, 1),
    (0.9, 0.05, 0.03, 0.02): (1.2, 0.9, 2),
}


def blended(rates, number):
    """Returns the sources in Megatron-LM's order: each time the one furthest behind its rate."""
    counts, sources = np.zeros(len(rates)), []
    for position in range(number):
        sources.append(int(np.argmax(np.array(rates) * max(position, 1) - counts)))
        counts[sources[-1]] += 1
    return np.array(sources)


def counts_of(sources, rates):
    return np.cumsum(sources[:, None] == np.arange(len(rates)), axis=0)


@pytest.mark.parametrize("rates", MIXTURES)
def test_mixtures_keep_their_rates_as_closely(rates):
    number = 20_000
    shares = np.arange(1, number + 1)[:, None] * rates
    theirs = counts_of(blended(rates, number), rates)
    ours = counts_of(Interleave(rates).places(0, number)[0], rates)
    found = [
        np.abs(theirs - shares).max(),
        np.abs(ours - shares).max(),
        np.abs(theirs - ours).max(),
    ]
    np.testing.assert_allclose(found, MIXTURES[rates], atol=0.051)


@pytest.mark.parametrize(("epochs", "unread"), [(2, 0.25), (5, 0.328), (10, 0.349)])
def test_an_epoch_reads_every_window(epochs, unread):
    """Megatron-LM shuffles the samples of all epochs together."""
    windows = 20_000
    first = np.random.default_rng(0).permutation(windows * epochs)[:windows] % windows
    assert 1 - len(np.unique(first)) / windows == pytest.approx(unread, abs=0.01)
    order = GlobalOrder(windows, seed=0)
    ours = order(np.zeros(windows, np.int64), np.arange(windows))
    assert len(np.unique(ours)) == windows
