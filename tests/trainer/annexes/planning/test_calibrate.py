"""benchmarks.calibrate: the measurements, what they count, and times at reached rates."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from benchmarks import calibrate
from tasks.terminal.command_line import UserError
from trainer.annexes.planning import compiled, hlo, plan
from trainer.annexes.planning.compiled import local_target
from trainer.annexes.planning.devices import CHIPS, Place
from trainer.annexes.planning.gpus import GPUS
from trainer.annexes.planning.schedules import Scheduled
from trainer.annexes.planning.timing import Optimized
from trainer.engine.hardware import peak_flops

# Devices of the measurements, and seconds of a step: tokens a device x operations a token / rate.
MEASURED = {
    # 6 x 21.94e9 parameters, 16 rows of 1,024, 156 TFLOP/s, no pairs
    "maxtext_22b_v4": (64, 6 * 21.94e9 * 16 * 1024 / 156e12),
    # 40.8 + half of 12 x 32 layers x 4,096 channels x 4,096 keys, 4 rows of 4,096
    "llama2_7b_h100": (8, (6 * 6.738e9 + 6 * 32 * 4096 * 4096) * 4 * 4096 / 492e12),
    "mpt_1b_a100": (8, 14 * 2048 / 20513),
    "llama3_8b_v6e": (8, 3.443),
}


def test_the_measurements_are_those_of_their_sources():
    rows = {row.name: row for row in calibrate.table()}
    for name, (devices, seconds) in MEASURED.items():
        assert rows[name].devices == devices
        assert rows[name].seconds() == pytest.approx(seconds, rel=0.002), name
    chips = {row.topology.partition(":")[0] for row in rows.values()}
    assert chips == {*CHIPS, *GPUS}
    assert len(rows) >= 8
    assert sum(row.check for row in rows.values()) >= 4
    for row in rows.values():
        config, _ = row.config(2)
        assert config.model.num_decoder_layers == 2
        assert config.batch_size == row.rows


def tiny():
    flags = ("--model.remat=none",)
    row = ("tiny", "source", "differs", "h100:1", "t5_1_1_tiny", 8, (16, 8), flags)
    return calibrate.Row(*row, {"seconds": 2.0})


def program(layers):
    """Returns a program of as many products, each of 4,096 x 4,096 matrices, as a GPU's."""
    matrix = "bf16[4096,4096]{1,0}"
    lines = [
        f"  %d{number} = {matrix} dot(%p, %p), lhs_contracting_dims={{1}}\n"
        for number in range(layers)
    ]
    head = (
        f"HloModule m\n\nENTRY %main (p: {matrix}) -> {matrix} {{\n  %p = {matrix} parameter(0)\n"
    )
    module = hlo.parse(head + "".join(lines) + "}\n")
    return Optimized(module, [Place(0, (0, 0))], [], Scheduled())


def test_kept_programs_are_timed_at_the_chips_rates(tmp_path, monkeypatch, capsys):
    def compiled_plan(subject, target, evaluation):
        optimized = program(subject.config.model.num_decoder_layers)
        return SimpleNamespace(train=SimpleNamespace(optimized=optimized))

    h100 = GPUS["h100"]
    target = dataclasses.replace(local_target(), chip=h100)
    monkeypatch.setattr(plan, "target_of", lambda *_, **__: target)
    monkeypatch.setattr(compiled, "compile_plan", compiled_plan)
    monkeypatch.setattr(calibrate, "table", lambda: [tiny()])
    for layers in (1, 2):
        calibrate.main([f"--part=tiny.{layers}", f"--output={tmp_path}"])
    monkeypatch.setattr(calibrate.subprocess, "run", None)  # nothing is compiled again
    calibrate.main([f"--output={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| `tiny` | h100:1 | 2,000 |")
    assert not lines[2].endswith("- |")
    assert lines[-1].startswith("GPU: 1 rows, measured over planned at reached rates")
    bound, expected = calibrate._planned(tiny(), tmp_path)
    product = 2 * 4096**3 / peak_flops(h100.kind)
    assert bound.step == pytest.approx(2 * (product + h100.launch))  # the preset has 2 layers
    assert expected.step == pytest.approx(2 * (product / h100.rates.products + h100.launch))


def test_a_row_that_was_not_compiled_has_its_products_alone(tmp_path, monkeypatch, capsys):
    rows = [row for row in calibrate.table() if row.name in ("mpt_1b_a100", "mpt_7b_h100")]
    monkeypatch.setattr(calibrate, "table", lambda: rows)
    calibrate.main(["--retime", f"--output={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2
    # 6 x (6.66e9 kernels + half of the pairs) x 12,288 tokens at 989 TFLOP/s
    assert re.search(
        r"`mpt_7b_h100`, kept out \| h100:8 \| 1,155 \| 5[12]\d \| 2.2", "".join(lines)
    )
    assert lines[2].endswith("| - | - | - | - |")


def test_a_row_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="--rows=none: choose among maxtext_22b_v4"):
        calibrate.main(["--rows=none", f"--output={tmp_path}"])
