"""benchmarks.tpu_step: a line through two depths, the table, flags, and real compilations."""

import importlib.util
import json
import os
import sys

import pytest

from benchmarks import tpu_step
from benchmarks.tpu_step import Estimate, extrapolated
from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from trainer.annexes.planning import time_by_part


def of_layers(layers):
    """Returns an estimate with a fixed part and one for each layer."""
    seconds = {
        time_by_part.ATTENTION: 0.002 * layers,
        time_by_part.LOGITS: 0.003,
        time_by_part.REST: 0.001 / layers,
    }
    return Estimate(seconds, {"parameters": 100 + 10 * layers}, compile_seconds=layers)


def test_depths_continue_each_part_in_a_line():
    found = extrapolated(of_layers(2), of_layers(4), (2, 4), 12)
    assert found.seconds[time_by_part.ATTENTION] == pytest.approx(0.024)
    assert found.seconds[time_by_part.LOGITS] == pytest.approx(0.003)
    assert found.seconds[time_by_part.REST] == 0  # the line is below zero
    assert found.bytes == {"parameters": pytest.approx(220)}
    assert found.depths == (2, 4)
    assert found.compile_seconds == 6
    shallow = Estimate({time_by_part.REST: 1.0}, {})
    deep = Estimate({time_by_part.COLLECTIVES: 2.0, time_by_part.REST: 1.0}, {"program": 5})
    found = extrapolated(shallow, deep, (1, 2), 4)
    assert found.seconds == {time_by_part.REST: 1.0, time_by_part.COLLECTIVES: 6.0}
    assert found.bytes == {"program": 15}
    found = extrapolated(of_layers(1), Estimate({}, {}, refused="too large"), (1, 2), 8)
    assert found.refused == "too large"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=fast"], "unknown step fast; the steps are scanned"),
        (["--depths=2"], "two numbers"),
        (["--depths=4,2"], "must rise"),
        (["--depths=1,9"], "between 1 and 8"),
        (["--depths=1,2", "--model.num_decoder_layers=2"], "the same number of layers"),
        (["--topology=v9:2x2"], "is unknown; it must be GENERATION:SHAPE"),
    ],
)
def test_a_wrong_flag_is_named(flags, message):
    with pytest.raises(UserError, match=message):
        tpu_step.main(flags)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_steps_are_compiled_for_a_slice():
    command = [sys.executable, "-m", "benchmarks.tpu_step", "--preset=t5_1_1_mini", "--json"]
    made = completed(
        [*command, "--batch_size=8", "--inputs=128", "--targets=128", "--depths=1,2"],
        env={key: os.environ[key] for key in os.environ if not key.startswith(("JAX_", "XLA_"))},
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert [*found] == ["scanned", "unrolled"]
    for each in found.values():
        assert each["step_seconds"] > 0
        assert 0 < each["mfu"] < 1
        assert 0 < each["floor_seconds"] < each["step_seconds"]
        assert each["bytes"]["parameters"] > 0
        assert each["seconds"][time_by_part.ATTENTION] > 0
        assert each["seconds"][time_by_part.REST] < each["step_seconds"] / 2
