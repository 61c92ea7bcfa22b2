"""Tests process groups: output, exit codes, waiting, and killing a command with its children."""

import signal
import subprocess
import time

import pytest

from tests.faults.process_group import ProcessGroup


def started(tmp_path, script):
    return ProcessGroup(["sh", "-c", script], tmp_path / "log")


def test_output_and_exit_code_are_returned(tmp_path):
    group = started(tmp_path, "echo out; echo err >&2; exit 3")
    assert group.wait(30) == 3
    assert group.exit_code == 3
    assert group.output() == "out\nerr\n"


def test_killing_a_group_kills_the_children_of_its_command(tmp_path):
    # The file grows for as long as the child lives.
    group = started(tmp_path, f"(while true; do echo >> {tmp_path}/child; sleep 0.01; done) & wait")
    child = tmp_path / "child"
    assert group.wait_until(child.exists, seconds=30)
    assert group.kill() == -signal.SIGKILL
    assert group.kill() == -signal.SIGKILL, "killing twice is harmless"
    size = child.stat().st_size
    time.sleep(0.1)
    assert child.stat().st_size == size


def test_a_command_that_takes_too_long_is_killed(tmp_path):
    group = started(tmp_path, "sleep 60")
    with pytest.raises(subprocess.TimeoutExpired):
        group.wait(0.05)
    assert group.exit_code == -signal.SIGKILL


def test_waiting_ends_with_the_condition_the_command_or_the_deadline(tmp_path):
    group = started(tmp_path, "echo ready; sleep 60")
    assert group.wait_until(lambda: group.output() == "ready\n", seconds=30)
    assert not group.wait_until(lambda: False, seconds=0.05)
    group.kill()
    begin = time.monotonic()
    assert not group.wait_until(lambda: False, seconds=60)
    assert time.monotonic() - begin < 30


def test_processes_that_are_left_are_noticed(tmp_path):
    group = started(tmp_path, "sleep 60 & exit 0")
    group.wait(30)
    assert group.left(0.1)
    group.kill()
    assert not group.left(30)
