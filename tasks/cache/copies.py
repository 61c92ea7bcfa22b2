"""Local copies of remote files: atomic, verified, and reused after a restart."""

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
from collections.abc import Callable, Mapping, Sequence

from tasks.cache.manifest import FileEntry, Remedy
from tasks.storage import files, retries
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError

FOLDER_PREFIX = "palimpsest-copies-"
# One connection to an object store transfers 50 to 100 MB/s, a tenth of a machine's bandwidth. A
# part takes longer to transfer than the 50 ms that its first byte takes (docs/scale.md).
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 8
# An unused folder is deleted after this time; a restart before that reuses it.
_KEPT_SECONDS = 24 * 3600


def holds(path: str, entry: FileEntry) -> bool:
    """Returns whether a local file has the size and checksum of `entry`."""
    try:
        return os.path.getsize(path) == entry.bytes and files.sha256(path) == entry.sha256
    except FileNotFoundError:
        return False


def copy(url: str, entry: FileEntry, target: str, remedy: Remedy) -> None:
    """Downloads a file in parallel parts. The target matches `entry` or does not exist.

    Raises UserError if the file is missing, or differs from `entry`.
    """
    partial = target + files.PARTIAL
    try:
        with files.naming_full_disk(target), open(partial, "w+b") as file:
            part = functools.partial(_fetch_part, url, entry.bytes, file.fileno(), remedy)
            starts = range(0, entry.bytes, _PART_BYTES)
            in_threads(
                lambda start: retries.with_retries(url, lambda: part(start)), starts, _PARTS_AT_ONCE
            )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise UserError(
                f"{url} has the sha256 {digest} but the manifest says {entry.sha256}: {remedy.redo}"
            )
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def in_threads(work: Callable[[int], None], numbers: Sequence[int], most: int) -> None:
    """Calls `work` for each number, on this thread and on others, up to `most` in all.

    The others are daemon threads, so that the process can end while the store is unreachable.
    """
    left, lock = iter(numbers), threading.Lock()
    errors: list[BaseException] = []

    def some() -> None:
        try:
            while not errors:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                work(number)
        except BaseException as error:
            errors.append(error)

    helpers = [background(some) for _ in range(min(most, len(numbers)) - 1)]
    some()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def background(action: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread."""
    thread = threading.Thread(target=action, name="copy shards", daemon=True)
    thread.start()
    return thread


def _fetch_part(url: str, size: int, file: int, remedy: Remedy, start: int) -> None:
    stop = min(start + _PART_BYTES, size)
    try:
        data = Store(url).ask(lambda fs, inner: fs.cat_file(inner, start=start, end=stop))
        if len(data) != stop - start:
            raise retries.Truncated(f"{stop - start - len(data):,} bytes are missing")
    except (OSError, UserError):
        # The size is requested only after an error, which saves a request per good file.
        try:
            found = files.size(url)
        except FileNotFoundError as error:
            raise UserError(f"{url} is missing: {remedy.again}") from error
        if found != size:
            raise UserError(
                f"{url} has {found:,} bytes but the manifest says {size:,}: {remedy.redo}"
            ) from None
        raise
    left = memoryview(data)
    while left:  # a full disk takes a part of it first, without an error
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def own_folder(owner: object, parent: str | None, sizes: Mapping[str, int]) -> tuple[str, set[str]]:
    """Locks a folder for the copies of `owner`: the free one that holds the most, or a new one.

    The lock is released when `owner` or the process ends. A folder in `parent` is kept for the next
    process; one in the system's temporary folder (`parent` None) is deleted. Files whose size is
    not in `sizes` are deleted. Returns (the folder, names of its unverified files).
    """
    if parent and files.is_remote(parent):
        raise UserError(f"--data.local_dir={parent} is not a folder of this machine")
    place = parent or tempfile.gettempdir()
    os.makedirs(place, exist_ok=True)
    free: list[tuple[int, str, int, set[str]]] = []  # (bytes copied, folder, lock, file names)
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

    def release() -> None:
        if parent is None:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

    weakref.finalize(owner, release)
    return folder, good


def _new_folder(place: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place)
        # Another process may have locked or deleted it first.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return folder, _locked(folder)


def _locked(folder: str) -> int:
    """Locks a folder for this process; returns the file descriptor that holds the lock."""
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
