"""Makes Ctrl-C end a command within seconds, at any moment of a Beam job."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError

# Maximum time from SIGINT to process end: a library may wait for a thread that never ends.
_LIMIT_SECONDS = 10.0
# The same for a service's jobs, which the service must be asked to cancel.
SERVICE_LIMIT_SECONDS = 60.0
# Time after which an interrupt is repeated: a library's `except:` may have swallowed it.
_REPEAT_SECONDS = 1.0


class Interruptible:
    """A block that SIGINT ends; see `interruptible`."""

    def __init__(self) -> None:
        self.happened = False
        self.seconds = _LIMIT_SECONDS
        self._usual: Any = None  # the handler outside the block
        self._arrived, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> "Interruptible":
        global _active
        _active = self
        # Keep the current standard error: it may be redirected by the time the process must end.
        threading.Thread(target=self._watch, args=(os.dup(2),), daemon=True).start()
        self._usual = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _active
        signal.signal(signal.SIGINT, self._usual)
        _active = None
        self._over.set()
        self._arrived.set()
        if self.happened and not isinstance(error, KeyboardInterrupt | UserError):
            raise KeyboardInterrupt from None

    def _handle(self, *arguments: Any) -> None:
        if self.happened:
            if _being_handled(KeyboardInterrupt):
                return  # another exception would break the clean-up
            raise KeyboardInterrupt  # a library has swallowed the one before
        self.happened = True
        self._arrived.set()
        if callable(self._usual):  # it counts interrupts, see `command_line.run`
            self._usual(*arguments)
        raise KeyboardInterrupt

    def _watch(self, stderr: int) -> None:
        """Repeats SIGINT until the block ends; ends a process that outlives the limit."""
        self._arrived.wait()
        end = time.monotonic() + self.seconds
        while not self._over.wait(_REPEAT_SECONDS):
            if time.monotonic() > end:
                line = getattr(self._usual, "line", "interrupted; run the same command to resume")
                os.write(stderr, f"{line}\n".encode())
                os._exit(EXIT_INTERRUPTED)
            interrupt()
        os.close(stderr)


def _being_handled(kind: type[BaseException]) -> bool:
    """Returns True in an `except`, `finally` or `__exit__` that follows from such an exception."""
    error = sys.exception()
    while error and not isinstance(error, kind):
        error = error.__context__
    return error is not None


_active: Interruptible | None = None


def interruptible() -> contextlib.AbstractContextManager[Interruptible]:
    """Returns a block that SIGINT ends within seconds; inside another such block, it has no effect.

    Works in the main thread, also of processes started with `&`, for which shells ignore SIGINT.
    Raises KeyboardInterrupt if SIGINT has arrived, even if a library swallowed it or the block
    raised another error because of it, as interrupted imports do. A UserError is raised as it is.
    """
    if _active or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext(_active or Interruptible())
    return Interruptible()


def interrupt() -> None:
    """Interrupts the block from another thread, like Ctrl-C; wakes a waiting main thread."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)
