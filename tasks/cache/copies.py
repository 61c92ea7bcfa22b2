"""Copies of remote files on this machine: whole, or not there, and still good after a restart."""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping

from tasks.cache.manifest import FileEntry
from tasks.storage import files, remote
from tasks.terminal.command_line import UserError

FOLDER_PREFIX = "palimpsest-copies-"
# One connection to an object store brings 50 to 100 MB/s, a machine takes ten times as much; a part
# is long beside the time until its first byte, 50 ms. benchmarks/remote_input.py measures it.
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 8
# A folder that no process holds goes after this long; sooner, a restart may want it.
_KEPT_SECONDS = 24 * 3600
_REDO = "delete the file and run pipeline.build again, which redoes that shard alone"


def holds(path: str, entry: FileEntry) -> bool:
    """Whether a local file has the size and checksum of `entry`."""
    try:
        return os.path.getsize(path) == entry.bytes and files.sha256(path) == entry.sha256
    except FileNotFoundError:
        return False


def copy(url: str, entry: FileEntry, target: str) -> None:
    """Copies a remote file by several parts at once, to be as `entry` says or not to be there.

    Raises:
      UserError: it is missing, or another file.
    """
    partial = target + files.PARTIAL
    try:
        with open(partial, "w+b") as file:
            _fetch(url, entry.bytes, file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise UserError(
                f"{url} has the sha256 {digest} and the manifest says {entry.sha256}: {_REDO}"
            )
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _fetch(url: str, size: int, file: int) -> None:
    """Writes the first `size` bytes of a remote file into an open one, wherever they belong."""
    starts = iter(range(0, size, _PART_BYTES))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def parts() -> None:
        try:
            while not errors:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                remote.with_retries(url, functools.partial(_fetch_part, url, size, file, start))
        except BaseException as error:
            errors.append(error)

    # Daemons: whoever ends the process does not wait for a store that is away.
    helpers = [
        threading.Thread(target=parts, name="copy a shard", daemon=True)
        for _ in range(min(_PARTS_AT_ONCE, -(-size // _PART_BYTES)) - 1)
    ]
    for helper in helpers:
        helper.start()
    parts()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def _fetch_part(url: str, size: int, file: int, start: int) -> None:
    stop = min(start + _PART_BYTES, size)
    try:
        data = files.on_store(url, lambda fs, inner: fs.cat_file(inner, start=start, end=stop))
        if len(data) != stop - start:
            raise remote.Truncated(f"{stop - start - len(data):,} bytes are missing")
    except (OSError, UserError):
        # Only now: of a file that is as planned nothing has to be asked.
        try:
            found = files.size(url)
        except FileNotFoundError as error:
            raise UserError(f"{url} is missing: run pipeline.build again") from error
        if found != size:
            raise UserError(
                f"{url} has {found:,} bytes and the manifest says {size:,}: {_REDO}"
            ) from None
        raise
    os.pwrite(file, data, start)


def own_folder(owner: object, parent: str | None, sizes: Mapping[str, int]) -> tuple[str, set[str]]:
    """Gives `owner` a folder for copies, that which has most of them already.

    The lock on a folder is held while its process lives. One in `parent` stays when the process
    ends; one in the system's temporary folder goes, unless the process is killed.

    Args:
      owner: the folder is held while it lives.
      parent: where the folder lies; None: the system's temporary folder.
      sizes: bytes of each file that may be copied there, by name; what else is there is deleted.

    Returns:
      (the folder, names of the files of these sizes that are there: hold them against more).
    """
    place = parent or tempfile.gettempdir()
    os.makedirs(place, exist_ok=True)
    free: list[tuple[int, str, int, set[str]]] = []  # bytes that are there, folder, lock, names
    for name in sorted(os.listdir(place)):
        folder = os.path.join(place, name)
        if name.startswith(FOLDER_PREFIX):
            with contextlib.suppress(OSError):
                lock = _locked(folder)
                here = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
                good = {name for name, size in here.items() if sizes.get(name) == size}
                free.append((sum(here[name] for name in good), folder, lock, good))
    free.sort()
    chosen = free.pop() if free and free[-1][0] else None
    for _, folder, lock, _ in free:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(folder).st_mtime > _KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    _, folder, lock, good = chosen or (0, *_new_folder(place), set())
    for name in set(os.listdir(folder)) - good:
        os.unlink(os.path.join(folder, name))

    def let_go() -> None:
        if parent is None:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

    weakref.finalize(owner, let_go)
    return folder, good


def _new_folder(place: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place)
        # Another process may have looked at it before it was locked.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return folder, _locked(folder)


def _locked(folder: str) -> int:
    """Returns the descriptor that holds the lock of a folder, for this process alone.

    Raises:
      OSError: another has it, or there is no such folder.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
