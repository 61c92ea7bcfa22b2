"""Processes that end with their parent: a killed one cannot end its children."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

_WATCH_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_PROGRAM = "from tasks.terminal import child; child.become()"


def command(module: str, words: Sequence[str]) -> list[str]:
    """Returns a command line for `subprocess` that runs a module and ends with this process."""
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), sys.executable, "-m", module, *words]


def become() -> None:
    """Runs the program in a command line of parent process id, program and arguments."""
    parent, *program = sys.argv[1:]
    if sys.platform == "linux":
        _end_with_parent()  # survives execv
        if os.getppid() != int(parent):  # the parent ended before the call
            sys.exit(1)
    os.execv(program[0], program)


def end_with(parent: int) -> None:
    """Ends this process soon after its parent, whose process id is given."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_at_once_with(parent: int) -> None:
    """Ends this process with its parent as `end_with` does, but by Linux itself.

    It ends at once, even while a library holds the interpreter lock. The thread that started it
    counts as the parent, so it must be the main thread.
    """
    if sys.platform == "linux":
        _end_with_parent()
    end_with(parent)  # also if the parent has ended before


def _end_with_parent() -> None:
    # Source: prctl(2), PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
