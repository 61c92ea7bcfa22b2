"""A branch says what it changes, the learning rate included."""

from tests.support.runs import config_of
from trainer.initialization.branch import Branch


def test_a_rate_that_rises_is_said():
    def described(*rates):
        return Branch("model", 4, config_of(), ["seed was 0, is 1"], 1.0, rates).describe()

    plain = "branches from model after update 4, with its whole state; changed: seed was 0, is 1"
    assert described(0.1, 0.1) == described(0.1, 0.01) == plain
    assert described(1.5e-8, 0.03) == f"{plain}; the learning rate rises from 1.5e-08 to 0.03"
