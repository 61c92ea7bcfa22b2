"""Compares learning curves: ratios of curves with known answers, and a real run."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from experiments.comparison import Curve, Spread, compare, curve, speed_up, steps_ratio, table

ROOT = pathlib.Path(__file__).parents[1]
STEPS = (100, 200, 300, 400)


def power(factor, step_seconds=1.0, steps=STEPS):
    """Returns the curve of a model that learns `factor` times as fast."""
    return Curve(steps, tuple(10 - 0.01 * factor * step for step in steps), step_seconds)


def test_a_model_that_learns_twice_as_fast():
    base, twice = power(1), power(2)
    assert steps_ratio(base, base) == 1
    assert steps_ratio(base, twice) == pytest.approx(2)
    assert speed_up(base, twice) == pytest.approx(2)
    # Each step of the variant takes 1.25 times as long.
    assert speed_up(base, power(2, 1.25)) == pytest.approx(1.6)
    # The other way around.
    assert steps_ratio(twice, base) == pytest.approx(0.5)


def test_losses_are_interpolated_linearly():
    one = Curve((10, 20, 30), (4.0, 3.0, 3.5), 1.0)
    assert one.steps_to(3.25) == 17.5
    assert one.steps_to(3.0) == 20
    assert one.steps_to(5.0) == 10
    assert one.steps_to(2.9) == math.inf


def test_arms_are_compared_in_pairs_by_seed():
    curves = {
        "base": {0: Curve((1, 2), (5.0, 4.0), 1.0, 2.0), 1: Curve((1, 2), (6.0, 5.0), 1.0, 2.0)},
        "other": {
            0: Curve((1, 2), (5.0, 3.9), 2.0, 1.9),
            1: Curve((1, 2), (6.0, 4.8), 2.0, 1.8),
            7: Curve((1, 2), (9.0, 9.0), 2.0, 1.8),
        },
        "alone": {7: Curve((1, 2), (9.0, 9.0), 2.0, 1.8)},
    }
    arms = compare(curves, "base")
    assert arms.keys() == {"base", "other"}
    other = arms["other"]
    assert other.seeds == (0, 1)
    assert other.loss.mean == pytest.approx(4.35)
    assert other.difference.mean == pytest.approx(-0.15)
    assert other.difference.deviation == pytest.approx(0.05 * math.sqrt(2))
    assert other.bits_per_byte.mean == pytest.approx(1.85)
    assert other.step_seconds == 2.0
    assert other.speed_up.mean == pytest.approx(other.steps_ratio.mean / 2)
    assert arms["base"].difference == Spread(0.0, 0.0)
    lines = table(arms, {"base": 1000, "other": 1100}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "-0.1500 ± 0.0707" in lines[-1]


def test_a_curve_is_read_from_metrics():
    lines = [
        {"step": 2, "split": "train", "metrics": {"loss": 9.0}, "speed": {}},
        {"step": 2, "split": "validation", "metrics": {"loss": 8.0, "bits_per_byte": 3.0}},
        {"step": 4, "split": "train", "metrics": {"loss": 7.0}, "speed": {"steps_per_second": 4}},
        {"step": 4, "split": "validation", "metrics": {"loss": 6.0, "bits_per_byte": 2.0}},
    ]
    assert curve(lines) == Curve((2, 4), (8.0, 6.0), 0.25, 2.0)
    assert curve(lines, step_seconds=0.5).step_seconds == 0.5
    assert curve(lines[:1]) is None


def command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "experiments.primer", "--task=x", "--cache_dir=y", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--arms=transformer_vanila"], "did you mean mini_transformer_vanilla?"),
        (["--arms=mini", "--size=t5_1_1"], "--arms=mini: t5_1_1_mini is not a decoder-only model"),
        (["--seeds=one"], "--seeds=one: give whole numbers"),
        (["--step_times=TIMES"], "lacks mini_transformer_vanilla: measure it with"),
        (["--step_times=TIMES.no"], "No such file"),
    ],
)
def test_a_user_error_is_one_line(flags, says, tmp_path):
    (tmp_path / "times.json").write_text("{}")
    flags = [flag.replace("TIMES", str(tmp_path / "times.json")) for flag in flags]
    result = command(f"--output={tmp_path}", *flags)
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_small_comparison(tmp_path):
    """Trains two arms with two seeds; the second call trains nothing."""
    text = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 30]
    (tmp_path / "train.txt").write_text("\n".join(text[20:]))
    (tmp_path / "validation.txt").write_text("\n".join(text[:20]))
    corpus = f"text:{tmp_path}/*.txt?split=train"
    for module, *flags in (
        ("vocab.train", "--vocab_size=300", f"--output={tmp_path}/vocabulary"),
        (
            "pipeline.build",
            "--task=python_docs_autoregressive_lm",
            f"--vocabulary={tmp_path}/vocabulary",
            f"--cache_dir={tmp_path}/cache",
            "--row_tokens=31",
        ),
    ):
        made = [sys.executable, "-m", module, f"--corpus={corpus}", *flags]
        subprocess.run(made, check=True, cwd=ROOT, capture_output=True)
    flags = [
        "--task=python_docs_autoregressive_lm",
        f"--cache_dir={tmp_path}/cache",
        f"--output={tmp_path}/out",
        "--size=tiny",
        "--arms=transformer_vanilla,primer_ez",
        "--seeds=3,4",
        "--steps=20",
        "--batch_size=4",
        "--lengths.targets=32",
    ]
    for times in range(2):
        result = command(*flags)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("training is finished") == 4 * times
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["arms"]["primer_ez"]["seeds"] == [3, 4]
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    assert "| primer_ez " in (tmp_path / "out" / "comparison.md").read_text()
    curves = found["curves"]["transformer_vanilla"]
    assert curves["3"]["steps"] == list(range(1, 21))
    assert curves["3"]["losses"] != curves["4"]["losses"]
    # The same folder with other settings is rejected.
    result = command(*flags, "--lengths.targets=30")
    assert result.returncode == 2
