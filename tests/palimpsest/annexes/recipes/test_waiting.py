"""Waiting for commands in processes of their own."""

import signal
import subprocess
import sys
import time

import pytest

from palimpsest.annexes.recipes.waiting import waited
from tests.support.processes import launched

WAITS = """
import subprocess, sys
from palimpsest.annexes.recipes.waiting import waited
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.exit(waited(child))
"""
# A process that a signal does not end, like one that the signal finds at its end.
DEAF = """
import signal, time
signal.signal({number}, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(0.5)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_on_a_process_that_ends_well(number):
    process = launched([sys.executable, "-c", WAITS, DEAF.format(number=int(number))])
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    process.communicate()


def test_a_failed_process_ends_the_others():
    began = time.monotonic()
    sleeper = subprocess.Popen(["sleep", "60"])
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert waited(sleeper, failed) == 3
    assert time.monotonic() - began < 30
