"""One-line errors of jobs: what failed in a worker, Ctrl-C, and an engine's own noise."""

import contextlib
import json
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from tasks.terminal.interruption import Interruptible, interruptible

RESUME = "finished work is kept; run the same command to resume"
_FAILURE = "the job stopped: "
_CONNECT_SECONDS = 10


class WorkerFailure(Exception):
    """A UserError or OSError in a worker, as text that every engine forwards."""

    @classmethod
    def of(cls, **value: Any) -> "WorkerFailure":
        return cls(_FAILURE + json.dumps(value))


class Call:
    """Calls `work` in a worker, returns its counts, and wraps its errors."""

    def __init__(self, work: Callable[[Any], Mapping[str, int]], folder: str):
        self._work, self._folder, self._here = work, folder, os.getcwd()

    def __call__(self, piece: Any) -> Mapping[str, int]:
        with contextlib.suppress(OSError):  # relative paths mean the same to a worker
            os.chdir(self._here)
        try:
            return self._work(piece)
        except UserError as error:
            raise WorkerFailure.of(message=str(error)) from error
        except OSError as error:
            if error.errno is None:
                raise
            place = str(error.filename or self._folder)
            raise WorkerFailure.of(errno=error.errno, message=error.strerror, path=place) from error


@contextlib.contextmanager
def job(
    verbose: bool,
    explain: Callable[[BaseException], UserError | None],
) -> Iterator[Interruptible]:
    """Runs a block that is a job: Ctrl-C ends it, and its errors are those of its workers.

    `explain` returns a UserError for an error of the engine that it knows. Unless `verbose`, logs
    and stderr are shown after a bug only.
    """
    with contextlib.ExitStack() as stack:
        if not verbose:
            stack.enter_context(quiet())
        interruption = stack.enter_context(interruptible())
        try:
            yield interruption
        except BaseException as error:
            if interruption.happened:
                raise KeyboardInterrupt from error
            _raise_failure(error)
            if explained := explain(error):
                raise explained from error
            raise


def _raise_failure(error: BaseException) -> None:
    """Raises the worker's error if the text of `error` contains a WorkerFailure."""
    _, found, text = str(error).partition(_FAILURE)
    if not found:
        return
    value, _ = json.JSONDecoder().raw_decode(text)
    if "errno" in value:
        raise OSError(value["errno"], value["message"], value["path"]) from error
    raise UserError(value["message"]) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses logs and stderr, where engines print every exception; shows stderr after a bug."""
    logger, usual, usual_hook = logging.getLogger(), sys.stderr, threading.excepthook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    usual.flush()
    with (
        os.fdopen(os.dup(2), "w") as shown,
        tempfile.TemporaryFile() as aside,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.dup2(aside.fileno(), 2)
        sys.stderr = shown  # this process's output, such as the progress bar
        # Errors of the engine's threads, such as lost connections to a killed worker.
        threading.excepthook = lambda failed: traceback.print_exception(
            failed.exc_value, file=sys.__stderr__
        )

        def later_hook(failed: Any) -> None:
            if not _is_lost(failed.exc_value):  # some outlive a job
                usual_hook(failed)

        try:
            yield
        except KeyboardInterrupt:
            later_hook = lambda failed: None  # noqa: E731 - errors that follow from it
            raise
        except (UserError, OSError):
            raise
        except BaseException:
            aside.seek(0)
            shown.write(aside.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr, threading.excepthook = usual, later_hook
            shown.flush()
            os.dup2(shown.fileno(), 2)
            logger.setLevel(level)


def _is_lost(error: BaseException | None) -> bool:
    """Returns whether gRPC raised it, which only some engines import, for a lost connection."""
    return any(each.__module__.startswith("grpc") for each in type(error).__mro__)


def unreachable(addresses: Iterable[str]) -> str:
    """Returns which HOST:PORT do not answer, and why; "" if one does."""
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            reasons.append(f"{address} ({error})")
        else:
            return ""
    return ", ".join(reasons)


def of_environment(text: str, python: str) -> UserError | None:
    """Returns the error if the `text` of one tells that a worker's Python lacks our packages.

    `python` says how the workers' Python is chosen.
    """
    if found := re.search(r"No module named '?([\w.]+)", text):
        return UserError(
            f"a worker cannot import {found[1]}: install Palimpsest there as here; {python}"
        )
    return None
