"""Help texts, with defaults that are values and line breaks where asked for; and interrupts."""

import argparse
import pathlib
import sys

import pytest

from tasks.terminal.command_line import Parser, RawHelp
from tests.support.child import beginning
from tests.support.processes import completed


def help_of(*flags, **kwargs):
    parser = Parser(prog="program")
    parser.add_argument(*flags, **kwargs)
    return " ".join(parser.format_help().split())


@pytest.mark.parametrize("default", [7, 0, 0.0, True, "text", ["a"]])
def test_help_shows_a_default_that_is_a_value(default):
    assert f"the thing (default: {default})" in help_of("--x", default=default, help="the thing")


@pytest.mark.parametrize("default", [None, False, "", [], (), argparse.SUPPRESS])
def test_help_omits_a_default_that_is_no_value(default):
    assert "(default" not in help_of("--x", default=default, help="the thing")


def test_help_states_a_default_once():
    assert help_of("--x", default=7, help="sevens (default: seven)").endswith("(default: seven)")
    assert help_of("--x", default=7, help="sevens (%(default)s)").endswith("sevens (7)")
    assert "default" not in help_of("--x", default=7, required=True, help="the thing")
    assert "default" not in help_of("--x", action="store_true", help="the thing")


def test_raw_help_keeps_line_breaks_and_shows_defaults():
    parser = Parser(prog="program", description="one\n\n    two", formatter_class=RawHelp)
    parser.add_argument("--x", default=7, help="the thing")
    text = parser.format_help()
    assert "one\n\n    two" in text
    assert "(default: 7)" in text


INTERRUPTED = """
import os
import signal
import sys
import time

from pipeline.runners.interruption import interruptible
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
