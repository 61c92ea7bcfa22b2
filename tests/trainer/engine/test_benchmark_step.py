"""benchmarks.step runs and prints every line that it documents."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import measure, t5x
from benchmarks.measure import SIZES, expected_seconds
from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from trainer.config.from_flags import build_config


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--preset=t5_1_1_tiny", "--inputs=16", "--targets=8", "--dtype=bfloat16"],
        ["--preset=lm_tiny", "--inputs=0", "--targets=8", "--model.scan_layers=true"],
        ["--preset=bert_tiny", "--inputs=16", "--targets=0", "--model.attention=dot_product"],
    ],
)
def test_a_step_is_measured(flags):
    command = [sys.executable, "-m", "benchmarks.step", "--batch_size=2", "--rounds=2"]
    made = completed([*command, *flags])
    assert made.returncode == 0, made.stderr
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in made.stdout.splitlines())
    assert {"step", "MFU", "roofline", "memory", "processor", "backward", "no layers"} <= set(lines)
    share = re.match(r"([\d.]+)% of [\d.]+ TFLOP/s", lines["MFU"])
    assert 0 < float(share[1]) < 100
    assert re.search(r"bound by (compute|memory)", lines["roofline"])


def test_t5x_gets_the_sizes_of_the_preset():
    config, _ = build_config("lm_small", ["--batch_size=4"])
    found = t5x.sizes(config, 0, 64)
    assert found["decoder_only"]
    assert found["network"]["num_decoder_layers"] == config.model.num_decoder_layers
    assert json.loads(json.dumps(found))["network"]["mlp_activations"] == ["gelu", "linear"]
    bert, _ = build_config("bert_tiny", [])
    with pytest.raises(UserError, match="no encoder-only models"):
        t5x.sizes(bert, 64, 0)


@pytest.mark.slow
def test_what_a_device_does_is_measured_once_whatever_kill_and_written_to_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## Next\n\nText.\n")
    command = [sys.executable, "-m", "benchmarks.measure", "--presets=t5_1_1_tiny"]
    command += [f"--output={tmp_path / 'measured'}", f"--page={page}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as killed:
        assert any(line == "bits: measuring\n" for line in killed.stderr)
        killed.kill()
    assert "Measured" not in page.read_text()
    made = completed(command)
    assert made.returncode == 0, made.stderr
    assert {"bits", "t5_1_1_tiny", "t5_1_1_tiny.transformers"} == {
        line.partition(":")[0] for line in made.stderr.splitlines() if line.endswith(": measuring")
    }
    text = page.read_text()
    assert re.search(r"\| `t5_1_1_tiny` \| 8 x \(64, 32\) \| [\d.,]+ \| .* transformers", text)
    assert "equal to the bit" in text
    # The same command goes on, and writes the section once.
    again = completed(command)
    assert again.returncode == 0
    assert ": measuring" not in again.stderr
    assert page.read_text() == text


def test_a_measurement_of_an_h100_is_expected_to_take_less_than_ten_minutes():
    parts = ["kernels", "bits", *[*SIZES][1:], *(f"{name}.transformers" for name in [*SIZES][1:])]
    assert 60 < expected_seconds(["kernels"]) < expected_seconds(parts) < 600


def test_a_rehearsal_cut_at_any_part_measures_each_once_and_writes_every_row(tmp_path, monkeypatch):
    page, measured = tmp_path / "page.md", []
    page.write_text("# Page\n")
    presets = [*SIZES][1:]
    parts = ["kernels", "bits"]
    parts += [f"{preset}{beside}" for preset in presets for beside in ("", ".transformers")]

    def one_more(flags, part, known=None):
        """Stands in for the process of a part; each command is cut at its second one."""
        if part == "device":
            measured.append([])
            return {"devices": 1, "platform": "cpu", "kind": "cpu"}
        if len(measured[-1]) == 1:
            raise KeyboardInterrupt
        measured[-1].append(part)
        row = {"row": f"2 x (64, 14) | 1.0 | unknown | {len(measured)}"} if part in presets else {}
        return {"text": f"{part} took 1 ms", **row}

    monkeypatch.setattr(measure, "_in_own_process", one_more)
    command = ["--rehearse", f"--output={tmp_path / 'measured'}", f"--page={page}"]
    for _ in parts[:-1]:
        with pytest.raises(KeyboardInterrupt):
            measure.main(command)
        assert page.read_text() == "# Page\n"
    measure.main(command)
    assert measured == [[part] for part in parts]
    text = page.read_text()
    assert "## Rehearsed on 1 x cpu" in text
    rows = re.findall(r"^\| `(\w+)` \| .* \| transformers (\S+) took", text, re.MULTILINE)
    assert rows == [(preset, f"{preset}.transformers") for preset in presets]
    # A measurement is no rehearsal.
    with pytest.raises(KeyboardInterrupt):
        measure.main(command[1:])
    assert measured[-1] == parts[:1]
