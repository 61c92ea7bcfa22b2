"""Multi-process runs: one process per host, joined by `jax.distributed`.

All processes are started with the same command and connect to the coordinator, process 0. When one
ends, all end: they cannot continue without its devices and would wait indefinitely. JAX's own
heartbeat would end them with a C++ stack trace; ours prints one line that names the lost process.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from trainer.config.processes import AUTO, ProcessesConfig
from trainer.engine.damage import Damaged
from trainer.monitoring import activity

# Exit code of a process that lost another: EX_PROTOCOL, "the other side broke off".
EXIT_LOST = 76

# Time for all processes to connect at the start; JAX's default.
_START_SECONDS = 300
# Time to wait, after another process has failed, for the same error in this one.
_GRACE_SECONDS = 2
# Time for the main thread to print its own error after the coordinator has ended.
_REPORT_SECONDS = 10
# Time for a file written by process 0 to appear on other hosts: network file systems cache folder
# contents for up to a minute.
_SHARED_SECONDS = 60
# Maximum number of bytes of an error to send to the other processes.
_TEXT_BYTES = 1024
# Key prefix in the coordinator's store; a process is alive while its value changes.
_FOLDER = "palimpsest/alive/"
_DONE, _ENDED = "done", "ended: "


def is_first() -> bool:
    """Returns True in the one process that writes and prints."""
    import jax

    return jax.process_index() == 0


def stop_agreed(times: int, received: bool) -> bool:
    """Returns whether the run stops now; the answer is the same in all processes.

    Every process must call this at the same points; `times` counts the calls, including this one.
    With several processes JAX handles SIGTERM and makes all stop at the same call, so none may
    install its own handler; a single process stops if it has `received` the signal.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return received
    return multihost_utils.reached_preemption_sync_point(times)


def gathered(text: str) -> list[str]:
    """Returns every process's text, in order, truncated to `_TEXT_BYTES`; a collective call."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [text]
    row = np.zeros(_TEXT_BYTES, np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    row[: len(data)] = np.frombuffer(data, np.uint8)
    with activity.doing(None, "waiting for the other processes"):
        rows = np.asarray(multihost_utils.process_allgather(row))
    return [bytes(one).rstrip(b"\0").decode(errors="ignore") for one in rows]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raises in every process the UserError that any process raises in the block.

    Otherwise, successful processes would wait for the failed one. Every process must enter the
    block, which must not wait for other processes.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as raised:
        error = raised
    said = ""
    if isinstance(error, Damaged):
        said = f"{error.path}\n{error.reason}"
    elif error:
        said = f"\n{' '.join(str(error).split())}"
    first = next(filter(None, gathered(said)), None)
    if error and first == said:
        raise error
    if first:
        path, _, text = first.partition("\n")
        raise Damaged(path, text) if path else UserError(text)


def check_shared(folder: str) -> None:
    """Raises a UserError in every process unless all see process 0's files in `folder`."""
    import jax

    if jax.process_count() == 1:
        return
    name = gathered(f".shared-{uuid.uuid4().hex}")[0]
    path = files.join(folder, name)
    with failing_together():
        if is_first():
            files.write_bytes(path, b"")
    end = time.monotonic() + _SHARED_SECONDS
    while not (seen := files.exists(path)) and time.monotonic() < end:
        time.sleep(0.5)
    blind = list(filter(None, gathered("" if seen else socket.gethostname())))
    if is_first():
        files.remove(path)
    if blind:
        raise UserError(
            f"--model_dir={folder} is not shared: the process on {blind[0]} does not see what "
            "process 0 wrote there; give a folder on a network file system, or a gs:// URL, that "
            "every host sees"
        )


def check_equal(what: str, text: str) -> None:
    """Raises a UserError in every process unless `text` is the same in all."""
    first, *others = gathered(text)
    for index, other in enumerate(others, 1):
        if other != first:
            raise UserError(
                f"{what}: process 0 sees {first or 'none'}, process {index} {other or 'none'}; "
                "run the same command on every host again, with the same storage for all"
            )


@contextlib.contextmanager
def joined(config: ProcessesConfig) -> Iterator[None]:
    """Joins this process to the others for the duration of the block, if so configured.

    Must be entered before JAX looks for devices. If another process fails, is killed or is
    unreachable for `timeout_seconds`, this one prints a line and exits at once with EXIT_LOST.
    Raises a UserError if the other processes cannot be found.
    """
    if config.coordinator is None:
        yield
        return
    # The other processes must be told about Ctrl-C first.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with activity.doing(None, "waiting for the other processes to join"):
        _initialise(config)
    import jax

    activity.joined(jax.process_index(), jax.process_count())
    watch = _Watch(jax.process_index(), jax.process_count(), config.timeout_seconds)
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    try:
        yield
    except BaseException as error:
        watch.ended(error)
        raise
    watch.done()


def _initialise(config: ProcessesConfig) -> None:
    import jax

    # Twice our timeout, so that our watch reports a lost process before JAX does.
    later = 2 * config.timeout_seconds
    try:
        if config.coordinator == AUTO:
            jax.distributed.initialize(heartbeat_timeout_seconds=later)
        else:
            jax.distributed.initialize(
                config.coordinator,
                config.count,
                config.index,
                cluster_detection_method="deactivate",
                initialization_timeout=_START_SECONDS,
                heartbeat_timeout_seconds=later,
            )
    except (ValueError, RuntimeError) as error:
        why = f"process {config.index} of {config.count} cannot join: {error}"
        if config.coordinator == AUTO:
            why = (
                f"no cluster was detected ({error}); give HOST:PORT with --processes.count and "
                "--processes.index, or leave it out on a single machine"
            )
        raise UserError(f"--processes.coordinator={config.coordinator}: {why}") from error


class _Watch:
    """A thread that sends this process's heartbeat and checks the others'.

    Heartbeats are values in the coordinator's key-value store. The watch also handles SIGABRT,
    which JAX uses to end a process that cannot reach the coordinator.
    """

    def __init__(self, index: int, count: int, timeout: float):
        # The store has no public API; Orbax and jax.experimental import it from here too.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._coordinator = distributed.global_state.coordinator_address or ""
        self._index, self._count, self._timeout = index, count, timeout
        started = getattr(sys.modules.get("__main__"), "__spec__", None)
        self._program = started.name if started else "trainer.pretrain"
        self._beat = min(timeout / 10, 5.0)
        self._activity = activity.current()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._aborted)
        self._publish("0")
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def done(self) -> None:
        """Announces that this process has finished, so that others do not report it as lost."""
        self._stop.set()
        self._publish(_DONE)

    def ended(self, error: BaseException) -> None:
        """Announces `error`; waits first if another process's loss may have caused it."""
        user_error = isinstance(error, UserError | OSError | KeyboardInterrupt | SystemExit)
        if not user_error:
            time.sleep(self._timeout + 2 * self._beat)
        self._stop.set()
        text = f"{_ENDED}{' '.join(str(error).split())[:500]}"
        # In a thread: while JAX aborts this process, a call to the store never returns.
        telling = threading.Thread(target=self._publish, args=(text,), daemon=True)
        telling.start()
        telling.join(_GRACE_SECONDS)
        code = EXIT_USER_ERROR if isinstance(error, UserError | OSError) else 1
        # Otherwise JAX would wait at exit for the others, which wait for this process.
        atexit.register(_exit, 130 if isinstance(error, KeyboardInterrupt) else code)

    def _publish(self, value: str) -> None:
        # Ignore errors: if the coordinator is gone, the watch reports it.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_FOLDER}{self._index}", value, allow_overwrite=True)

    def _run(self) -> None:
        start = time.monotonic()
        last_seen = {index: ("", start) for index in range(self._count) if index != self._index}
        beats = 0
        while not self._stop.wait(self._beat):
            beats += 1
            self._publish(str(beats))
            with contextlib.suppress(Exception):
                for key, value in self._client.key_value_dir_get(_FOLDER):
                    index = int(key.rsplit("/", 1)[1])
                    if index in last_seen and last_seen[index][0] != value:
                        last_seen[index] = value, time.monotonic()
            for index, (value, since) in last_seen.items():
                silent = time.monotonic() - since
                if value.startswith(_ENDED) and not self._stop.wait(_GRACE_SECONDS):
                    self._lose(f"process {index} {value}")
                if value != _DONE and silent > self._timeout:
                    self._lose(f"process {index} has not responded for {silent:.0f} seconds")

    def _on_abort(self, number: int) -> None:
        # The coordinator's error may be about to hit this process as well.
        self._stop.wait(_GRACE_SECONDS)
        # Use our own socket: the aborting thread may hold the client's locks.
        host, _, at = self._coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(at)), timeout=2).close()
            reason = "it was aborted; see the messages above"
        except OSError:
            reason = "the coordinator, process 0, has ended or cannot be reached"
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        # Not sys.exit: compiled code may block the main thread, waiting for the lost process.
        with self._lock:
            if self._stop.is_set():
                # The main thread reports its own error and exits with its own code.
                time.sleep(_REPORT_SECONDS)
            else:
                text = (
                    f"process {self._index} of {self._count} ends: {reason}; run the same command "
                    "on every host again to continue"
                )
                os.write(2, f"python -m {self._program}: error: {text}\n".encode())
                if self._activity:
                    self._activity.ends(text)
            _exit(EXIT_LOST)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
