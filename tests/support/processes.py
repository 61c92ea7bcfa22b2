"""Commands and programs in processes of their own."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
# Where the project is not installed, processes find it as this one does.
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def completed(command: Sequence[object], **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command from the root of the project, for 10 minutes at most."""
    how = {"cwd": ROOT, "timeout": 600} | how
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **how)


def started(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, as `started("-m", "pipeline.build", …)`."""
    return completed([sys.executable, *arguments], **how)


def launched(command: Sequence[object], **environment: str) -> subprocess.Popen[str]:
    """Starts a command from the root of the project, in a session of its own, with pipes."""
    return subprocess.Popen(
        [*map(str, command)], cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def workers_of(command: int) -> list[int]:
    """Returns the ids of a command's worker processes."""
    found = completed(["ps", "-ww", "-o", "pid=,args=", "--ppid", command]).stdout.splitlines()
    others = "ps -ww", "resource_tracker"  # Python tracks semaphores in a process of its own
    return [int(line.split()[0]) for line in found if not any(each in line for each in others)]


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 300
) -> bool:
    """Waits until the condition holds; returns False if the process ended before that."""
    end = time.monotonic() + seconds
    while not condition():
        if process and process.poll() is not None:
            return False
        assert time.monotonic() < end
        time.sleep(0.002)
    return True
