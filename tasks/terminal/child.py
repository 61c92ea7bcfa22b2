"""Processes that end with their parent: a killed one cannot end its children."""

import ctypes
import importlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

import palimpsest_home

_WATCH_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
# `python -m` would find a user's `trainer.py` in the current folder before ours.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from tasks.terminal import child; "
    "del sys.path[0]; child.become()"
)


def command(module: str, words: Sequence[str]) -> list[str]:
    """Returns a command line for `subprocess` that runs a module and ends with this process.

    MODULE:FUNCTION calls a function of the module.
    """
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, *words]


def become() -> None:
    """Runs a command line of parent process id, module and arguments."""
    parent, module = sys.argv[1:3]
    del sys.argv[1:3]
    if sys.platform == "linux":
        _end_with_parent()
        if os.getppid() != int(parent):  # the parent ended before the call
            sys.exit(1)
    palimpsest_home.end_quietly()
    module, _, function = module.partition(":")
    if function:
        getattr(importlib.import_module(module), function)()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


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
