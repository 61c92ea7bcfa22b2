"""Trials and commands in processes forked from a warm one, and ended at drawn moments.

A fork begins in milliseconds, with all packages imported. Nothing of one reaches another.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tasks.terminal import child, command_line
from tasks.terminal.command_line import EXIT_INTERRUPTED

_DEADLINE_SECONDS = 300
_POLL_SECONDS = 0.002
# Audit events of a change to a folder, and of files opened in it. Source: Python's audit events.
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.listdir")


class Difference(Exception):
    """Something is not as the oracle, an undisturbed command or the pages say."""


class Kill(NamedTuple):
    """A signal at the `event`-th use of a folder, or after `seconds` if `event` is 0."""

    number: signal.Signals
    event: int
    seconds: float

    def __str__(self) -> str:
        when = f"event {self.event}" if self.event else f"{self.seconds:.3f} s"
        return f"{self.number.name} at {when}"


class Done(NamedTuple):
    """The end of a command: its exit code, output, seconds, and uses of the folder."""

    code: int
    output: str
    seconds: float
    events: int


class Command:
    """A command of the project that is forked again and again, in a group of its own.

    `prepare` is called in the fork, before the command.
    """

    def __init__(self, folder: pathlib.Path, log: pathlib.Path, prepare: Callable[[], object]):
        self._folder, self._log, self._prepare = folder, log, prepare

    def run(self, module: str, words: Sequence[str], kill: Kill | None = None) -> Done:
        """Runs a command to its end; raises a Difference for a traceback or a hang."""
        begin, counted = time.monotonic(), self._log.with_suffix(".events")
        counted.write_text("")
        pid = _forked(lambda: self._command(module, words, kill, counted), self._log)
        if kill and not kill.event:
            time.sleep(kill.seconds)
            _signal_group(pid, kill.number)
        code = _wait(pid, f"{module} {' '.join(words)}")
        seconds, output = time.monotonic() - begin, self._log.read_text(errors="replace")
        if "Traceback (most recent call last)" in output:
            raise Difference(f"a traceback of {module} {' '.join(words)}: {output[-3000:]}")
        events = int(counted.read_text() or 0)  # empty if the command was killed
        return Done(code, output, seconds, events)

    def succeed(self, module: str, words: Sequence[str]) -> Done:
        done = self.run(module, words)
        if done.code:
            raise Difference(f"{module} {' '.join(words)} ended with {done.code}: {done.output}")
        return done

    def call(self, work: Callable[[], str]) -> str:
        """Returns what `work` returns in a fork, which must not raise."""
        code = _wait(_forked(lambda: _printed(work), self._log), "a check")
        output = self._log.read_text(errors="replace")
        if code:
            raise Difference(output[-3000:])
        return output.strip()

    def disturb(
        self, module: str, words: Sequence[str], kills: Sequence[Kill], ends: Sequence[int]
    ) -> list[str]:
        """Ends a command by each kill, then lets it finish; returns what ended it, in words.

        `ends` are exit codes after Ctrl-C and SIGTERM, besides 0 of a command that was faster.
        """
        said = []
        for kill in kills:
            done = self.run(module, words, kill)
            wanted = (0, -kill.number, *ends) if kill.number != signal.SIGKILL else (0, -9)
            if done.code not in wanted:
                raise Difference(f"{kill} ended {module} with {done.code}: {done.output[-2000:]}")
            said.append(f"{kill}{' (finished before)' * (done.code == 0)}")
            if not done.code:
                return said
        self.succeed(module, words)
        return said

    def _command(
        self, module: str, words: Sequence[str], kill: Kill | None, counted: pathlib.Path
    ) -> int:
        events = _count_events(str(self._folder), kill if kill and kill.event else None)
        self._prepare()
        main = importlib.import_module(module).main
        try:
            command_line.run(main, words, f"python -m {module}")
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            counted.write_text(str(events()))


def _count_events(folder: str, kill: Kill | None) -> Callable[[], int]:
    """Ends this process at a use of a folder; returns what returns the number of uses."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in _EVENTS and str(arguments[0]).startswith(folder):
            count += 1
            if kill and count == kill.event:
                os.killpg(os.getpid(), kill.number)

    sys.addaudithook(hook)
    return lambda: count


def draw_kill(
    generator: random.Random, undisturbed: Done, numbers: Sequence[int], before: int = 0
) -> Kill:
    """Draws a moment of a command that has run undisturbed, and of which `before` were killed."""
    number = signal.Signals(generator.choice(numbers))
    if undisturbed.events and generator.random() < 0.75:
        return Kill(number, generator.randint(1, max(1, undisturbed.events >> before)), 0)
    return Kill(number, 0, generator.uniform(0, undisturbed.seconds / (1 + before)))


def run_trials(
    trial: Callable[[int], str],
    numbers: Sequence[int],
    folder: pathlib.Path,
    jobs: int,
    end: float,
) -> Iterator[tuple[int, bool, str]]:
    """Yields (number, whether all was as it must be, text) of trials, `jobs` at a time.

    None begins after the time `end`.
    """
    waiting, running = list(reversed(numbers)), dict[int, int]()
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        while waiting and len(running) < jobs:
            number = waiting.pop()
            work = functools.partial(_printed, functools.partial(trial, number))
            running[_forked(work, folder / f"trial-{number}.txt")] = number
        if not running:
            return
        pid, status = os.wait()
        number = running.pop(pid)
        log = folder / f"trial-{number}.txt"
        yield number, status == 0, log.read_text(errors="replace").strip()
        log.unlink()


def _printed(work: Callable[[], str]) -> int:
    try:
        print(work())
    except Difference as error:
        print(error)
        return 1
    return 0


def _forked(work: Callable[[], int], log: pathlib.Path) -> int:
    """Forks a process with a group and an output of its own, which ends with its parent.

    Returns its id.
    """
    log.write_bytes(b"")
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        return pid
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


def _wait(pid: int, name: str) -> int:
    end = time.monotonic() + _DEADLINE_SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            _signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Difference(f"{name} hung for {_DEADLINE_SECONDS} s and was killed")
        time.sleep(_POLL_SECONDS)
    return os.waitstatus_to_exitcode(ended[1])


def _signal_group(pid: int, number: int) -> None:
    """Signals a fork's group or, before it has one, the fork; neither if it has ended."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            return send(pid, number)
    return None
