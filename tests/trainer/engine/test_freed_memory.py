"""Freed buffers keep their pages for the next allocation of their size."""

import platform
import subprocess
import sys

import pytest

# Fills and frees 64 MB ten times; prints how many pages the system had to give meanwhile.
_BUFFERS = """
import resource
import jax
from trainer.engine import hardware

jax.devices()
{first}
def fill():
    return b"x" * 2**26 and resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = fill()
print([fill() for _ in range(10)][-1] - before)
"""


def _pages(first: str) -> int:
    command = [sys.executable, "-c", _BUFFERS.format(first=first)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_buffers_are_reused():
    assert _pages("") > 1_000
    assert _pages("hardware.keep_freed_memory()") < 100
