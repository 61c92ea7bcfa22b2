"""Commands that are started repeatedly, and ended by signals."""

import pathlib
import random
import signal
import subprocess
import time

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from tasks.terminal.process_group import ProcessGroup

# The longest time that anything may take.
DEADLINE_SECONDS = 600
# Signals that end a command, with their weights.
SIGNAL_WEIGHTS = {signal.SIGKILL: 6, signal.SIGINT: 2, signal.SIGTERM: 2}
# The longest time from the end of a command to the end of all processes that it started.
_END_SECONDS = 60
# Before that, Python may not be running our program yet, and Ctrl-C is a traceback of its own.
_PYTHON_SECONDS = 1.5


class Command:
    """A command that can be started repeatedly, in a process group of its own.

    Args:
      name: what it is, for messages.
      command: the program and its arguments.
      log: file for its output, which each start overwrites.

    Attributes:
      process: the process group of the last start.
      exit_codes: the expected exit codes after a signal, besides 0 of a command that had finished.
    """

    exit_codes: dict[signal.Signals, tuple[int, ...]] = {
        signal.SIGINT: (EXIT_INTERRUPTED,),
        signal.SIGTERM: (-signal.SIGTERM,),
    }

    def __init__(self, name: str, command: list[str], log: pathlib.Path):
        self._name, self.command, self.log = name, command, log
        self.process: ProcessGroup

    def start(self, *more: str, env: dict[str, str] | None = None) -> None:
        """Starts the command, with `more` flags."""
        self._begin, self._told = time.monotonic(), False
        self.process = ProcessGroup([*self.command, *more], self.log, env=env)

    def output(self) -> str:
        """Returns what the command has printed since its last start."""
        return self.process.output() if hasattr(self, "process") else ""

    @property
    def running(self) -> bool:
        """True from a start to the end of the process."""
        return hasattr(self, "process") and self.process.exit_code is None

    @property
    def finished(self) -> bool:
        """True if the last process has ended with success."""
        return hasattr(self, "process") and self.process.exit_code == 0

    def activity(self) -> str:
        """Returns what the command is doing, in words."""
        if self.running:
            return self._doing()
        return "finished" if self.finished else "not running"

    def _doing(self) -> str:
        return "running"

    def end(self, number: signal.Signals) -> None:
        """Ends the command by a signal; raises as `check_end` does."""
        self.send(number)
        self.check_end(number)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal that ends the command."""
        if number == signal.SIGINT:
            time.sleep(max(0, self._begin + _PYTHON_SECONDS - time.monotonic()))
        self._told = True
        self.process.signal(number)

    def check_end(self, number: signal.Signals) -> None:
        """Waits for the command to end by a signal that was sent.

        Raises:
          UserError: it printed a traceback, hung, ended with an exit code of its own, or left a
            process behind.
        """
        if number == signal.SIGKILL:
            self.process.kill()
        else:
            self._wait()
            if self.process.exit_code not in (0, *self.exit_codes[number]):
                self.check_exit_code()
            if self.process.left(_END_SECONDS):
                raise UserError(f"{self._name} has ended, and some of its processes have not")
        self.check_output()

    def check_alive(self) -> None:
        """Raises UserError if the command has ended with an error, and not by a signal of ours."""
        if hasattr(self, "process") and not self._told:
            self.check_exit_code()

    def check_output(self) -> None:
        """Raises UserError if the command has printed a traceback."""
        if "Traceback (most recent call last)" in self.process.output():
            output = self.process.output()
            raise UserError(f"{self._name} printed a traceback: {output[-2000:]}")

    def finish(self) -> None:
        """Waits for the command to end.

        Raises:
          UserError: it failed or hung; quotes the end of its output.
        """
        self._wait()
        self.check_exit_code()
        self.check_output()

    def _wait(self) -> None:
        try:
            self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{self._name} hung for {DEADLINE_SECONDS} s and was killed") from error

    def check_exit_code(self) -> None:
        """Raises UserError if the command ended with an error; quotes the end of its output."""
        if code := self.process.exit_code:
            raise UserError(f"{self._name} ended with {code}: {self.process.output()[-1000:]}")


def draw_signal(generator: random.Random) -> signal.Signals:
    """Returns a random signal that ends a command."""
    return generator.choices([*SIGNAL_WEIGHTS], [*SIGNAL_WEIGHTS.values()])[0]
