"""Processes that end with their parent: a killed one cannot end its children."""

import ctypes
import os
import signal
import sys
import threading
import time

_WATCH_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


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

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with(parent)  # also if the parent has ended before
