"""Tests that trainer.chaos finds killed runs equal, and notices every difference."""

import json
import re

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tasks.terminal.command_line import UserError
from trainer import chaos
from trainer.faults.subject import Subject, differences

pytestmark = pytest.mark.processes

SHORT = ("--steps=20", "--evaluation.every_steps=10")


def kill(cache, folder, capsys, *flags):
    code = chaos.main([f"--model_dir={folder}", f"--cache_dir={cache}", *flags])
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


def subject(folder, name, state, lines):
    flags = chaos.parser().parse_args([f"--model_dir={folder}", "--steps=20"])
    made = Subject(flags, [], folder / name)
    made.folder.mkdir()
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(made.folder.absolute() / "checkpoint_20" / "state", state)
    checkpointer.wait_until_finished()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (made.folder / "metrics.jsonl").write_text(text)
    return made


LINES = [
    {"step": step, "split": "train", "metrics": {"loss": 1 / step}, "speed": {"x": step}}
    for step in (1, 2)
]
STATE = {"w": jnp.arange(3.0), "b": jnp.full(2, jnp.nan)}


def test_every_difference_is_noticed(tmp_path):
    one = subject(tmp_path, "one", STATE, LINES)
    slower = [{**line, "speed": {"x": 7}} for line in LINES]
    assert differences(one, subject(tmp_path, "same", STATE, slower), 20) == []

    last_bit = {**STATE, "w": jnp.nextafter(STATE["w"], jnp.float32(9))}
    assert differences(one, subject(tmp_path, "bit", last_bit, LINES), 20) == ["tensor w"]
    signed = {**STATE, "w": STATE["w"] * jnp.array([-1.0, 1.0, 1.0])}
    assert differences(one, subject(tmp_path, "sign", signed, LINES), 20) == ["tensor w"]
    more = {**STATE, "c": jnp.zeros(1)}
    assert differences(one, subject(tmp_path, "more", more, LINES), 20) == ["tensor c"]

    other = [LINES[0], {**LINES[1], "metrics": {"loss": float(np.nextafter(0.5, 1))}}]
    (found,) = differences(one, subject(tmp_path, "curve", STATE, other), 20)
    assert "0.5}" in found
    (found,) = differences(one, subject(tmp_path, "short", STATE, LINES[:1]), 20)
    assert "2 and 1 lines" in found


def test_a_failing_run_is_reported(text_cache, tmp_path, capsys):
    with pytest.raises(UserError, match=r"a run ended with 2: .*batch_sise"):
        kill(text_cache, tmp_path / "lab", capsys, "--batch_sise=4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=5"], "at least 20"),
        (["--kills=-1"], "at least 0"),
        (["--damages=-1"], "at least 0"),
        (["--steps=0"], "at least 20"),
        (["--cache_dir=nowhere"], "make demo"),
        (["--follow", "--vocabulary=nowhere"], "there is no vocabulary nowhere: give --vocab"),
        (["--follow", "--damages=1"], "--damages=1, which does not go with --follow"),
        (["--corpus=python_docs"], "--corpus=python_docs, which goes with --follow"),
    ],
)
def test_wrong_flags_are_user_errors(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        chaos.main([f"--model_dir={tmp_path}", *flags])


def test_the_folder_must_be_new(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="is not empty"):
        chaos.main([f"--model_dir={tmp_path}"])
