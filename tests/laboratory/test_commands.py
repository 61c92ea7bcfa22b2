"""Commands in process groups: output, exit codes, waiting, and all that they started."""

import signal
import time

import pytest

from tests.laboratory import commands
from tests.laboratory.commands import Command, Difference

SLEEPING_CHILD = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
code += "time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code])
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a script as a command."""
    started = []

    def starts(script):
        (tmp_path / "stub.py").write_text(script)
        started.append(Command(["stub"], tmp_path / "log", name="a stub"))
        started[-1].start(cwd=tmp_path)
        return started[-1]

    yield starts
    for each in started:
        each.kill()


def test_a_traceback_is_noticed(start):
    with pytest.raises(Difference, match=r"(?s)a stub printed a traceback: .*something"):
        start("raise ValueError('something')").finish()


def test_a_code_of_its_own_after_a_signal_is_noticed(start):
    made = start(
        "import signal, time, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    assert made.wait_until(lambda: "ready" in made.output(), 30)
    assert (made.running, made.finished) == (True, False)
    with pytest.raises(Difference, match="a stub ended with 3"):
        made.end(signal.SIGTERM)
    made.check_alive()  # it was asked to end
    assert made.activity() == "not running"


def test_a_process_that_is_left_behind_is_noticed(start, monkeypatch):
    monkeypatch.setattr(commands, "_END_SECONDS", 0.2)
    made = start(SLEEPING_CHILD)
    assert made.wait_until(lambda: "1" in made.output(), 30)
    with pytest.raises(Difference, match="some of its processes have not"):
        made.end(signal.SIGTERM)


def test_waiting_ends_with_the_condition_the_command_or_the_deadline(start):
    made = start("import time; print('ready', flush=True); time.sleep(60)")
    assert made.wait_until(lambda: made.output() == "ready\n", 30)
    assert not made.wait_until(lambda: False, 0.05)
    with pytest.raises(Difference, match=r"a stub hung for 0\.05 s"):
        made.wait(0.05)
    begin = time.monotonic()
    assert not made.wait_until(lambda: False)
    assert time.monotonic() - begin < 30
