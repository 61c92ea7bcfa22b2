"""Signals: the end of commands whose work can be resumed or redone, and children that hear none."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

EXIT_INTERRUPTED = 130

_actions: list[Callable[[], None]] = []


@contextlib.contextmanager
def on_end(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` if a signal ends the process within the block; see `end_at_once`."""
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def end_at_once(
    program: str, advice: str = "run the same command to resume", terminated: bool = False
) -> None:
    """Makes Ctrl-C print one line and end this process, unless the process ignores interrupts.

    KeyboardInterrupt could be raised in library callbacks, which print it and continue, and
    Orbax's threads would outlive it. With `terminated`, SIGTERM does the same.
    """

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not stop the actions
        for action in _actions:
            with contextlib.suppress(Exception):
                action()
        for stream in (sys.stdout, sys.stderr):
            # A stream may be in the middle of a write, which is not reentrant.
            with contextlib.suppress(Exception):
                stream.flush()
        word = "interrupted" if number == signal.SIGINT else "terminated"
        os.write(2, f"\n{program}: {word}; {advice}\n".encode())
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    if terminated:
        signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Starts child processes that Ctrl-C, which reaches them too, does not end: the parent does.

    In the main thread, an interrupt waits for the end of the block: it would leave a pool of
    processes half started.
    """
    from multiprocessing import resource_tracker

    # `multiprocessing` starts this process with its first child, and then unblocks SIGINT.
    resource_tracker.ensure_running()
    arrived: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)
    # Another thread may receive the signal, but the main thread handles it.
    main = threading.current_thread() is threading.main_thread() and callable(handler)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        if main:
            signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(handler) and arrived:
            handler(*arrived[0])
