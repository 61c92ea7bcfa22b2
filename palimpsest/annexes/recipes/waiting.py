"""Waits for the commands that are run as processes of their own."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

_POLL_SECONDS = 0.1


def waited(*processes: subprocess.Popen[Any]) -> int:
    """Waits for all processes; returns the exit code of the first that fails, or 0.

    When one fails, the others get SIGTERM. Ctrl-C reaches all of them by itself, and SIGTERM is
    passed on, unless this is called in a thread other than the main one, which gets no signals;
    this process waits for their end. If a signal arrives and all processes still return 0, the code
    is 128 plus the signal's number, so that the caller does not go on.
    """
    code, running = 0, list(processes)
    with _passed_on(running) as got:
        while running:
            for process in [each for each in running if each.poll() is not None]:
                running.remove(process)
                if process.returncode and not code:
                    # A shell's code for a process that a signal ended.
                    code = (
                        process.returncode if process.returncode > 0 else 128 - process.returncode
                    )
                    for other in running:
                        other.terminate()
            time.sleep(_POLL_SECONDS if running else 0)
    return code or (128 + got[0] if got else 0)


@contextlib.contextmanager
def _passed_on(running: list[subprocess.Popen[Any]]) -> Iterator[list[int]]:
    """Yields a list that grows by each signal that arrives; passes SIGTERM on."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got
        return

    def handle(number: int, _: object) -> None:
        got.append(number)
        if number == signal.SIGTERM:
            for process in running:
                process.terminate()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
