"""Ctrl-C in commands whose work is resumed after any kill: they end at once."""

import contextlib
import os
import signal
import sys
from typing import Any

from tasks.terminal.command_line import EXIT_INTERRUPTED


def end_at_once(program: str) -> None:
    """Makes Ctrl-C print one line and end this process, unless it ignores interrupts.

    A KeyboardInterrupt would be raised in whatever the main thread does, also in the callbacks of
    libraries, which print it and go on, and the threads of Orbax would outlive it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def end(*_: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            # A stream may be in the middle of a write, which cannot be entered again.
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(2, f"\n{program}: interrupted; run the same command to resume\n".encode())
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, end)
