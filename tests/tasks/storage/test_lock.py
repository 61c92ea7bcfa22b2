"""Locks on folders: a second writer is refused, and a killed one leaves nothing that blocks."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tasks.storage import lock
from tasks.terminal.command_line import UserError

HOLD = """
import sys, time
from tasks.storage import lock
lock._BEAT_SECONDS = 0.1
with lock.held(sys.argv[1], "run", "--model_dir"):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with process.stdout as said:
        assert said.readline() == "held\n"
    return process


def held(folder):
    return lock.held(str(folder), "run", "--model_dir")


def refused(folder, process):
    with pytest.raises(UserError, match=f"another run .*process {process.pid} on .*since") as error:
        held(folder).__enter__()
    assert "--model_dir" in str(error.value)


def test_a_second_process_is_refused_by_name(tmp_path):
    process = hold(tmp_path)
    refused(tmp_path, process)
    refused(tmp_path, process)
    process.kill()
    process.wait()
    # A killed holder leaves the file, but no lock.
    assert (tmp_path / lock.LOCK).exists()
    with held(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with held(tmp_path):
        assert "has no locks" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 1.0)


@pytest.mark.google
def test_a_bucket_is_locked_too(gcs, quick, capsys, monkeypatch):
    for name, value in gcs.environment().items():
        monkeypatch.setenv(name, value)
    process = hold("gs://bucket/model")
    refused("gs://bucket/model", process)
    # Stopped for a while it keeps the lock; killed on this machine it loses it at once.
    process.send_signal(signal.SIGKILL)
    process.wait()
    with held("gs://bucket/model") as mine:
        mine.check()
        assert gcs.names("model/") == ["model/.lock"]
    assert gcs.names("model/") == []
    assert capsys.readouterr().err.count("checking") == 1


@pytest.mark.google
def test_a_lock_of_another_machine_is_taken_over_when_it_stands_still(gcs, quick, monkeypatch):
    first = held("gs://bucket/model")
    mine = first.__enter__()
    mine._stop.set()  # as if its process or its network stood still
    mine._thread.join()
    mine.check()
    monkeypatch.setattr(lock, "_machine", lambda: "another")
    with held("gs://bucket/model") as other:
        first.__exit__(None, None, None)
        assert gcs.names("model/") == ["model/.lock"]
        other.check()
        with pytest.raises(UserError, match="has taken over"):
            mine.check()
    assert gcs.names("model/") == []


def test_an_observer_tells_whether_a_holder_is_alive(tmp_path, monkeypatch):
    observer = lock.Observer(str(tmp_path))
    assert observer.alive() is False
    process = hold(tmp_path)
    assert observer.alive() is True
    process.kill()
    # As long as its parent does not wait for it, the process keeps its number.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    os.kill(process.pid, 0)
    assert observer.alive() is False
    process.wait()
    assert observer.alive() is False
    # Another process may get its number.
    content = json.loads((tmp_path / lock.LOCK).read_text())
    for began, alive in ((lock._began(os.getpid()), True), (content["began"], False)):
        another = {**content, "pid": os.getpid(), "began": began}
        (tmp_path / lock.LOCK).write_text(json.dumps(another))
        assert observer.alive() is alive
    # It does not take the lock, and cannot tell of another machine.
    with held(tmp_path):
        assert observer.alive() is True
        monkeypatch.setattr(lock, "_machine", lambda: "another")
        assert observer.alive() is None


@pytest.mark.google
def test_an_observer_of_a_bucket_sees_a_lock_that_stands_still(gcs, quick, monkeypatch):
    observer = lock.Observer("gs://bucket/model")
    assert observer.alive() is False
    with held("gs://bucket/model") as mine:
        monkeypatch.setattr(lock, "_machine", lambda: "another")
        assert observer.alive() is True
        mine._stop.set()  # as if it had been killed
        mine._thread.join()
        assert observer.alive() is True
        monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.0)
        assert observer.alive() is False
    monkeypatch.setattr(lock, "_has_locks", lambda folder: False)
    assert observer.alive() is None


def test_a_folder_that_is_moved_or_replaced_is_noticed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with lock.held(str(folder), "run", "--model_dir") as held:
        held.check()
        folder.rename(tmp_path / "moved")
        with pytest.raises(
            UserError, match="run was moved or removed while this run wrote it: put"
        ):
            held.check()
        folder.mkdir()
        held.check()
        with (
            lock.held(str(folder), "run", "--model_dir"),
            pytest.raises(UserError, match="moved or removed"),
        ):
            held.check()


def test_parts_lock_out_their_doubles_and_whole_jobs(tmp_path):
    folder = str(tmp_path)
    of = folder, "build", "--cache_dir"
    with lock.held(*of, "1-of-2", shared=True), lock.held(*of, "2-of-2", shared=True):
        with pytest.raises(lock.Refused, match="part 1 of 2, process") as error:
            lock.held(*of, "1-of-2", shared=True).__enter__()
        assert error.value.part == "1-of-2"
        with pytest.raises(lock.Refused, match="part 1 of 2, process"):
            lock.claimed(*of).__enter__()
        assert sorted(lock.parts(folder)) == ["1-of-2", "2-of-2"]
        assert lock.living_part(folder, but="1-of-2")
        assert lock.Observer(folder).alive() is True
    assert os.listdir(tmp_path) == []
    process = subprocess.Popen(["true"])
    process.wait()
    ended = {**lock._holder("1-of-2"), "pid": process.pid}
    (tmp_path / ".lock-1-of-2").write_text(json.dumps(ended))
    assert lock.parts(folder) == {}
    with lock.claimed(*of):
        assert os.listdir(tmp_path) == [lock.LOCK]


def test_partial_files_of_writers_that_are_gone(tmp_path):
    (tmp_path / ".partial-0-before").touch()
    with lock.claimed(str(tmp_path), "build", "--cache_dir"):
        assert os.listdir(tmp_path) == [lock.LOCK]
        (tmp_path / ".partial-0-of-a-lost-worker").touch()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_may_have_living_parts(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    with lock.held(str(tmp_path), "build", "--cache_dir", "1-of-2", shared=True):
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        assert lock.living_part(str(tmp_path))
        assert (tmp_path / ".lock-1-of-2").exists()


@pytest.mark.google
def test_parts_in_a_bucket(gcs, quick, monkeypatch):
    folder = "gs://bucket/cache"
    of = folder, "build", "--cache_dir"
    with lock.held(*of, "1-of-2", shared=True) as mine:
        monkeypatch.setattr(lock, "_machine", lambda: "another")
        with pytest.raises(lock.Refused, match="part 1 of 2, process"):
            lock.claimed(*of).__enter__()
        with pytest.raises(lock.Refused, match="part 1 of 2, process"):
            lock.held(*of, "1-of-2", shared=True).__enter__()
        assert lock.Observer(folder).alive() is True
        mine._stop.set()  # as if it had been killed
        mine._thread.join()
        with lock.claimed(*of):
            assert gcs.names("cache/") == ["cache/.lock"]
