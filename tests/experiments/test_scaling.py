"""Scaling laws: constants of known laws, and windows that do not identify them."""

import json
import pathlib
import sys

import numpy as np
import pytest

from experiments.laws import curve, size
from tasks.terminal.command_line import UserError
from tests.support import in_process
from tests.support.processes import completed

# Training losses of MARCH's second baseline on C4, means over 50 steps each. Source:
# bri25yu/march, results/BaselineV2Experiment, the tag train/loss.
MARCH = pathlib.Path(__file__).parent / "march_v2_loss.csv"
STEPS = np.arange(1, 15_001.0, 5)


def scaling(*flags):
    return in_process.run("experiments.scaling", *flags)


def refused(says, *flags):
    found = scaling(*flags)
    assert found.returncode == 2
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1
    return found.stderr


def test_the_curve_of_march():
    """Source: least_squares with soft_l1 on every loss from step 1000 on."""
    command = [sys.executable, "-m", "experiments.scaling", "steps", str(MARCH)]
    flags = ["--window=1000:", "--predict=1000000", "--json", "--draws=50"]
    found = completed([*command, *flags])
    assert found.returncode == 0, found.stderr
    law = json.loads(found.stdout)
    assert [law[name]["value"] for name in "abc"] == pytest.approx(
        [42.87, 0.3643, 1.2248], rel=0.01
    )
    assert law["L(1e+06)"]["value"] == pytest.approx(1.504, abs=0.01)
    assert law["c"]["low"] < 1.2248 < law["c"]["high"]


@pytest.fixture(scope="module")
def losses():
    """Losses of MARCH's curve with the noise of its run."""
    noise = np.random.default_rng(0).normal(0, 0.022, len(STEPS))
    return 42.87 * STEPS**-0.3643 + 1.2248 + noise


def test_a_known_curve_is_found_again(losses):
    found = curve.fit(STEPS[STEPS >= 1000], losses[STEPS >= 1000], draws=50)
    assert found.refusal == ""
    assert found.b == pytest.approx(0.3643, rel=0.01)
    assert found.c == pytest.approx(1.2248, abs=0.03)
    low, high = found.interval(found.draws[:, 2])
    assert low < 1.2248 < high < low + 0.1


def test_a_plateau_before_the_fall_is_refused(losses):
    # As MARCH's first baseline: thousands of steps at one loss, then a fall.
    late = np.where(STEPS < 7500, 5.0, 3 + 2 * np.exp(-(STEPS - 7500) / 2500))
    seen = STEPS >= 1000
    found = curve.fit(STEPS[seen], late[seen] + losses[seen] % 0.01, draws=5)
    assert "not one power law" in found.refusal


def test_a_negative_limit_is_refused():
    found = curve.fit(STEPS, 5 * STEPS**-0.1 - 0.3, draws=5)
    assert found.c == pytest.approx(-0.3, abs=1e-3)
    assert "in the limit, which no loss has" in found.refusal


# Source: Hoffmann et al. 2022, equation 10 and appendix D.2; Kaplan et al. 2020, table 2.
CHINCHILLA = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
KAPLAN = {"Nc": 6.4e13, "Dc": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103}


def runs(form, noise=0.002):
    n, d = (
        grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e10, 5), np.geomspace(1e8, 1e11, 5))
    )
    loss = runs_at(form, n, d)
    return n, d, loss * np.exp(np.random.default_rng(0).normal(0, noise, len(n)))


@pytest.mark.parametrize(("form", "law"), [("chinchilla", CHINCHILLA), ("kaplan", KAPLAN)])
def test_a_known_law_of_sizes_is_found_again(form, law):
    n, d, loss = runs(form)
    found = size.fit(form, n, d, loss, draws=10)
    assert found.refusal == ""
    constants = found.constants()
    for name in size.FORMS[form].exponents:
        assert constants[name][0] == pytest.approx(law[name], rel=0.05)
    # Ten times beyond the largest.
    truth = runs_at(form, 1e11, 1e12)
    value, low, high = found.at(1e11, 1e12)
    assert value == pytest.approx(truth, rel=0.02)
    assert low <= value <= high


def runs_at(form, n, d):
    if form == "chinchilla":
        law = CHINCHILLA
        return law["E"] + law["A"] / n ** law["alpha"] + law["B"] / d ** law["beta"]
    ratio = KAPLAN["alpha_N"] / KAPLAN["alpha_D"]
    return ((KAPLAN["Nc"] / n) ** ratio + KAPLAN["Dc"] / d) ** KAPLAN["alpha_D"]


@pytest.mark.processes
def test_sizes_that_identify_nothing_are_refused():
    n, d, loss = runs("chinchilla")
    with pytest.raises(UserError, match="1 different numbers of parameters"):
        size.fit("chinchilla", np.full_like(n, 1e8), d, loss)
    with pytest.raises(UserError, match="5 runs cannot identify"):
        size.fit("chinchilla", n[:5], d[:5], loss[:5])
    noisy = loss * np.exp(np.random.default_rng(1).normal(0, 0.3, len(n)))
    assert "do not identify" in size.fit("chinchilla", n, d, noisy, draws=10).refusal


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["steps", MARCH, "--window=12000:", "--draws=50"], "does not identify the exponent"),
        (["steps", MARCH, "--window=14000:", "--draws=50"], "begin earlier (--window)"),
        (["steps", MARCH, "--window=14990:"], "has 0 losses, but 20 are needed"),
        (["steps", MARCH, "--window=x"], "--window=x: write it as 1000:15000"),
        (["steps", MARCH, "--predict=soon"], "--predict=soon: it must be a number"),
        (["steps", "nowhere.csv"], "nowhere.csv: no such file"),
        (["steps", "."], "has no losses of train"),
        (["steps", MARCH, MARCH], "steps fits one run"),
        (["sizes", MARCH], "has no column parameters"),
        (["sizes", MARCH, "--predict=1e9"], "write parameters and tokens as 1e9:2e10"),
        (["steps", MARCH, "--draws=49"], "it must be 50 or more"),
        (["steps", MARCH, "--split=train"], "--split is for folders of runs"),
    ],
)
def test_a_mistake_is_one_line(flags, says):
    refused(says, *flags)


RISING = b"".join(b"%d,%f\n" % (n, 2 + n**0.5 / 1000) for n in range(1, 999))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"step,loss\n1,nan\n" * 1 + b"2,3\n" * 30, "losses that are not finite"),
        (b"step,loss\nnan,2\n", "step nan is not a whole number"),
        (b"step,loss\ninf,2\n", "step inf is not a whole number"),
        (b"step,loss\n1,soon\n", "line 2: could not convert"),
        ("step,loss\n1,2\n".encode("utf-16"), "is not UTF-8"),
        (b"\xef\xbb\xbfstep, loss\n1, 2\n", "the window has 1 losses"),
        (RISING, "no column step"),
        (b"step,loss\n" + RISING, "a loss that does not fall"),
    ],
)
def test_a_file_that_no_law_fits_is_one_line(tmp_path, data, says):
    path = tmp_path / "losses.csv"
    path.write_bytes(data)
    refused(says, "steps", path)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [(2, "nan", "has loss nan"), (2, "0", "has loss 0"), (0, "-1", "parameters -1"), (1, "0", "0")],
)
def test_a_run_without_a_logarithm_is_named(tmp_path, place, value, says):
    rows = [[str(number) for number in row] for row in zip(*runs("chinchilla"), strict=True)]
    rows[3][place] = value
    path = tmp_path / "runs.csv"
    path.write_text("parameters,tokens,loss\n" + "".join(",".join(row) + "\n" for row in rows))
    assert f"run 4 of {len(rows)} has " in refused(says, "sizes", path)


@pytest.mark.processes
def test_laws_are_drawn_and_printed(tmp_path):
    picture = tmp_path / "law.png"
    found = scaling("steps", MARCH, "--window=1000:", "--draws=50", f"--picture={picture}")
    assert "| c " in found.stdout, found.stderr
    assert picture.stat().st_size > 10_000
    n, d, loss = runs("chinchilla")
    rows = "".join(f"{a},{b},{c}\n" for a, b, c in zip(n, d, loss, strict=True))
    (tmp_path / "runs.csv").write_text("parameters,tokens,loss\n" + rows)
    picture = tmp_path / "sizes.png"
    flags = ("--predict=1e11:1e12", "--draws=50", f"--picture={picture}")
    found = scaling("sizes", tmp_path / "runs.csv", *flags)
    assert "| alpha " in found.stdout, found.stderr
    assert "L(1e+11, 1e+12)" in found.stdout
    assert picture.stat().st_size > 5_000
