"""Runs a command that ends when its parent does: experiments.sweeps.child PID COMMAND.

A sweep that is killed leaves no runs behind, which would hold the locks of their folders.
"""

import argparse
import ctypes
import os
import signal
import sys

from tasks.terminal.command_line import Parser

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replaces this process by the command; on Linux, it is killed when the parent ends."""
    parser = Parser(prog="python -m experiments.sweeps.child", description=__doc__.splitlines()[0])
    parser.add_argument("parent", type=int, metavar="PID", help="process that starts this one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    arguments = parser.parse_args(argv)
    if sys.platform == "linux":
        # The setting outlives execv. Source: prctl(2), PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != arguments.parent:  # it ended before the call
            sys.exit(1)
    os.execv(arguments.command[0], arguments.command)


if __name__ == "__main__":
    main(sys.argv[1:])
