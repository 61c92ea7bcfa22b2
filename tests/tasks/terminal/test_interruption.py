"""SIGINT ends a block once and promptly, even if a library swallows the exception."""

import contextlib
import dataclasses
import signal
import time

import pytest

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.interruption import interrupt, interruptible
from tests.support.processes import started

pytestmark = pytest.mark.processes


def interrupted(then) -> None:
    """Interrupts an interruptible block, which then calls `then` on its way out."""
    with interruptible():
        try:
            interrupt()
            signal.pause()
        finally:
            then()


def test_only_the_first_signal_counts():
    before = signal.getsignal(signal.SIGINT)
    calls = []

    def clean_up():
        interrupt()
        calls.append("cleaned")

    def nested():
        with interruptible() as outer, interruptible() as inner:
            assert inner is outer
            interrupted(clean_up)

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert calls == ["cleaned"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("then", [False, True], ids=["at the end", "before more work"])
def test_a_library_that_swallows_it(then):
    def swallow():
        with interruptible():
            with contextlib.suppress(KeyboardInterrupt):
                interrupt()
                signal.pause()
            if then:
                time.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        swallow()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("raised", "expected"), [(ImportError, KeyboardInterrupt), (UserError, UserError)]
)
def test_errors_that_follow_from_it(raised, expected):
    def fail():
        raise raised("numpy.core failed to import")

    with pytest.raises(expected):
        interrupted(fail)


def test_a_block_that_does_not_end():
    program = (
        "import contextlib, time\n"
        "from tasks.terminal import interruption as i\n"
        "i._LIMIT_SECONDS = i._REPEAT_SECONDS = 0.3\n"
        "with i.interruptible():\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n"
        "        i.interrupt()\n"
        "    while True:\n"
        "        with contextlib.suppress(KeyboardInterrupt):\n"
        "            time.sleep(60)\n"
    )
    done = started("-c", program, timeout=30)
    assert done.returncode == 130
    assert done.stderr == "interrupted; run the same command to resume\n"


def test_every_command_is_interruptible_unless_it_says_otherwise():
    @dataclasses.dataclass(frozen=True)
    class Flags:
        pass

    def swallow(flags):
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        Command(Flags, swallow)([])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert Command(Flags, swallow, waits=True)([]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
