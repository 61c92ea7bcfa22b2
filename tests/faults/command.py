"""Commands that are started repeatedly, each time in a new process group, and ended by signals."""

import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from tests.faults.process_group import ProcessGroup

# The longest time that anything may take.
DEADLINE_SECONDS = 600
# The longest time from the end of a command to the end of all processes that it started.
_END_SECONDS = 60
# Before that, Python may not be running our program yet, and Ctrl-C prints Python's traceback.
_PYTHON_SECONDS = 1.5
# Signals that end a command, with their weights.
_SIGNAL_WEIGHTS = {signal.SIGKILL: 6, signal.SIGINT: 2, signal.SIGTERM: 2}


class Command:
    """A Python module that can be started repeatedly, each time in a new process group.

    Args:
      name: what it is, for messages.
      module: what follows `python -m`.
      log: file for its output; each start overwrites it.

    Attributes:
      process: the process group of the last start.
      exit_codes: the expected exit codes after a signal, besides 0 of a command that had finished.
      end_seconds: the longest time from a signal to the end of the command.
      tracebacks: texts that the output must not hold.
    """

    exit_codes: dict[signal.Signals, tuple[int, ...]] = {
        # Python's own code if Ctrl-C arrives while Python shuts down.
        signal.SIGINT: (EXIT_INTERRUPTED, -signal.SIGINT),
        signal.SIGTERM: (-signal.SIGTERM,),
    }
    end_seconds = _END_SECONDS
    tracebacks: tuple[str, ...] = ("Traceback (most recent call last)", "Exception ignored in")

    def __init__(self, name: str, module: Sequence[str], log: pathlib.Path):
        self.name, self.module, self.log = name, module, log
        self.process: ProcessGroup | None = None
        self._begin, self._ended_by_us = 0.0, False

    def start(self, *more: str, **options) -> "Command":
        """Starts the command with `more` flags; `options` go to subprocess.Popen."""
        self._begin, self._ended_by_us = time.monotonic(), False
        command = [sys.executable, "-m", *self.module, *more]
        self.process = ProcessGroup(command, self.log, **options)
        return self

    def output(self) -> str:
        """Returns what the command has printed since its last start."""
        return self.process.output() if self.process else ""

    def tail(self, characters: int = 500) -> str:
        """Returns the end of the output as one line."""
        return " ".join(self.output().split())[-characters:]

    @property
    def running(self) -> bool:
        """True from a start to the end of the process."""
        return self.process is not None and self.process.exit_code is None

    @property
    def finished(self) -> bool:
        """True if the last process has ended with success."""
        return self.process is not None and self.process.exit_code == 0

    def activity(self) -> str:
        """Returns what the command is doing, in words."""
        if self.running:
            return self._doing()
        return "finished" if self.finished else "not running"

    def _doing(self) -> str:
        return "running"

    def kill(self) -> bool:
        """Kills the whole group; returns False if the command had ended by itself."""
        running, self._ended_by_us = self.running, True
        self.process.kill()
        return running

    def send(self, number: signal.Signals) -> None:
        """Sends a signal that ends the command."""
        if number == signal.SIGINT:
            time.sleep(max(0, self._begin + _PYTHON_SECONDS - time.monotonic()))
        self._ended_by_us = True
        self.process.signal(number)

    def end(self, number: signal.Signals) -> None:
        """Ends the command by a signal; raises as `check_end` does."""
        self.send(number)
        self.check_end(number)

    def check_end(self, number: signal.Signals) -> None:
        """Waits for the command to end by a signal that was sent; raises as `expect_end` does."""
        if number == signal.SIGKILL:
            self.process.kill()
            self.check_output()
        else:
            self.expect_end(0, *self.exit_codes[number])

    def expect_end(self, *codes: int) -> None:
        """Waits for the command to end by itself, with one of `codes`.

        Raises:
          UserError: it hung, ended with another code, printed a traceback, or left a process
            behind.
        """
        if self.wait(self.end_seconds) not in codes:
            self._fail_by_code()
        if self.process.left(_END_SECONDS):
            raise UserError(f"{self.name} has ended, and some of its processes have not")

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for the command to end; returns its exit code.

        Raises:
          UserError: it hung, or printed a traceback.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{self.name} hung for {seconds} s and was killed") from error
        if code != -signal.SIGKILL:
            self.check_output()
        return code

    def finish(self) -> None:
        """Waits for the command to end with success; raises UserError if it does not."""
        if self.wait():
            self._fail_by_code()

    def check_alive(self) -> None:
        """Raises UserError if the command has ended with an error, and not by a signal of ours."""
        if self.process and self.process.exit_code and not self._ended_by_us:
            self._fail_by_code()

    def check_output(self) -> None:
        """Raises UserError if the command has printed a traceback."""
        if any(text in self.output() for text in self.tracebacks):
            raise UserError(f"{self.name} printed a traceback: {self.output()[-2000:]}")

    def _fail_by_code(self) -> None:
        raise UserError(f"{self.name} ended with {self.process.exit_code}: {self.tail(1000)}")


def draw_signal(generator: random.Random) -> signal.Signals:
    """Returns a random signal that ends a command."""
    return generator.choices([*_SIGNAL_WEIGHTS], [*_SIGNAL_WEIGHTS.values()])[0]


def stop_before_kill(number: signal.Signals, *commands: Command) -> None:
    """Stops commands that SIGKILL will end, so that they are killed in the recorded activity."""
    if number == signal.SIGKILL:
        for each in commands:
            each.process.signal(signal.SIGSTOP)
