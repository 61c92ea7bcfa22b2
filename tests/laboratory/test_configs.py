"""A small sample of random configurations, and that a planted fault is noticed."""

import argparse
import json

import pytest

from tests.laboratory import configs
from tests.laboratory.commands import Difference
from trainer.huggingface import rotary

pytestmark = pytest.mark.torch
FLAGS = argparse.Namespace(seed=5)


def test_a_small_sample_is_equal_or_refused(tmp_path):
    for number in range(0, len(configs.FAMILIES), 6):
        assert configs.Trial(FLAGS, number, tmp_path).run()


def test_a_scaling_that_is_dropped_is_noticed(tmp_path, monkeypatch):
    number = [*configs.FAMILIES].index("llama")
    trial = configs.Trial(FLAGS, number, tmp_path)

    def scaled(written):
        written["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}

    monkeypatch.setattr(trial, "change", scaled)
    assert trial.run().startswith("llama: equal")
    read = rotary.read

    def dropped(fields):
        fields.get("rope_scaling", {})
        fields._fields.pop("rope_scaling", None)
        return read(fields)

    monkeypatch.setattr(rotary, "read", dropped)
    written = json.loads((tmp_path / str(number) / "config.json").read_text())
    with pytest.raises(Difference, match="transformers computes different logits"):
        trial.outcome(written)
