"""Local folders that appear under their names only once they are complete."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator

from tasks.storage import files
from tasks.terminal import interrupt
from tasks.terminal.command_line import UserError

_PREFIX = ".unfinished-"


@contextlib.contextmanager
def written(path: str) -> Iterator[str]:
    """Yields a new folder beside the local `path`, and renames it to `path` on success.

    The folder is deleted if the block fails or a signal ends the process, as are folders of killed
    processes, whose locks are free. Raises UserError if `path` exists or no folder can be made.
    """
    parent, name = os.path.split(path)
    files.make_folder(parent)
    prefix = f"{_PREFIX}{name}-"
    for each in files.list_names(parent):
        if re.fullmatch(re.escape(prefix) + "[a-z0-9_]{8}", each):
            _remove_ownerless(os.path.join(parent, each))
    folder, descriptor = _locked(path, parent, prefix)
    try:
        with interrupt.on_end(lambda: shutil.rmtree(folder, ignore_errors=True)):
            yield folder
            os.chmod(folder, 0o755)
            try:
                os.rename(folder, path)
            except OSError as error:
                if not os.path.lexists(path):
                    raise
                raise UserError(f"{path} was made meanwhile: choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked(path: str, parent: str, prefix: str) -> tuple[str, int]:
    """Returns a new folder and the descriptor that holds its lock."""
    while True:
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no folder can be made here; choose another path") from error
        except OSError as error:
            error.filename = path
            raise
        # Until it is locked, another process may delete it as abandoned.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            if _lock(descriptor) is not False and os.path.isdir(folder):
                return folder, descriptor
            os.close(descriptor)


def _remove_ownerless(folder: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if _lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Tries to take the lock; returns None if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
