"""Commands of the project that are started again and again, ended by signals, and waited for.

A command runs in a new process group: in a fresh process of Python, or in a fork of this one, which
begins in milliseconds with all packages imported. Nothing of one fork reaches another.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tasks.terminal import child, command_line
from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR

# The longest time that anything may take.
DEADLINE_SECONDS = 600
# The longest time from the end of a command to the end of all processes that it started.
_END_SECONDS = 60
# Before that, Python may not be running our program yet, and Ctrl-C prints Python's traceback.
_PYTHON_SECONDS = 1.5
_POLL_SECONDS = 0.002
# Signals that end a command, with their weights.
_SIGNAL_WEIGHTS = {signal.SIGKILL: 6, signal.SIGINT: 2, signal.SIGTERM: 2}
# Exit code after SIGTERM, as in `trainer.engine.stopping`, which imports JAX.
EXIT_PREEMPTED = 75
# Audit events of a change to a folder, and of files opened in it. Source: Python's audit events.
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.listdir")


class Difference(Exception):
    """Something is not as the oracle, an undisturbed command or the pages say."""


class Kill(NamedTuple):
    """A signal at the `event`-th use of a folder by a fork, or, if that is 0, after `seconds`.

    If it is `late`, they count from when the command does its work.
    """

    number: signal.Signals
    event: int = 0
    seconds: float = 0
    late: bool = False

    def __str__(self) -> str:
        when = f"event {self.event}" if self.event else f"{self.seconds:.3f} s"
        return f"{self.number.name} at {when}"


class Done(NamedTuple):
    """The end of a command: its exit code, output, seconds, and uses of the folder."""

    code: int
    output: str
    seconds: float
    events: int


class Fork:
    """A fork of this process with a group and an output of its own, which ends with its parent."""

    def __init__(self, work: Callable[[], int], log: pathlib.Path):
        log.write_bytes(b"")
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        ends = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
            return
        code = 1
        try:
            os.setsid()
            child.end_at_once_with(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            file = os.open(log, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(file, descriptor)
            of_text = functools.partial(open, mode="w", buffering=1, errors="backslashreplace")
            sys.stdout, sys.stderr = of_text(1, closefd=False), of_text(2, closefd=False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
            code = work()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Command:
    """A module of the project and its arguments.

    A `fresh` one runs in a process of its own, another in a fork, which counts uses of the folder
    `watched`. `prepare` is called in either process, before the command.
    """

    # What a command that was asked to end may end with; 0 if it was faster. -SIGINT is Python's
    # own code if Ctrl-C arrives while it shuts down.
    exit_codes: dict[signal.Signals, tuple[int, ...]] = {
        signal.SIGINT: (0, EXIT_INTERRUPTED, -signal.SIGINT),
        signal.SIGTERM: (0, -signal.SIGTERM),
    }
    end_seconds = _END_SECONDS
    tracebacks: tuple[str, ...] = ("Traceback (most recent call last)", "Exception ignored in")

    def __init__(
        self,
        words: Sequence[object],
        log: pathlib.Path,
        *,
        fresh: bool = True,
        watched: pathlib.Path | None = None,
        prepare: Callable[[], object] = lambda: None,
        name: str = "",
    ):
        self.words, self.log, self.name = [*map(str, words)], log, name or str(words[0])
        self._fresh, self._watched, self._prepare = fresh, watched, prepare
        self._process: subprocess.Popen | Fork | None = None
        self._ended_by_us = False

    def start(self, *more: str, kill: Kill | None = None, **options) -> "Command":
        """Starts it with more arguments; a fork ends by itself at the event of `kill`."""
        words, self._begin, self._ended_by_us = [*self.words, *more], time.monotonic(), False
        if not self._fresh:
            self._counted.write_text("")
            self._process = Fork(lambda: self._work(words, kill), self.log)
            return self
        here, prepare = os.getpid(), self._prepare

        def before() -> None:
            child.end_at_once_with(here)
            prepare()

        with open(self.log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before,
                **options,
            )
        return self

    @property
    def _counted(self) -> pathlib.Path:
        return self.log.with_suffix(".events")

    def _work(self, words: Sequence[str], kill: Kill | None) -> int:
        events = _count_events(str(self._watched), kill if kill and kill.event else None)
        self._prepare()
        main = importlib.import_module(words[0]).main
        try:
            command_line.run(main, words[1:], f"python -m {words[0]}")
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            self._counted.write_text(str(events()))

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

    def activity(self) -> str:
        """Returns what the command is doing, in words."""
        if self.running:
            return self._doing()
        return "finished" if self.finished else "not running"

    def _doing(self) -> str:
        return "running"

    def is_working(self) -> bool:
        """Returns whether it has begun what it is for, after imports."""
        return True

    def wait_until(self, condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> bool:
        """Waits for `condition`; returns False if the command ends first or `seconds` pass."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.running or time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS / 4)
        return True

    def signal_group(self, number: int) -> bool:
        """Signals the group, or a fork that has none yet; returns False if all have ended."""
        for send in (os.killpg, os.kill) if self.running else (os.killpg,):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._fresh:
            time.sleep(max(0, self._begin + _PYTHON_SECONDS - time.monotonic()))
        self._ended_by_us = True
        self.signal_group(number)

    def kill(self) -> bool:
        """Kills what runs, if anything; returns whether the command itself did."""
        running = self.running
        if self._process:
            self.send(signal.SIGKILL)
            while self.running:
                time.sleep(_POLL_SECONDS)
        return running

    def end(self, number: signal.Signals) -> Done:
        """Ends the command by a signal; raises as `check_end` does."""
        self.send(number)
        return self.check_end(number)

    def check_end(self, number: signal.Signals) -> Done:
        """Waits for a command that was signalled; all that it started must end as it must."""
        if number == signal.SIGKILL:
            self.kill()
            self._check_output()
            self._check_code(0, -signal.SIGKILL)
            return self._done()
        done = self.wait(self.end_seconds)
        self._check_code(*self.exit_codes[number], -number * (not self._fresh))
        self.check_group()
        return done

    def check_group(self) -> None:
        """Waits for all that an ended command started."""
        end = time.monotonic() + _END_SECONDS
        while self.signal_group(0):
            if time.monotonic() > end:
                raise Difference(f"{self.name} has ended, and some of its processes have not")
            time.sleep(_POLL_SECONDS)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> Done:
        """Waits for the command to end, with any exit code, but no traceback."""
        end = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > end:
                self.kill()
                raise Difference(f"{self.name} hung for {seconds} s and was killed")
            time.sleep(_POLL_SECONDS)
        self._check_output()
        return self._done()

    def _done(self) -> Done:
        counted = self._counted.read_text() if not self._fresh else ""  # empty if it was killed
        seconds = time.monotonic() - self._begin
        return Done(self.exit_code, self.output(), seconds, int(counted or 0))

    def run(self, *more: str, kill: Kill | None = None) -> Done:
        """Runs the command to its end, of itself or by `kill`."""
        self.start(*more, kill=kill)
        if kill is None:
            return self.wait()
        if not kill.event:
            if kill.late:
                self.wait_until(self.is_working)
            begin = time.monotonic() if kill.late else self._begin
            self.wait_until(lambda: time.monotonic() > begin + kill.seconds)
            return self.end(kill.number)
        self.wait()
        return self.check_end(kill.number)

    def finish(self) -> Done:
        """Waits for the command, which must succeed."""
        done = self.wait()
        self._check_code(0)
        return done

    def succeed(self, *more: str) -> Done:
        return self.start(*more).finish()

    def refuse(self, *expected: str) -> None:
        """Runs what must be refused by one line that has a text of these."""
        self.start()
        self.expect_refusal(*expected)

    def expect_refusal(self, *expected: str) -> None:
        last = next(reversed(self.wait().output.splitlines()), "")
        if self.exit_code != EXIT_USER_ERROR or not any(text in last for text in expected):
            raise Difference(f"{self.name} is not refused by {expected}: {self.said()}")

    def disturb(self, kills: Sequence[Kill]) -> Counter[str]:
        """Ends the command by each kill, then lets it finish; counts what ended it, in words."""
        said = Counter[str]()
        for kill in kills:
            if not self.run(kill=kill).code:
                return said + Counter([f"{kill} (finished before)"])
            said[str(kill)] += 1
        self.succeed()
        return said

    def check_alive(self) -> None:
        """Raises a Difference if the command has ended with an error, not by a signal of ours."""
        if not self._ended_by_us and self.exit_code:
            self._check_code(0)

    def _check_output(self) -> None:
        if any(text in self.output() for text in self.tracebacks):
            raise Difference(f"{self.name} printed a traceback: {self.output()[-3000:]}")

    def _check_code(self, *codes: int) -> None:
        if self.exit_code not in codes:
            raise Difference(f"{self.name} {self.said()}")

    def said(self) -> str:
        said = " ".join(self.output().split())[-1500:]
        return f"ended with {self.exit_code}: {said}; {' '.join(self.words)}"


def draw_signal(generator: random.Random) -> signal.Signals:
    return generator.choices([*_SIGNAL_WEIGHTS], [*_SIGNAL_WEIGHTS.values()])[0]


def draw_kills(generator: random.Random, undisturbed: Done, count: int) -> list[Kill]:
    """Draws moments of a command that has run undisturbed; each finds less to do."""
    kills = []
    for before in range(count):
        number = draw_signal(generator)
        if undisturbed.events and generator.random() < 0.75:
            kills.append(Kill(number, generator.randint(1, max(1, undisturbed.events >> before))))
        else:
            # A fresh process imports for most of its time.
            late = not undisturbed.events and generator.random() < 0.9
            most = undisturbed.seconds / (4 if late else 1 + before)
            kills.append(Kill(number, 0, generator.uniform(0, most), late))
    return kills


def stop_before_kill(number: signal.Signals, *commands: Command) -> None:
    """Stops commands that SIGKILL will end, so that they are killed in the recorded activity."""
    if number == signal.SIGKILL:
        for each in commands:
            each.signal_group(signal.SIGSTOP)


def _count_events(folder: str, kill: Kill | None) -> Callable[[], int]:
    """Ends this process and its group at a use of a folder; returns what counts the uses."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in _EVENTS and str(arguments[0]).startswith(folder):
            count += 1
            if kill and count == kill.event:
                os.killpg(os.getpgrp(), kill.number)  # a worker has another pid

    sys.addaudithook(hook)
    return lambda: count


def in_fork(work: Callable[[], str], log: pathlib.Path) -> str:
    """Returns what `work` returns in a fork, whose Difference is raised here."""
    fork, end = Fork(lambda: printed(work), log), time.monotonic() + DEADLINE_SECONDS
    while fork.poll() is None:
        if time.monotonic() > end:
            os.killpg(fork.pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    output = log.read_text(errors="replace").strip()
    if fork.returncode:
        raise Difference(output[-3000:])
    return output


def printed(work: Callable[[], str]) -> int:
    try:
        print(work())
    except Difference as error:
        print(error)
        return 1
    return 0


def in_forks(
    work: Callable[[int], str], numbers: Iterator[int], folder: pathlib.Path, jobs: int
) -> Iterator[tuple[int, bool, str]]:
    """Yields (number, whether all was as it must be, text) of trials, `jobs` at a time."""
    running = dict[int, tuple[Fork, pathlib.Path]]()
    while True:
        while len(running) < jobs and (number := next(numbers, None)) is not None:
            log = folder / f"trial-{number}.txt"
            trial = functools.partial(printed, functools.partial(work, number))
            running[number] = Fork(trial, log), log
        if not running:
            return
        for number, (fork, log) in list(running.items()):
            if fork.poll() is not None:
                yield number, fork.returncode == 0, log.read_text(errors="replace").strip()
                log.unlink()
                del running[number]
        time.sleep(_POLL_SECONDS)
