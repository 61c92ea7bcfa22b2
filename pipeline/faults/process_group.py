"""A command in a process group of its own, so that it can be killed with all that it started."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys


class ProcessGroup:
    """A Python module that runs in a process group of its own and prints to a log file.

    Args:
      module: what follows `python -m`: the module's name and its arguments.
      log: file for stdout and stderr; replaced if it exists.
      options: further arguments of subprocess.Popen.
    """

    def __init__(self, module: list[str], log: pathlib.Path, **options):
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until the process has exited."""
        return self._process.poll() is None

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits for the process to exit; returns its exit code.

        Raises:
          subprocess.TimeoutExpired: it is still running after `timeout_seconds`.
        """
        return self._process.wait(timeout_seconds)

    def kill(self) -> int:
        """Sends SIGKILL to every process of the group; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait()

    def log_tail(self, characters: int = 500) -> str:
        """Returns the end of the log as one line."""
        return " ".join(self._log.read_text(errors="replace").split())[-characters:]
