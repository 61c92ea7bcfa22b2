"""Runs a command that ends when its parent does, by experiments.sweeps.child PID -- COMMAND.

A sweep that is killed leaves no runs behind, which would hold the locks of their folders.
"""

import ctypes
import dataclasses
import os
import signal
import sys

from tasks.terminal.command import Command
from tasks.terminal.fields import REQUIRED, field

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    parent: int = field(REQUIRED, "process that starts this one", positional=True, metavar="PID")
    command: tuple[str, ...] = field(
        REQUIRED, "after --, a program and its arguments", positional=True
    )


def run(flags: Flags) -> None:
    """Replaces this process by the command; on Linux, it is killed when the parent ends."""
    if sys.platform == "linux":
        # The setting outlives execv. Source: prctl(2), PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != flags.parent:  # it ended before the call
            sys.exit(1)
    os.execv(flags.command[0], flags.command)


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
