"""Runs a module that ends with the process that started it: `-m pipeline.runners.child PID MODULE`.

A process that was killed cannot end its children, and Beam's workers wait for a lost build for two
minutes. SIGINT is ignored: the parent, which Ctrl-C reaches as well, decides when workers end.
"""

import os
import runpy
import signal
import sys
import threading
import time

_WATCH_SECONDS = 0.2


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
