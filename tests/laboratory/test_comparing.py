"""Every difference of two runs or two caches is noticed, and what a run waits for."""

import argparse
import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.laboratory import given_run, run_trials
from tests.laboratory.commands import Difference
from tests.laboratory.comparing import cache_differences, run_differences
from tests.laboratory.run_trials import Run


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
    found = run_differences(one, other)
    assert len(found) == len(expected)
    assert all(text in each for text, each in zip(expected, found, strict=True))


def test_every_difference_of_caches_is_noticed(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / ".before-1").mkdir(parents=True)
        for file in ("plan.json", "train.tfrecord-0", ".plan-1"):
            (tmp_path / name / file).write_text(file)
    one, other = tmp_path / "one", tmp_path / "other"
    assert cache_differences(one, other) == []
    (other / "plan.json").write_text("another")
    (other / ".plan-1").unlink()
    (other / "more").touch()
    found = cache_differences(one, other)
    assert found == ["file .plan-1", "file more", "file plan.json"]


def test_what_a_run_waits_for_is_told_by_its_output(tmp_path):
    flags = argparse.Namespace(task="a", preset="t5_1_1_tiny", steps=20)
    run = Run.given(flags, "cache", tmp_path / "model", [])
    said = ""
    for line, expected in (
        ("a line", ""),
        ("waiting for the plan of a/cache", "the plan"),
        ("no build is running in a/cache: start it", "the plan"),
        ("went on after 0.1 s", ""),
        ("waiting for train shards 8 to 11 of 64 of a/cache: 19 of", "train shards 8 to 11"),
    ):
        said += f"{line}\n"
        run.output = lambda said=said: said
        assert run.waits_for() == expected


def test_a_difference_of_a_given_run_is_named(tmp_path, monkeypatch):
    flags = argparse.Namespace(seed=5, task="a", preset="t5_1_1_tiny")
    monkeypatch.setattr(run_trials, "run_differences", lambda *_: ["the state"])
    with pytest.raises(Difference, match="t5_1_1_tiny a: 1 differences, first"):
        given_run.Trial(flags, 0, tmp_path)._same(tmp_path, tmp_path)
