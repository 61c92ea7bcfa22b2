"""Locks on folders: one writer at a time, or the parts of one job.

A local lock is `flock` on a file, which the kernel releases however the holder ends. In a Cloud
Storage bucket it is an object that its holder rewrites every few seconds and nobody else may
change. Other stores lack such an operation, so their folders are not locked.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from tasks.storage import files
from tasks.storage.paths import is_on_gcs
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError

LOCK = ".lock"
# Seconds between rewrites of a lock in a bucket, and seconds without a rewrite until its holder
# counts as dead. A holder may be offline for the difference.
_BEAT_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Refused(UserError):
    """Another process holds a lock; `part` is its part of a job, "" for a whole one."""

    def __init__(self, folder: str, what: str, flag: str, content: bytes):
        self.content, self.part = content, _part_of(content)
        super().__init__(
            f"another {what} is writing {folder}: {_named(content)}; wait until it ends, or choose "
            f"another {flag}"
        )


class Lock:
    """A held lock on `folder`."""

    def __init__(self, folder: str):
        self.folder = folder

    def check(self) -> None:
        """Raises UserError if another writer took over the lock, or the folder has gone."""


@contextlib.contextmanager
def held(folder: str, what: str, flag: str, part: str = "", shared: bool = False) -> Iterator[Lock]:
    """Locks an existing folder for the duration of the block.

    `what` is the word for the writer ("build" or "run"), `flag` the folder's flag. `part` is the
    name of the writer's part of a job, "" for a whole one; with `shared`, only other writers of
    this part are locked out. Raises Refused if another writer holds the lock, OSError if the folder
    cannot be written.
    """
    name = f"{LOCK}-{part}" if shared else LOCK
    if not files.is_remote(folder):
        with _local(folder, name, what, flag, part) as lock:
            yield lock
    elif is_on_gcs(folder):
        with _InBucket(folder, name, what, flag, part) as lock:
            yield lock
    else:
        _warn(f"{folder}: this store has no locks; start only one {what}")
        yield Lock(folder)


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


@contextlib.contextmanager
def claimed(folder: str, what: str, flag: str) -> Iterator[Lock]:
    """Creates and locks a folder, also against the parts of a job.

    Deletes partial files that killed writers left in it, also those of workers that the block
    lost. Raises as `held` does.
    """
    files.make_folder(folder)
    with held(folder, what, flag) as lock:
        if living := living_part(folder):
            raise Refused(folder, what, flag, living)
        files.remove_partial(folder)
        yield lock
        files.remove_partial(folder)


def living_part(folder: str, but: str = "") -> bytes:
    """Returns the content of a lock that a part of a job holds, other than `but`; b"" if none does.

    Only for holders of the folder's lock. Deletes the locks of parts that were killed.
    """
    names = sorted(files.list_sizes(folder, f"{LOCK}-").keys() - {f"{LOCK}-{but}"})
    if files.is_remote(folder):
        return _living_in_bucket([Store(files.join(folder, name)) for name in names])
    for name in names:
        path = os.path.join(files.local_path(folder), name)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # also where there are no locks, and the part may be alive
                content = file.read()
                if not _ended_here(content):
                    return content
            os.unlink(path)
    return b""


def _living_in_bucket(locks: list[Store]) -> bytes:
    """Returns the content of a lock that is rewritten while it is watched; deletes the others."""
    found = [(lock, *lock.generation()) for lock in locks]
    watched = [(each, old) for each, old, content in found if old and not _ended_here(content)]
    end = time.monotonic() + _PATIENCE_SECONDS
    while watched and time.monotonic() < end:
        time.sleep(_BEAT_SECONDS / 2)
        for each, old in watched:
            now, content = each.generation()
            if now not in ("", old):
                return content
    for each, old, _ in found:
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # it got another holder
            _delete(each, old)
    return b""


def _delete(lock: Store, generation: str) -> None:
    def ask(fs: Any, inner: str) -> None:
        bucket, _, name = inner.partition("/")
        fs.call("DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=generation)

    lock.ask(ask)


@contextlib.contextmanager
def _local(folder: str, name: str, what: str, flag: str, part: str) -> Iterator[Lock]:
    path = os.path.join(files.local_path(folder), name)
    descriptor = _open_current(path, folder, what, flag)
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_holder(part)).encode())
        yield _OfFile(path, folder, what, descriptor)
    finally:
        # Deleted while locked: a waiting process notices, and makes a new file.
        with contextlib.suppress(OSError):
            os.unlink(path)
        _held.discard(descriptor)
        os.close(descriptor)


# Descriptors of this process's local locks.
_held: set[int] = set()


def leave_to_parent() -> None:
    """Gives up the locks that a fork has inherited, so that they end with its parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


class _OfFile(Lock):
    """A lock on a local file, which leaves with its folder."""

    def __init__(self, path: str, folder: str, what: str, descriptor: int):
        super().__init__(folder)
        self._path, self._what, self._descriptor = path, what, descriptor

    def check(self) -> None:
        folder = files.local_path(self.folder)
        try:
            there = os.stat(self._path)
            if os.path.samestat(os.fstat(self._descriptor), there):
                return
        except FileNotFoundError:
            if os.path.isdir(folder):  # only the lock was removed
                return
        raise UserError(
            f"{self.folder} was moved or removed while this {self._what} wrote it: put it back and "
            "run the same command again"
        )


def _open_current(path: str, folder: str, what: str, flag: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refused(folder, what, flag, os.read(descriptor, 4096)) from error
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                _warn(f"{folder}: this file system has no locks; start only one {what}")
                return descriptor
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class _InBucket(Lock):
    """A lock in a Cloud Storage bucket: an object that is written only at a known generation.

    A second writer takes over a lock that did not change while it watched, or whose holder was a
    process on this machine that has ended. The first writer notices at its next `check`, also if
    it stood still meanwhile, and does not remove the lock of the second.
    """

    def __init__(self, folder: str, name: str, what: str, flag: str, part: str):
        super().__init__(folder)
        self._what, self._flag, self._part = what, flag, part
        self._store = Store(files.join(folder, name))
        self._content = {**_holder(part), "id": uuid.uuid4().hex}
        self._lost = ""
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def check(self) -> None:
        if time.monotonic() - self._written > _PATIENCE_SECONDS:
            self._renew()
        if self._lost:
            raise UserError(
                f"{self.folder}: {self._lost} has taken over because this {self._what} could not "
                "reach the bucket for a while: let it continue"
            )

    def __enter__(self) -> Lock:
        generation, found = self._store.generation()
        if generation and not _ended_here(found):
            generation = self._wait_for_end(generation, found)
        written = self._write(generation)
        if not written:
            raise Refused(self.folder, self._what, self._flag, self._store.generation()[1])
        self._generation, self._written = written, time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(Exception):
                _delete(self._store, self._generation)

    def _wait_for_end(self, generation: str, found: bytes) -> str:
        """Returns the generation of a lock whose holder has ended, "" for a released lock."""
        if not (self._part and _part_of(found)):  # parts wait for each other, mostly briefly
            watching = f"checking for {_PATIENCE_SECONDS:.0f} s whether it is alive"
            _warn(f"{self.folder} is locked by {_named(found)}: {watching}")
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            time.sleep(_BEAT_SECONDS / 2)
            now, found = self._store.generation()
            if not now:
                return ""
            if now != generation:
                raise Refused(self.folder, self._what, self._flag, found)
        return generation

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            # A failed write does not lose the lock; the next beat tries again.
            with contextlib.suppress(Exception):
                self._renew()
            if self._lost:
                return

    def _renew(self) -> None:
        with self._writing:
            written = "" if self._lost else self._write(self._generation)
            if not written:
                self._lost = self._lost or _named(self._store.generation()[1])
                return
            self._generation, self._written = written, time.monotonic()

    def _write(self, generation: str) -> str:
        """Writes the lock if it still has this generation; returns the new one, or ""."""
        data = json.dumps({**self._content, "beat": time.time()}).encode()
        return self._store.replace(data, generation, self._content["id"].encode())


class Observer:
    """Checks whether a folder's locks have live holders, without taking a lock."""

    def __init__(self, folder: str):
        self._folder, self._seen = folder, dict[str, tuple[bytes, float]]()

    def alive(self) -> bool | None:
        """Returns True if a holder is alive, False if none is, None if unknown.

        A holder on another machine can be seen only in a bucket, where it rewrites the lock.
        """
        if not _has_locks(self._folder):
            return None
        states = set(map(self._is_alive, files.list_sizes(self._folder, LOCK)))
        return True if True in states else None if None in states else False

    def _is_alive(self, name: str) -> bool | None:
        try:
            found = files.read_bytes(files.join(self._folder, name))
        except FileNotFoundError:
            return False
        if _ended_here(found):
            return False
        if not files.is_remote(self._folder):
            return True if _holder_here(found) else None
        if found != self._seen.get(name, (b"", 0.0))[0]:
            self._seen[name] = found, time.monotonic()
        return time.monotonic() - self._seen[name][1] < _PATIENCE_SECONDS


def parts(folder: str) -> dict[str, str]:
    """Returns the holders of the locks of parts, by part, without those known to have ended."""
    found = {}
    for name in files.list_sizes(folder, f"{LOCK}-"):
        with contextlib.suppress(FileNotFoundError):
            content = files.read_bytes(files.join(folder, name))
            if not _ended_here(content):
                found[name.removeprefix(f"{LOCK}-")] = _named(content)
    return found


def _has_locks(folder: str) -> bool:
    return not files.is_remote(folder) or is_on_gcs(folder)


def _holder(part: str) -> dict[str, Any]:
    machine = _machine()
    return {
        **({"part": part} if part else {}),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": machine,
        **({"began": _began(os.getpid())} if machine else {}),
    }


def _machine() -> str:
    """Returns an id of this machine's boot and process namespace; "" if unknown.

    Containers may share a host name and process numbers.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _holder_here(content: bytes) -> dict[str, Any] | None:
    """Returns a lock's holder if it is a process of this machine."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(content)
        return holder if holder["machine"] == _machine() != "" else None
    return None


def _ended_here(content: bytes) -> bool:
    with contextlib.suppress(KeyError, TypeError, OSError):
        if holder := _holder_here(content):
            try:
                os.kill(holder["pid"], 0)
            except ProcessLookupError:
                return True
            # A zombie keeps its number, which another process may get later.
            began = _began(holder["pid"])
            return not began or began != holder.get("began", began)
    return False


def _began(pid: int) -> str:
    """Returns the start time of a local process, in clock ticks since the boot; "" if it ended.

    Source: proc_pid_stat(5), fields 3 and 22, after the name, which may contain any characters.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, *fields = file.read().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _named(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(content)
        part = f"part {holder['part'].replace('-', ' ')}, " if "part" in holder else ""
        return f"{part}process {holder['pid']} on {holder['host']} (since {holder['since']})"
    return "another process"


def _part_of(content: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(content).get("part", ""))
    return ""
