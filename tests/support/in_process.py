"""Commands run in this process as `python -m` runs them, which saves its start and imports.

Each command has some tests that start it for real; those of its many mistakes need not.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO
from unittest import mock

from tasks.terminal import command_line
from tests.support.words import changed


@contextlib.contextmanager
def _caught(name: str, descriptor: int) -> Iterator[IO[str]]:
    """Gives a file of all that is written to a stream, by libraries in C++ and children, too."""
    with tempfile.TemporaryFile("w+") as file, contextlib.ExitStack() as stack:
        before = os.dup(descriptor)
        stack.callback(os.close, before)
        stack.callback(os.dup2, before, descriptor)
        os.dup2(file.fileno(), descriptor)
        stream = stack.enter_context(open(descriptor, "w", buffering=1, closefd=False))
        with mock.patch.object(sys, name, stream):
            yield file


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of this project; returns its exit code and what it wrote.

    Of two "--name=value" with one name, the last counts: see `changed`. A bug in the command raises
    here, where it would print a traceback.
    """
    main = importlib.import_module(module).main
    words = changed(*arguments)
    interrupts = signal.getsignal(signal.SIGINT)
    with (
        mock.patch.object(command_line, "module_name", return_value=module),
        _caught("stdout", 1) as out,
        _caught("stderr", 2) as err,
    ):
        try:
            command_line.run(main, words)
        except SystemExit as ended:
            code = ended.code
        finally:
            signal.signal(signal.SIGINT, interrupts)
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess([module, *words], code, *texts)
