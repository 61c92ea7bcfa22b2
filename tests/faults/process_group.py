"""Commands that run in a process group of their own, to be watched and killed."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any


class ProcessGroup:
    """A running command in a process group of its own, which writes its output to a log file.

    Signals reach the command and every process that it started.

    Args:
      command: the program and its arguments.
      log: file for stdout and stderr, overwritten.
      **options: further arguments of subprocess.Popen.
    """

    def __init__(self, command: Sequence[str], log: pathlib.Path, **options: Any):
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options
            )

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Returns what the command has printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Waits for the command to end and returns its exit code.

        Raises:
          subprocess.TimeoutExpired: the command ran for longer than `seconds`, and was killed.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for `condition`; returns False if the command ends first or `seconds` pass."""
        end = time.monotonic() + seconds
        while not condition():
            if self.exit_code is not None or time.monotonic() > end:
                return False
            time.sleep(0.0005)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group, if any process of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def left(self, seconds: float) -> bool:
        """Returns whether processes of the group are still there after so many seconds."""
        end = time.monotonic() + seconds
        while True:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.05)

    def kill(self) -> int:
        """Kills the whole group and returns the command's exit code."""
        self.signal(signal.SIGKILL)
        return self._process.wait()
