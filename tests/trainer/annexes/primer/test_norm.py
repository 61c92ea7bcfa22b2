"""Primer's norm has a sound gradient at zero."""

from tests.trainer.model.test_gradients_at_zero import same_elsewhere
from trainer.annexes.primer import layers


def test_it_has_its_bits_and_gradients_elsewhere(monkeypatch):
    same_elsewhere(layers.PrimerNorm(), layers, monkeypatch)
