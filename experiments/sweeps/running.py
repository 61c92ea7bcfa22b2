"""Runs the commands of a sweep, each in its own process, several at a time."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.sweeps import cells
from experiments.sweeps.cells import Cell
from tasks.storage import files
from tasks.terminal import child
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError

LOG = "log.txt"
PREPARED = "prepared.json"
_POLL_SECONDS = 0.1
# How long a stopped run may take to save its state before it is killed.
_PATIENCE_SECONDS = 120
_EXIT_PREEMPTED = 75
# Signals from outside; others, such as SIGSEGV, mean that the run failed.
_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """Raised on SIGTERM: the sweep ends after its runs have saved their states."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raises `Stopped` inside the block when SIGTERM arrives."""

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Process:
    """A command of this project in its own session; its output is appended to a log."""

    def __init__(self, command: Sequence[str], log: pathlib.Path, environment: Mapping[str, str]):
        self._log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                child.command(command[0], command[1:]),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )

    def code(self) -> int | None:
        return self.process.poll()

    def why(self, code: int) -> str:
        """Returns the cause of a failure: the log's last line, or the signal."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _end(processes: Sequence[_Process]) -> None:
    """Waits until the processes have saved their states; kills those that take too long."""
    for process in processes:
        process.send(signal.SIGTERM)
    for each in processes:
        try:
            each.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            each.send(signal.SIGKILL)
            each.process.wait()


def prepare(planned: Sequence[Cell], output: str, environment: Mapping[str, str]) -> None:
    """Runs the commands that the cells need beforehand, each once per folder."""
    path = files.join(output, PREPARED)
    done = files.read_json(path) if files.exists(path) else []
    for command in dict.fromkeys(each for cell in planned for each in cell.prepare):
        if list(command) in done:
            continue
        print(f"python -m {shlex.join(command)}", flush=True)
        log = pathlib.Path(output, "prepare.txt")
        process = _Process(command, log, environment)
        try:
            while (code := process.code()) is None:
                time.sleep(_POLL_SECONDS)
        except BaseException:
            _end([process])
            raise
        if code:
            raise UserError(f"python -m {command[0]} failed: {process.why(code)} (see {log})")
        done.append(list(command))
        files.write_json(path, done)


class _Running:
    def __init__(self, cell: Cell, key: str, folder: str, environment: Mapping[str, str]):
        self.cell, self.key, self.folder = cell, key, folder
        self._environment = environment
        self._commands = iter(cell.commands(folder))
        self.started = time.monotonic()
        files.make_folder(folder)
        self.process = self._begin(next(self._commands))

    def _begin(self, command: Sequence[str]) -> _Process:
        return _Process(command, pathlib.Path(self.folder, LOG), self._environment)

    def ended(self) -> tuple[str, str] | None:
        """Returns (status, why) of a cell that has ended; None while it runs."""
        code = self.process.code()
        if code is None:
            return None
        if code == 0:
            following = next(self._commands, None)
            if following is None:
                return cells.FINISHED, ""
            self.process = self._begin(following)
            return None
        # A run that was killed or preempted is not at fault: the next call resumes it.
        stopped = -code in _KILLS or code in (_EXIT_PREEMPTED, EXIT_INTERRUPTED)
        return (cells.INTERRUPTED if stopped else cells.FAILED), self.process.why(code)


def run(
    planned: Sequence[tuple[Cell, str, str]],
    workers: int,
    environment: Mapping[str, str],
    check: Callable[[Cell, str, str], object],
) -> None:
    """Runs cells, each with its key and folder; records outcomes; calls `check` on finished cells.

    Raises Stopped or KeyboardInterrupt after the runs have saved their states.
    """
    pending, running = list(reversed(planned)), list[_Running]()
    count = 0
    try:
        while pending or running:
            while pending and len(running) < workers:
                running.append(_Running(*pending.pop(), environment))
            time.sleep(_POLL_SECONDS)
            for each in list(running):
                if (ended := each.ended()) is None:
                    continue
                running.remove(each)
                count += 1
                status, why = ended
                cells.save_record(each.folder, each.cell, each.key, status, why)
                seconds = time.monotonic() - each.started
                note = f": {why} (see {each.folder}/{LOG})" if why else ""
                place = f"[{count}/{len(planned)}]"
                print(f"{place} {each.cell.label}: {status}, {seconds:.0f} s{note}", flush=True)
                if status == cells.FINISHED:
                    check(each.cell, each.key, each.folder)
    except BaseException:
        _end([each.process for each in running])
        raise
