"""Faults of runs: killed runs end up equal, and every difference is noticed."""

import json
import re

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tasks.terminal.command_line import UserError
from tests.faults import __main__ as faults
from tests.faults.comparing import run_differences

pytestmark = pytest.mark.processes

SHORT = ("--steps=20", "--evaluation.every_steps=10")


def kill(cache, folder, capsys, *flags):
    code = faults.main(["runs", f"--output={folder}", f"--cache_dir={cache}", *flags])
    out, err = capsys.readouterr()
    return code, [line for line in out.splitlines() if re.match(r"\| +\d", line)], out + err


@pytest.mark.slow
def test_two_kills_leave_no_trace(text_cache, tmp_path, capsys):
    code, kills, output = kill(
        text_cache, tmp_path / "lab", capsys, "--kills=2", "--damages=0", *SHORT
    )
    assert code == 0, output
    assert len(kills) == 2
    assert "equal, bit for bit" in output
    # Folders of equal runs are deleted.
    assert not [path for path in (tmp_path / "lab").glob("killed-*") if path.is_dir()]


@pytest.mark.slow
def test_ten_kills_leave_no_trace(text_cache, tmp_path, capsys):
    code, kills, output = kill(
        text_cache, tmp_path / "lab", capsys, "--kills=10", "--damages=3", "--seed=1"
    )
    assert code == 0, output
    assert len(kills) == 13
    assert len({line.split("|")[3] for line in kills[:10]}) > 2


def model_dir(folder, state, lines):
    folder.mkdir()
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(folder.absolute() / "checkpoint_20" / "state", state)
    checkpointer.wait_until_finished()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


LINES = [
    {"step": step, "split": "train", "metrics": {"loss": 1 / step}, "speed": {"x": step}}
    for step in (1, 2)
]
STATE = {"w": jnp.arange(3.0), "b": jnp.full(2, jnp.nan)}
OTHER_LOSS = {**LINES[1], "metrics": {"loss": float(np.nextafter(0.5, 1))}}


@pytest.mark.parametrize(
    ("changes", "lines", "expected"),
    [
        ({}, [{**line, "speed": {"x": 7}} for line in LINES], []),
        ({"w": jnp.nextafter(STATE["w"], jnp.float32(9))}, LINES, ["tensor w"]),
        ({"w": STATE["w"] * jnp.array([-1.0, 1.0, 1.0])}, LINES, ["tensor w"]),
        ({"c": jnp.zeros(1)}, LINES, ["tensor c"]),
        ({}, [LINES[0], OTHER_LOSS], ["0.5}"]),
        ({}, LINES[:1], ["2 and 1 lines"]),
    ],
    ids=["speed", "bit", "sign", "more", "curve", "short"],
)
def test_every_difference_is_noticed(changes, lines, expected, tmp_path):
    one = model_dir(tmp_path / "one", STATE, LINES)
    other = model_dir(tmp_path / "other", {**STATE, **changes}, lines)
    found = run_differences(one, other, 20)
    assert len(found) == len(expected)
    assert all(text in each for text, each in zip(expected, found, strict=True))


def test_a_failing_run_is_reported(text_cache, tmp_path, capsys):
    with pytest.raises(UserError, match=r"a run ended with 2: .*batch_sise"):
        kill(text_cache, tmp_path / "lab", capsys, "--batch_sise=4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["runs", "--steps=5"], "at least 20"),
        (["runs", "--kills=-1"], "at least 0"),
        (["builds", "--vocabulary=v", "--workers=3-1"], "3-1 is not a range"),
        (["builds"], "--vocabulary"),
    ],
)
def test_wrong_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        faults.main(flags)
    assert message in capsys.readouterr().err
