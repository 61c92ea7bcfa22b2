"""Children start whole, whichever thread receives an interrupt."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tasks.terminal.interrupt import shielded


def test_an_interrupt_waits_for_the_end_of_the_block():
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    over = threading.Event()
    receiver = threading.Thread(target=over.wait)
    receiver.start()
    steps = []

    def start():
        with shielded():
            steps.append("started")
            signal.pthread_kill(receiver.ident, signal.SIGINT)
            threading.Event().wait(0.5)
            steps.append("registered")

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        over.set()
        receiver.join()
        signal.signal(signal.SIGINT, usual)
    assert steps == ["started", "registered"]


def test_children_block_the_signal_also_after_the_first_of_multiprocessing():
    program = (
        "import multiprocessing, signal\n"
        "from tasks.terminal.interrupt import shielded\n"
        "from tests.tasks.terminal.test_interrupt import blocked\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    receiver, sender = context.Pipe(duplex=False)\n"
        "    with shielded():\n"
        "        context.Process(target=blocked, args=(sender,)).start()\n"
        "    assert receiver.recv() and not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def blocked(sender) -> None:
    sender.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
