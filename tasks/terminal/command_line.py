"""Errors and exit codes, shared by all commands.

A user's mistake ends in exit code 2 and one line on stderr that names the cause and what to do. A
traceback means a bug in this project.
"""

import contextlib
import difflib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tasks.annexes import BrokenAnnex
from tasks.terminal.interrupt import EXIT_INTERRUPTED as EXIT_INTERRUPTED

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
# Of more names that begin alike, only the closest is suggested.
_FAMILY = 10

_STORAGE_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder, then run again",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
    errno.EROFS: "the file system is read-only; choose a writable folder",
    errno.EACCES: "permission denied; choose a writable folder, or change its permissions",
    errno.ENOTDIR: "part of this path is a file, not a folder; choose another path",
    errno.EEXIST: "this is a file, not a folder; choose another path",
    errno.ENAMETOOLONG: "this name is too long; choose a shorter one",
    errno.EFBIG: "a file would exceed the largest size allowed here; raise the limit (ulimit -f) "
    "or choose another folder, then run again",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EPERM: "permission denied; choose a writable folder, or change its permissions",
}


class UserError(Exception):
    """A mistake that the user can correct; one line says what is wrong and what to do."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython and notebooks show instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for the known name closest to `name`, or "".

    If `name` begins several names, as the name of a family does, all are returned.
    """
    known = list(known)
    family = [each for each in known if each.startswith(f"{name.lower().replace('-', '_')}_")]
    if not 1 < len(family) <= _FAMILY:
        family = difflib.get_close_matches(name, known, n=1)
    *others, last = family or [""]
    names = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {names}?)" if names else ""


class _Interrupts:
    """Handles SIGINT: the first raises KeyboardInterrupt, a later one ends the process at once.

    A second KeyboardInterrupt would arrive while the first is reported, and print a traceback.
    """

    def __init__(self, program: str):
        self.line = f"{program}: interrupted; run the same command to resume"
        self._happened = False

    def __call__(self, *_: Any) -> None:
        if not self._happened:
            self._happened = True
            raise KeyboardInterrupt
        os.write(2, f"{self.line}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    def report(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(self.line, file=sys.stderr)


@contextlib.contextmanager
def storage_named() -> Iterator[None]:
    """Raises UserError for a mistake with files, disks or annexes that the block ends with."""
    try:
        yield
    except BrokenAnnex as error:
        raise UserError(str(error)) from error
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{place}{_STORAGE_ERRORS[error.errno]}") from error


def run(
    main: Callable[[list[str]], int | None],
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> NoReturn:
    """Exits with the code of a command's `main(argv)`; prints a user's mistake as one line."""
    program = program or f"python -m {module_name(main)}"
    interrupts = _Interrupts(program)
    # `palimpsest_home` lets it end the process without a traceback until now.
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, interrupts)
    try:
        with storage_named():
            code = main([*(sys.argv[1:] if argv is None else argv)]) or 0
            sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        if not _reader_left():
            raise
        sys.exit(EXIT_BROKEN_PIPE)
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        interrupts.report()
        sys.exit(EXIT_INTERRUPTED)
    finally:
        # A later Ctrl-C ends the process while Python shuts down, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


def _reader_left() -> bool:
    """Returns True if nobody reads stdout, and lets Python shut down without an error about it."""
    state = select.poll()
    state.register(sys.stdout.fileno(), 0)
    if left := bool(state.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def module_name(main: Callable[..., Any]) -> str:
    """Returns the module of a command, even if it runs as the program."""
    specification = getattr(sys.modules.get("__main__"), "__spec__", None)
    return specification.name if specification else main.__module__
