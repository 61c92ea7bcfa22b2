"""The model card's figures of training, from a run's schedules."""

from types import SimpleNamespace

import pytest

from tests.support.runs import config_of
from trainer.exporting import card

FLAGS = ("--batch_size=128", "--lengths.inputs=512", "--lengths.targets=128")


def data_of(tokens, rates=((0, [1.0]),)):
    sources = [SimpleNamespace(tokens_a_row=each) for each in tokens]
    return SimpleNamespace(sources=sources, rates=rates, tasks=[])


@pytest.mark.parametrize("skip", [(), ("--data.skip=101:201",), ("--data.skip=1:5,900:2000",)])
def test_tokens_seen_are_those_that_updates_read(skip):
    """A pair of 75 tokens is no row of 512 and 128; what is skipped is not seen."""
    config = config_of(*FLAGS, *skip)
    assert card._tokens_seen(data_of([75.0]), config, 1000) == 1000 * 128 * 75


def test_tokens_seen_follow_the_rates_of_batches():
    config = config_of(*FLAGS, "--data.skip=101:201")
    data = data_of([10.0, 50.0], rates=((0, [1.0, 0.0]), (300, [0.5, 0.5])))
    # Batches up to 300 hold 200 updates.
    assert card._tokens_seen(data, config, 1000) == 128 * (200 * 10 + 800 * 30)
    data.tasks = [SimpleNamespace(task=SimpleNamespace(name=name)) for name in "ab"]
    rates = dict(card._rates(data, config))
    assert rates == {"sampling rates": "a 1, b 0", "sampling rates from update 201": "a 0.5, b 0.5"}
