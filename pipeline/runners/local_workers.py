"""Work on this machine: in this process, or in worker processes that end with it.

Workers are forks of this process and share what it has imported and loaded, so two of them need
hardly more processor time than one. Where a fork might hang, as a library has threads of its own,
workers are new processes.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from tasks.storage import lock
from tasks.terminal import child
from tasks.terminal.command_line import UserError
from tasks.terminal.interrupt import shielded

# Libraries with threads: clients of stores and of devices, and the kernel of a notebook.
_THREADED = frozenset(
    ("aiohttp", "grpc", "httpx", "ipykernel", "jax", "requests", "tensorflow", "torch")
)

_Work = Callable[[Any], Mapping[str, int]]
# A worker's answer to an element: counts, or an error to raise.
_Answer = Mapping[str, int] | Exception


@dataclasses.dataclass(frozen=True)
class Local:
    """Processes of this machine, as an engine (`engines.Engine`)."""

    workers: int = 1
    is_local = True
    bill = None

    def check(self, corpus: Any, folder: str) -> None:
        pass

    def run(self, work: _Work, pieces: Sequence[Any], folder: str) -> Counter[str]:
        return run(work, pieces, folder, self.workers)


def run(function: _Work, elements: Sequence[Any], folder: str, workers: int) -> Counter[str]:
    """Calls `function` on elements; sums its counts. Elements are begun in order.

    Errors that name no file are given the name `folder`. Raises a UserError if a worker died.
    """
    work = functools.partial(_call, function, folder)
    counts, left = Counter[str](), iter(elements)
    if min(workers, len(elements)) <= 1:
        for element in left:
            counts.update(work(element))
        return counts
    running: dict[Connection, int] = {}  # process ids
    try:
        for element in itertools.islice(left, workers):
            _send(_started(work, running), element)
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                counts.update(_received(connection, running))
                for element in itertools.islice(left, 1):
                    _send(connection, element)
                    break
                else:
                    _send(connection, None)
                    os.waitpid(running.pop(connection), 0)
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return counts


def _call(function: _Work, folder: str, element: Any) -> Mapping[str, int]:
    try:
        return function(element)
    except OSError as error:
        if error.errno is not None and not error.filename:
            raise OSError(error.errno, error.strerror, folder) from error
        raise


def _send(connection: Connection, element: Any) -> None:
    with contextlib.suppress(ConnectionError):  # it died: see `_received`
        connection.send(element)


def _received(connection: Connection, running: dict[Connection, int]) -> Mapping[str, int]:
    try:
        answer: _Answer = connection.recv()
    except (EOFError, ConnectionError) as error:
        code = os.waitstatus_to_exitcode(os.waitpid(running.pop(connection), 0)[1])
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise UserError(
            f"a worker process died {how}: if memory ran out, use fewer --workers; finished work "
            "is kept; run the same command to resume"
        ) from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def _started(work: _Work, running: dict[Connection, int]) -> Connection:
    """Starts a worker, whose process id is added to `running`."""
    ours, theirs = Pipe()
    parent = os.getpid()
    alone = threading.current_thread() is threading.main_thread()
    forks = sys.platform == "linux" and alone and not _THREADED.intersection(sys.modules)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with shielded():
        if not forks:
            os.set_inheritable(theirs.fileno(), True)
            words = [str(parent), str(theirs.fileno())]
            command = child.command(f"{__name__}:main", words)
            running[ours] = os.posix_spawn(sys.executable, command, os.environ)
        elif process := os.fork():
            running[ours] = process
        else:
            lock.leave_to_parent()
            _serve_and_end(theirs, work, parent)
    theirs.close()
    if not forks:
        _send(ours, work)
    return ours


def _serve_and_end(connection: Connection, work: _Work, parent: int) -> NoReturn:
    code = 1
    try:
        child.end_at_once_with(parent)
        _serve(connection, work)
        code = 0
    finally:
        os._exit(code)  # this process's files and exit handlers are its parent's


def _serve(connection: Connection, work: _Work) -> None:
    """Answers elements until there is None."""
    while (element := connection.recv()) is not None:
        answer: _Answer
        try:
            answer = work(element)
        except (UserError, OSError) as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        connection.send(answer)


def main() -> None:
    """Works in a new process, whose arguments are its parent's id and a file descriptor."""
    parent, descriptor = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    _serve_and_end(connection, connection.recv(), parent)
