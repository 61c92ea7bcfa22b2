"""A process that runs a module and ends with its parent.

A killed process cannot end its children, and Beam's workers wait two minutes for a lost build.
"""

import os
import runpy
import sys
import threading
import time

_WATCH_SECONDS = 0.2


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def main() -> None:
    """Runs a command line of two arguments: the parent's process id and a module."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
