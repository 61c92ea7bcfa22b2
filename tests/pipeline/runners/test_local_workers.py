"""Worker processes end with their build, builds with their workers, and both with Ctrl-C."""

import contextlib
import os
import signal
import threading
import time

import grpc
import pytest

from pipeline.runners import failures
from tests.support.parameters import slow_unless
from tests.support.processes import completed, wait_for

pytestmark = pytest.mark.processes

SECONDS = 30  # a bound for a loaded machine; Beam's own limits are minutes, or none


def processes(build) -> list[tuple[int, str]]:
    """Returns (id, command) of all processes of a build, which has a session of its own."""
    listed = completed(["ps", "-ww", "-e", "-o", "pid=,sid=,stat=,args="]).stdout.splitlines()
    rows = (line.split(maxsplit=3) for line in listed)
    return [
        (int(pid), command)
        for pid, session, state, command in rows
        if int(session) == build.pid and state[0] != "Z"
    ]


def workers(build) -> list[int]:
    return [
        pid for pid, command in processes(build) if "sdk_worker_main" in command.split("sh -c")[0]
    ]


def wait_for_workers(build, count: int) -> None:
    assert wait_for(lambda: len(workers(build)) >= count, build), build.communicate()


def wait_for_the_end(build) -> None:
    """Waits until no process of the build is left."""
    wait_for(lambda: not processes(build), seconds=SECONDS)


@pytest.fixture
def launch(start, tmp_path):
    """Returns `start`, whose processes are killed in the end."""
    started = []

    def run(*more):
        started.append(start(tmp_path, *more))
        return started[-1]

    yield run
    for build in started:
        for pid, _ in processes(build):
            os.kill(pid, signal.SIGKILL)
        build.wait()


def one_line(build) -> str:
    _, err = build.communicate(timeout=SECONDS)
    lines = [line for line in err.splitlines() if not line.startswith("building ")]
    assert len(lines) == 1, err
    return lines[0]


def test_a_worker_killed_before_it_connects(launch, tmp_path):
    """Beam would wait for ever for the other workers to end."""
    build = launch("--workers=2")
    wait_for_workers(build, 2)
    time.sleep(0.2)
    os.kill(workers(build)[0], signal.SIGKILL)
    assert "a worker process died by signal 9: if memory ran out" in one_line(build)
    assert build.returncode == 2
    assert not list(tmp_path.glob("*/*.receipt-*"))
    wait_for_the_end(build)


def test_workers_end_with_a_killed_build(launch):
    """Beam's workers would wait two minutes for a build that they have not reached."""
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
    if moment == "imports":
        time.sleep(0.5)
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
