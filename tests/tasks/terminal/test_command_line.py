"""Interrupts of commands."""

import pathlib
import sys

import pytest

from tests.support.child import beginning
from tests.support.processes import completed

INTERRUPTED = """
import os
import signal
import sys
import time

from tasks.terminal.interruption import interruptible
from tasks.terminal.command_line import run


class Interrupting:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        sys.__stderr__.write(text)

    def flush(self):
        pass


def main(argv):
{block}


run(main)
"""
# Where the second of two interrupts arrives.
SECOND = {
    "in its report": "    sys.stderr = Interrupting(); os.kill(os.getpid(), signal.SIGINT)",
    "in a clean-up": """
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
""",
    "after a block": """
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
""",
}


@pytest.mark.parametrize("block", SECOND.values(), ids=SECOND)
def test_two_interrupts_are_one_line(block):
    ended = completed(
        beginning([sys.executable, "-c", INTERRUPTED.format(block=block.strip("\n"))]),
        cwd=pathlib.Path(__file__).parents[3],
    )
    assert ended.returncode == 130
    (line,) = ended.stderr.splitlines()
    assert line.endswith(": interrupted; run the same command to resume")
