"""What a run does about signals, and how its processes agree on an error."""

import signal

import jax
import pytest

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from trainer.engine.stopping import Stop


@pytest.fixture
def ctrl_c_interrupts():
    """Handles Ctrl-C as Python does; the processes of a parallel pytest would end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def failing():
    raise UserError("no batch")


def test_a_second_ctrl_c_stops_at_once(ctrl_c_interrupts, capsys):
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.asked()
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop.received_alone()
        assert not stop  # until it is asked
        assert stop.asked()
        assert stop
        assert stop.cause == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert stop.exit_code(3, complete=False) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "Ctrl-C: saved step 3; run the same command to resume\n"


def test_a_run_in_the_background_ignores_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_a_run_alone_stops_it():
    stop = Stop()
    assert stop.agreed(lambda: 3) == 3
    assert not stop
    assert stop.agreed(failing) is None
    assert stop
    with pytest.raises(UserError, match="no batch"):
        stop.exit_code(2, complete=False)


def test_an_error_of_one_process_of_several_is_raised(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stop = Stop()
    with pytest.raises(UserError, match="no batch"):
        stop.agreed(failing)
    assert not stop
