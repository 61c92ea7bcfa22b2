"""Faults of runs and of builds that they follow: results are equal, and differences noticed."""

import argparse
import json
import re

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tasks.terminal.command_line import UserError
from tests.faults import __main__ as faults
from tests.faults import followed
from tests.faults.commands import Run
from tests.faults.comparing import cache_differences, run_differences
from tests.trainer.conftest import shard_bytes_of


def kill(cache, folder, capsys, *flags):
    code = faults.main(["runs", f"--output={folder}", f"--cache_dir={cache}", *flags])
    out, err = capsys.readouterr()
    return code, [line for line in out.splitlines() if re.match(r"\| +\d", line)], out + err


@pytest.mark.slow
def test_ten_kills_leave_no_trace(text_cache, tmp_path, capsys):
    code, kills, output = kill(
        text_cache, tmp_path / "lab", capsys, "--kills=10", "--damages=3", "--seed=1"
    )
    assert code == 0, output
    assert "equal, bit for bit" in output
    assert len(kills) == 13
    assert len({line.split("|")[3] for line in kills[:10]}) > 2
    # Folders of equal runs are deleted.
    assert not [path for path in (tmp_path / "lab").glob("killed-*") if path.is_dir()]


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


pytestmark = pytest.mark.processes

TASK = "rlm_span_corruption"


@pytest.mark.slow
def test_kills_of_builds_and_runs_leave_no_trace(text_cache, many_shards, tmp_path, capsys):
    code = faults.main(
        [
            *("followed", f"--output={tmp_path}/lab", f"--task={TASK}", "--kills=4"),
            *(f"--corpus=text:{many_shards}", f"--shard_bytes={shard_bytes_of(many_shards)}"),
            *(f"--vocabulary={text_cache.parents[1]}/vocabulary", "--steps=60", "--seed=3"),
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, out + err
    rows = [line.split("|") for line in out.splitlines() if re.match(r"\| +\d", line)]
    assert len(rows) == 4
    assert "equal, bit for bit," in out
    assert "finished shards of 48" in out
    assert any("waiting for" in row[-2] for row in rows)
    # Folders of equal pairs are deleted.
    assert not list((tmp_path / "lab").glob("trial-*"))


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


RUN_FLAGS = argparse.Namespace(
    task=TASK, preset="t5_1_1_tiny", steps=20, corpus="text:a", vocabulary="v", shard_bytes=1,
)  # fmt: skip


def test_what_a_run_waits_for_is_told_by_its_output(tmp_path):
    run = Run(RUN_FLAGS, "cache", tmp_path / "model", [])
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


def test_a_build_that_fails_ends_the_trials(text_cache, tmp_path):
    vocabulary = text_cache.parents[1] / "vocabulary"
    with pytest.raises(UserError, match=r"a build ended with 2: .*nowhere"):
        faults.main(
            [
                *("followed", f"--output={tmp_path}/lab", f"--vocabulary={vocabulary}"),
                f"--corpus=text:{tmp_path}/nowhere.txt",
            ]
        )


class StubPair:
    """A pair that does nothing, and differs as `found` says."""

    found: list[str] = []

    def __init__(self, flags, settings, folder, of_build=()):
        folder.mkdir()
        self.folder, self.lines = folder, list
        self.build = self.run = self
        self.start = self.finish = self.kill = lambda: None

    def wait_until(self, *_):
        pass

    def shards(self):
        return 4

    def differences(self, *_):
        return self.found


def hang(*_):
    raise UserError("a run hung for 600 s and was killed")


@pytest.mark.parametrize("found", [[], ["tensor w", "file plan.json"], hang])
def test_a_hang_and_a_difference_are_failures(found, tmp_path, monkeypatch, capsys):
    def run(trial, kills, most):
        kills.append(followed.Kill(1, "both", "SIGINT", 3, "writing shards", 7, "evaluating"))

    monkeypatch.setattr(StubPair, "found", [] if found is hang else found)
    monkeypatch.setattr(followed, "Pair", StubPair)
    monkeypatch.setattr(followed._Trial, "run", hang if found is hang else run)
    flags = ["followed", f"--output={tmp_path}/lab", f"--vocabulary={tmp_path}", "--kills=2"]
    assert faults.main(flags) == (1 if found else 0)
    out, err = capsys.readouterr()
    assert ("differ from" in out) == bool(found)
    for text in ["a run hung for 600 s"] if found is hang else found:
        assert f"{tmp_path}/lab/trial-1: {text}" in err
    if not found:
        assert "2 kills, 0 of the build, 0 of the run, 2 of both, 0 while the run waited" in out
        assert out.count("writing shards") == 2
