"""Commands that are started repeatedly, each time in a new process group, and ended by signals."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError

# The longest time that anything may take.
DEADLINE_SECONDS = 600
# The longest time from the end of a command to the end of all processes that it started.
_END_SECONDS = 60
# Before that, Python may not be running our program yet, and Ctrl-C prints Python's traceback.
_PYTHON_SECONDS = 1.5
# Signals that end a command, with their weights.
_SIGNAL_WEIGHTS = {signal.SIGKILL: 6, signal.SIGINT: 2, signal.SIGTERM: 2}


class Command:
    """A Python module that can be started repeatedly, each time in a new process group."""

    exit_codes: dict[signal.Signals, tuple[int, ...]] = {
        # Python's own code if Ctrl-C arrives while Python shuts down.
        signal.SIGINT: (EXIT_INTERRUPTED, -signal.SIGINT),
        signal.SIGTERM: (-signal.SIGTERM,),
    }
    end_seconds = _END_SECONDS
    tracebacks: tuple[str, ...] = ("Traceback (most recent call last)", "Exception ignored in")

    def __init__(self, name: str, module: Sequence[str], log: pathlib.Path):
        self.name, self.module, self.log = name, module, log
        self._process: subprocess.Popen | None = None

    def start(self, *more: str, **options) -> "Command":
        self._begin, self._ended_by_us = time.monotonic(), False
        with open(self.log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.module, *more],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last process; None while it runs, and before the first start."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self.exit_code is None

    @property
    def finished(self) -> bool:
        return self.exit_code == 0

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self._process else ""

    def tail(self, characters: int = 500) -> str:
        """Returns the end of the output as one line."""
        return " ".join(self.output().split())[-characters:]

    def activity(self) -> str:
        """Returns what the command is doing, in words."""
        if self.running:
            return self._doing()
        return "finished" if self.finished else "not running"

    def _doing(self) -> str:
        return "running"

    def wait_until(self, condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> bool:
        """Waits for `condition`; returns False if the command ends first or `seconds` pass."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.running or time.monotonic() > end:
                return False
            time.sleep(0.0005)
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group, if any process of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> bool:
        running, self._ended_by_us = self.running, True
        if self._process:
            self.signal_group(signal.SIGKILL)
            self._process.wait()
        return running

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            time.sleep(max(0, self._begin + _PYTHON_SECONDS - time.monotonic()))
        self._ended_by_us = True
        self.signal_group(number)

    def end(self, number: signal.Signals) -> None:
        """Ends the command by a signal; raises as `check_end` does."""
        self.send(number)
        self.check_end(number)

    def check_end(self, number: signal.Signals) -> None:
        """Waits for the command to end by a signal that was sent; raises as `expect_end` does."""
        if number == signal.SIGKILL:
            self.kill()
            self._check_output()
        else:
            self.expect_end(0, *self.exit_codes[number])

    def expect_end(self, *codes: int) -> None:
        """Waits for the command to end by itself, with one of `codes`."""
        if self.wait(self.end_seconds) not in codes:
            self._fail_by_code()
        end = time.monotonic() + _END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while os.killpg(self.pid, 0) is None:
                if time.monotonic() > end:
                    raise UserError(f"{self.name} has ended, and some of its processes have not")
                time.sleep(0.05)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for the command to end; returns its exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise UserError(f"{self.name} hung for {seconds} s and was killed") from error
        self._check_output()
        return code

    def finish(self) -> None:
        if self.wait():
            self._fail_by_code()

    def check_alive(self) -> None:
        """Raises UserError if the command has ended with an error, and not by a signal of ours."""
        if self.exit_code and not self._ended_by_us:
            self._fail_by_code()

    def _check_output(self) -> None:
        if any(text in self.output() for text in self.tracebacks):
            raise UserError(f"{self.name} printed a traceback: {self.output()[-2000:]}")

    def _fail_by_code(self) -> None:
        raise UserError(f"{self.name} ended with {self.exit_code}: {self.tail(1000)}")


def draw_signal(generator: random.Random) -> signal.Signals:
    return generator.choices([*_SIGNAL_WEIGHTS], [*_SIGNAL_WEIGHTS.values()])[0]


def stop_before_kill(number: signal.Signals, *commands: Command) -> None:
    """Stops commands that SIGKILL will end, so that they are killed in the recorded activity."""
    if number == signal.SIGKILL:
        for each in commands:
            each.signal_group(signal.SIGSTOP)
