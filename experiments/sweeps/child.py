"""A process that runs a program and ends when its parent ends.

Thus a killed sweep leaves no runs behind, which would hold the locks of their folders.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the program in a command line of parent process id, program and arguments."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        # This setting survives execv. Source: prctl(2), PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(parent):  # the parent ended before the call
            sys.exit(1)
    os.execv(command[0], command)
