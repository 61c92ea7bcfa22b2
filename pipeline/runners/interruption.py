"""Makes Ctrl-C end a command within seconds, at any moment of a Beam job."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError

# Maximum time from SIGINT to process end: libraries may swallow the exception or wait for a thread
# that never ends.
_LIMIT_SECONDS = 10.0
# The same for a service's jobs, which the service must be asked to cancel.
SERVICE_LIMIT_SECONDS = 60.0


class Interruptible:
    """State of an interruptible block."""

    def __init__(self) -> None:
        self.happened = False
        # Called in the signal handler; each ends something that the block may wait for.
        self.stops: list[Callable[[], None]] = []
        self.seconds = _LIMIT_SECONDS
        self.usual: Any = None  # the handler outside the block
        self._arrived, self._over = threading.Event(), threading.Event()

    def handle(self, *arguments: Any) -> None:
        if self.happened:
            return  # another exception would break the clean-up
        self.happened = True
        for stop in self.stops:
            stop()
        self._arrived.set()
        if callable(self.usual):  # it counts interrupts, see `command_line.run`
            self.usual(*arguments)
        raise KeyboardInterrupt

    def watch(self, stderr: int) -> None:
        """Ends the process if it outlives a SIGINT, with a line to `stderr`; run in a thread."""
        self._arrived.wait()
        if not self._over.wait(self.seconds):
            os.write(stderr, b"interrupted; run the same command to resume\n")
            os._exit(EXIT_INTERRUPTED)
        os.close(stderr)

    def end(self) -> None:
        self._over.set()
        self._arrived.set()


_active: Interruptible | None = None


@contextlib.contextmanager
def interruptible() -> Iterator[Interruptible]:
    """Makes SIGINT end the block within seconds; later ones, and nested blocks, have no effect.

    Works in the main thread, also of processes started with `&`, for which shells ignore SIGINT.
    Raises KeyboardInterrupt if SIGINT has arrived, even if a library swallowed it or the block
    raised another error because of it, as interrupted imports do. A UserError is raised as it is.
    """
    global _active
    if _active or threading.current_thread() is not threading.main_thread():
        yield _active or Interruptible()
        return
    active = _active = Interruptible()
    # Keep the current standard error: it may be redirected by the time the process must end.
    threading.Thread(target=active.watch, args=(os.dup(2),), daemon=True).start()
    active.usual = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, active.handle)
    try:
        yield active
        if active.happened:
            raise KeyboardInterrupt
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException:
        if active.happened:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, active.usual)
        _active = None
        active.end()


def interrupt() -> None:
    """Interrupts the block from another thread, like Ctrl-C; wakes a waiting main thread."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)
