"""A process that runs a program and ends with its parent.

A sweep that is killed leaves no runs behind, which would hold the locks of their folders.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs a command line of the parent's process id, a program and its arguments."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        # The setting outlives execv. Source: prctl(2), PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(parent):  # it ended before the call
            sys.exit(1)
    os.execv(command[0], command)
