"""Two processes on loopback: same results as one, a clear end for both, identical resumption."""

import re
import shutil
import signal
import sys
import time

import pytest

from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.support.parameters import slow_unless
from tests.support.processes import completed
from tests.support.runs import config_of, done, finish, free_port, losses, start, start_all, state
from tests.support.trees import assert_close, assert_equal
from tests.trainer.conftest import assert_one_line
from trainer.engine.processes import EXIT_LOST
from trainer.engine.stopping import EXIT_PREEMPTED

pytestmark = pytest.mark.processes

STEPS, EVERY = 12, 5
TIMEOUT = 5
PHASES = ("--batch_schedule=7: 4", "--length_schedule=7: inputs=128,targets=34")
# Kernels of 65,536 elements: each process keeps and updates its share of them.
LARGE = ("--model.emb_dim=64", "--model.mlp_dim=1024")


def pretrain(cache, model_dir, *flags):
    every = (f"--checkpoint.every_steps={EVERY}", f"--evaluation.every_steps={STEPS}")
    return runs.pretrain(cache, model_dir, "--batch_size=8", *PHASES, *LARGE, *every, *flags)


def start_two(cache, model_dir, *flags, devices=1):
    timeout = f"--processes.timeout_seconds={TIMEOUT}"
    return start_all(pretrain(cache, model_dir, timeout, *flags), devices=devices)


def assert_near(found, expected):
    """Compares losses; sums over several processes round otherwise."""
    for place, loss in expected.items():
        assert found[place] == pytest.approx(loss, abs=1e-5 if place[1] <= 5 else 1e-4), place


@pytest.fixture(scope="module")
def together(text_cache, tmp_path_factory):
    """The model directory of an uninterrupted run of two processes."""
    model_dir = tmp_path_factory.mktemp("together") / "model"
    flags = [f"--train_steps={STEPS}", "--profile_steps=3:4"]
    (first, _), (second, _) = finish(start_two(text_cache, model_dir, *flags))
    held, model = (
        int(re.search(f"{start}.*: ([\\d,]+) parameters", first)[1].replace(",", ""))
        for start in ("of 2 processes", "model ")
    )
    assert held < 0.7 * model
    assert "mesh" not in second
    return model_dir


def test_two_processes_equal_one(text_cache, together, tmp_path):
    alone = tmp_path / "model"
    done(pretrain(text_cache, alone, f"--train_steps={STEPS}"))
    expected, found = losses(alone), losses(together)
    assert found.keys() == expected.keys()
    assert ("validation", STEPS) in found
    assert_near(found, expected)
    # Moments of large gradients are in the hundreds; how rounding spreads depends on the corpus.
    assert_close(state(alone, STEPS), state(together, STEPS), rtol=2e-3, atol=1e-3)


def test_the_profiles_of_two_processes_are_one_session(together):
    (session,) = (together / "profile/plugins/profile").iterdir()
    traces = sorted(path.name for path in session.glob("*.xplane.pb"))
    assert [name.rpartition("_")[0] for name in traces] == ["process_0", "process_1"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["--mesh.num_partitions=2"], ["--mesh.data=1", "--mesh.fsdp=4"]])
def test_several_devices_per_process(text_cache, together, tmp_path, mesh):
    norms = "--metrics.norms_every_steps=5"
    flags = [f"--train_steps={STEPS}", norms, *mesh]
    (first, _), _ = finish(start_two(text_cache, tmp_path / "model", *flags, devices=2))
    assert "4 cpu device(s) of 2 processes" in first
    expected, found = losses(together), losses(tmp_path / "model")
    norms = {place for place in found if place[0] == "norms"}
    assert norms == {("norms", step) for step in (*range(5, STEPS, 5), STEPS)}
    assert found.keys() - norms == expected.keys()
    assert_near(found, expected)


def assert_names_lost(process, victim):
    """Checks that the surviving process ends in time and names the lost one; returns its stderr."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < TIMEOUT + 5
    assert process.returncode == EXIT_LOST
    last = errors.splitlines()[-1]
    assert last.startswith("python -m trainer.pretrain: error: process ")
    assert f"process {victim}" in last
    assert "Traceback" not in errors
    return errors


def start_endless(cache, model_dir):
    """Returns two processes that have written their first checkpoint."""
    both = start_two(cache, model_dir, "--train_steps=1000000")
    while not (model_dir / f"checkpoint_{EVERY}").exists():
        assert both[0].poll() is both[1].poll() is None, both[0].communicate()
        time.sleep(0.05)
    return both


@pytest.mark.slow
def test_sigterm_to_one_stops_both_after_the_same_step(text_cache, tmp_path):
    both = start_endless(text_cache, tmp_path / "model")
    both[1].send_signal(signal.SIGTERM)
    lines = [line for _, errors in finish(both, EXIT_PREEMPTED) for line in errors.splitlines()]
    saved = [line for line in lines if line.startswith("SIGTERM: saved step")]
    assert len(saved) == 2
    assert len(set(saved)) == 1


@pytest.mark.slow
def test_after_one_is_killed_both_resume_to_the_same_bits(text_cache, together, tmp_path):
    model_dir = tmp_path / "model"
    endless = start_endless(text_cache, model_dir)
    endless[1].send_signal(signal.SIGKILL)
    errors = assert_names_lost(endless[0], victim=1)
    assert len([line for line in errors.splitlines() if "error" in line]) == 1
    endless[1].communicate()

    # Later checkpoints are removed, so that the shorter run below still has steps to make.
    for folder in model_dir.glob("checkpoint_*"):
        if int(folder.name.split("_")[1].split(".")[0]) > EVERY:
            shutil.rmtree(folder)
    finish(start_two(text_cache, model_dir, f"--train_steps={STEPS}"))
    assert losses(model_dir) == losses(together)
    assert_equal(state(model_dir, STEPS), state(together, STEPS))


# Each process adds numbers endlessly; `end` says which of them end with a UserError.
ADDING = """
import sys, time
import numpy as np
from tasks.terminal import command_line
from trainer.engine.processes import ProcessesConfig, joined

port, index, end = sys.argv[1:]
class Full(command_line.UserError):
    def __str__(self):  # the second process reports when the coordinator has ended
        time.sleep(int(index))
        return "its disk is full"
def main(argv):
    with joined(ProcessesConfig(f"localhost:{port}", 2, int(index), TIMEOUT)):
        import jax
        from trainer.config.mesh import MeshConfig
        from trainer.engine.sharding import make_mesh, put_batch
        mesh = make_mesh(MeshConfig())
        add = jax.jit(lambda x: x.sum())
        while True:
            add(put_batch({"x": np.ones(2)}, mesh)["x"]).block_until_ready()
            print("added", file=sys.stderr, flush=True)
            if end == "both" or end == "error" and index == "1":
                raise Full
            time.sleep(0.1)
command_line.run(main)
""".replace("TIMEOUT", str(TIMEOUT))


@pytest.mark.parametrize("end", slow_unless({"kill", "error"}, ["kill", "error", "both"]))
def test_the_coordinator_or_a_failing_process_ends_the_other(end):
    port = free_port()
    both = [start([sys.executable, "-c", ADDING, str(port), str(index), end]) for index in range(2)]
    if end == "kill":
        assert any(line == "added\n" for line in both[0].stderr)
        both[0].kill()
        assert_names_lost(both[1], victim=0)
        both[0].communicate()
    elif end == "both":
        assert all("error: its disk is full" in errors for _, errors in finish(both, 2))
    else:
        errors = assert_names_lost(both[0], victim=1)
        assert "ended: its disk is full" in errors
        assert "error: its disk is full" in finish(both[1:], 2)[0][1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["coordinator=here"], "HOST:PORT"),
        (["coordinator=here:1"], "count"),
        (["coordinator=here:1", "count=2", "index=2"], "from 0 to 1"),
        (["count=2"], "goes with a coordinator"),
        (["timeout_seconds=1"], "5 or more"),
    ],
)
def test_wrong_flags_are_rejected(flags, says):
    with pytest.raises(UserError, match=says):
        config_of(*(f"--processes.{flag}" for flag in flags))


def test_auto_on_a_single_machine_is_an_error(text_cache, tmp_path):
    made = completed(pretrain(text_cache, tmp_path / "model", "--processes.coordinator=auto"))
    assert_one_line(made.returncode, made.stderr, "leave it out on a single machine")


def test_hosts_with_folders_of_their_own_are_refused(text_cache, tmp_path):
    folders, port = [tmp_path / "one", tmp_path / "two"], free_port()
    shorter = "import trainer.engine.processes as p; p._SHARED_SECONDS = 2; "
    main = "from tasks.terminal import command_line; from trainer import pretrain; "
    code = f"{shorter}{main}command_line.run(pretrain.main)"
    processes = [
        start(
            [
                *(sys.executable, "-c", code, *pretrain(text_cache, folder)[3:]),
                *(f"--processes.coordinator=localhost:{port}", "--processes.count=2"),
                *(f"--processes.index={index}", f"--processes.timeout_seconds={TIMEOUT}"),
            ]
        )
        for index, folder in enumerate(folders)
    ]
    for _, errors in finish(processes, 2):
        assert_one_line(2, errors, "is not shared: the process on")
    assert not any(list(folder.glob("checkpoint*")) for folder in folders)
