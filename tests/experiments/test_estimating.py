"""The time that a sweep will take, from the cells that have finished."""

import json
from types import SimpleNamespace

import pytest

from experiments.sweeps import estimating
from experiments.sweeps.cells import Cell
from experiments.sweeps.estimating import Cost
from tasks.objectives import Lengths
from tests.support import runs


def test_a_finished_cells_speed_counts_its_evaluations_once(tmp_path):
    (tmp_path / "run").mkdir()
    line = {"step": 10, "split": "train", "metrics": {}, "speed": {"steps_per_second": 4.0}}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    cell = Cell({}, 0, (SimpleNamespace(folder="run"),), ())
    # 100 updates of 5 operations, and evaluations that take as many.
    cost = Cost(parameters=1, steps=100, tokens=1, operations=1000.0, update=5.0, runs=1)
    speed, source = estimating.speed([(cell, str(tmp_path))], {cell.label: cost})
    assert speed == 4.0 * 5.0
    assert source == "measured on 1 finished cells"
    # 25 s of updates, and as much of evaluations.
    assert cost.seconds(speed) - cost.seconds(float("inf")) == pytest.approx(50)


def test_an_encoder_reads_a_row_once_and_a_decoder_both_sides_of_it():
    def positions(preset):
        return estimating._positions(runs.config_of(preset=preset), Lengths(64, 64))

    assert positions("bert_tiny") == (64, 0)
    assert positions("lm_tiny") == (0, 128)
    assert positions("t5_1_1_tiny") == (64, 64)
