"""Worker processes end with their build, builds with their workers, and both with Ctrl-C."""

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest

from pipeline.runners import failures, local_workers
from tasks.storage import lock
from tasks.terminal.command_line import UserError
from tests.support.parameters import slow_unless
from tests.support.processes import completed, wait_for, workers_of

pytestmark = pytest.mark.processes

SECONDS = 30  # a bound for a loaded machine


def processes(build) -> list[tuple[int, str]]:
    """Returns (id, command) of all processes of a build, which has a session of its own."""
    listed = completed(["ps", "-ww", "-e", "-o", "pid=,sid=,stat=,args="]).stdout.splitlines()
    rows = (line.split(maxsplit=3) for line in listed)
    return [
        (int(pid), command)
        for pid, session, state, command in rows
        if int(session) == build.pid and state[0] != "Z"
    ]


def wait_for_workers(build, count: int) -> None:
    assert wait_for(lambda: len(workers_of(build.pid)) >= count, build), build.communicate()


def wait_for_the_end(build) -> None:
    """Waits until no process of the build is left."""
    wait_for(lambda: not processes(build), seconds=SECONDS)


@pytest.fixture
def launch(start, tmp_path):
    """Returns `start`, whose processes are killed in the end."""
    started = []

    def run(*more, **how):
        started.append(start(tmp_path, *more, **how))
        return started[-1]

    yield run
    for build in started:
        for pid, _ in processes(build):
            os.kill(pid, signal.SIGKILL)
        build.communicate()  # closes its pipes


def one_line(build) -> str:
    _, err = build.communicate(timeout=SECONDS)
    lines = [line for line in err.splitlines() if not line.startswith("building ")]
    assert len(lines) == 1, err
    return lines[0]


def test_a_killed_worker_ends_the_others(launch, tmp_path):
    build = launch("--workers=2", sigint=signal.SIG_IGN)  # as of a command with `&`
    wait_for_workers(build, 2)
    os.kill(workers_of(build.pid)[0], signal.SIGKILL)
    assert "a worker process died by signal 9: if memory ran out" in one_line(build)
    assert build.returncode == 2
    assert not list(tmp_path.glob("*/*.receipt-*"))
    wait_for_the_end(build)


def test_workers_end_with_a_killed_build(launch):
    build = launch("--workers=2")
    wait_for_workers(build, 2)
    build.kill()
    began = time.monotonic()
    wait_for_the_end(build)
    assert time.monotonic() - began < 10


MOMENTS = ["imports", "workers start", "rows are written"]


@pytest.mark.parametrize("moment", slow_unless({"imports", "rows are written"}, MOMENTS))
def test_interrupted_twice(launch, tmp_path, moment):
    build = launch("--workers=2")
    if moment == "imports":  # those after the command handles SIGINT
        assert wait_for(lambda: "/pyarrow/" in Path(f"/proc/{build.pid}/maps").read_text(), build)
    elif moment == "workers start":
        wait_for_workers(build, 1)
    else:
        assert wait_for(lambda: any(tmp_path.glob("*/.partial-*.tfrecord-*")), build)
    for _ in range(2):
        os.killpg(build.pid, signal.SIGINT)  # as a terminal does
        time.sleep(0.1)
    line = one_line(build)
    assert line == "python -m pipeline.build: interrupted; run the same command to resume"
    # The second one may arrive when Python shuts down; shells call that 130 as well.
    assert build.returncode in (130, -signal.SIGINT)
    wait_for_the_end(build)


@pytest.fixture(params=["forks", "new processes"])
def kind(request, monkeypatch) -> str:
    """The kind of workers."""
    imported = {"forks": (), "new processes": {"os"}}[request.param]
    monkeypatch.setattr(local_workers, "_THREADED", frozenset(imported))
    return request.param


def counted(element: int) -> dict[str, int]:
    return {"sum": element, f"by {os.getpid()}": 1}


def test_counts_are_summed(tmp_path, kind):
    counts = local_workers.run(counted, range(1, 51), str(tmp_path), 3)
    assert counts.pop("sum") == 1275
    assert sum(counts.values()) == 50
    assert f"by {os.getpid()}" not in counts
    assert not workers_of(os.getpid())


def test_no_thread_but_the_main_one_forks(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "_THREADED", frozenset())
    monkeypatch.setattr(os, "fork", None)
    found = []

    def run():
        found.append(local_workers.run(counted, range(1, 51), str(tmp_path), 2)["sum"])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1275]


def locked(path: str) -> dict[str, int]:
    descriptors = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return {"open": sum(os.path.realpath(each) == path for each in descriptors)}


def test_a_worker_does_not_keep_its_parents_lock(tmp_path, monkeypatch):
    """A killed command must not lock its folder until its workers have gone, too."""
    monkeypatch.setattr(local_workers, "_THREADED", frozenset())  # they are forked
    with lock.held(str(tmp_path), "build", "--cache_dir"):
        path = str(tmp_path / lock.LOCK)
        assert locked(path) == {"open": 1}
        assert not local_workers.run(locked, [path] * 4, str(tmp_path), 2)["open"]
    assert not (tmp_path / lock.LOCK).exists()


def fails(error: BaseException) -> dict[str, int]:
    if isinstance(error, BaseException):
        raise error
    return {}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (UserError("the corpus has changed"), UserError, "the corpus has changed"),
        (FULL, OSError, r"No space left on device: '/cache'"),
        (ZeroDivisionError("a bug"), RuntimeError, r"(?s)in fails.*ZeroDivisionError: a bug"),
        (SystemExit(3), UserError, "a worker process died with exit code 1"),
    ],
)
def test_errors_of_workers(error, kind, says):
    with pytest.raises(kind, match=says):
        local_workers.run(fails, [0, 0, error, 0], "/cache", 2)
    assert not workers_of(os.getpid())


def test_a_connection_that_breaks_after_the_job(monkeypatch, capsys):
    def fails(over, error):
        over.wait(60)
        raise error

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    for error, end, shown in (
        (grpc.RpcError(), None, False),
        (ValueError("a bug"), None, True),
        (ValueError("a consequence"), KeyboardInterrupt, False),
    ):
        over = threading.Event()
        with contextlib.suppress(KeyboardInterrupt), failures.quiet():
            thread = threading.Thread(target=fails, args=(over, error))
            thread.start()
            if end:
                raise end
        over.set()
        thread.join()
        assert ("Traceback" in capsys.readouterr().err) == shown
