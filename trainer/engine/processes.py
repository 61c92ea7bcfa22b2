"""Several processes, one on each host, that make one run by `jax.distributed`.

All are started with the same command and find one another at the coordinator, process 0. What ends
one ends the others: they cannot go on without its devices and would wait for it for ever. JAX's own
watch ends them too, with a stack trace from C++; ours says in a line who is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from trainer.config.processes import AUTO, ProcessesConfig

# What a process ends with when another one is gone: EX_PROTOCOL, "the other side broke off".
EXIT_LOST = 76

# How long processes wait for one another at the start: JAX's own default.
_START_SECONDS = 300
# How long one waits, when another has ended with an error, for the same error of its own.
_GRACE_SECONDS = 2
# Keys of the coordinator's store; a process is heard of when its value changes.
_FOLDER = "palimpsest/alive/"
_DONE, _ENDED = "done", "ended: "


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    import jax

    return jax.process_index() == 0


def stop_agreed(step: int, received: bool) -> bool:
    """Whether the run stops after `step`; every process gets the same answer and has to ask.

    `received`: SIGTERM came to a process that is alone. Of several, JAX hears it in any one and
    lets all stop after the same step, so none may have a handler of its own.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return received
    return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def joined(config: ProcessesConfig) -> Iterator[None]:
    """Inside, this process is one of several, if the configuration says so.

    It has to be entered before JAX looks for devices. When another process ends with an error, is
    killed or cannot be reached for `timeout_seconds`, this one prints a line and exits with
    EXIT_LOST, wherever it is.

    Raises:
      UserError: the others cannot be found.
    """
    if config.coordinator is None:
        yield
        return
    _initialise(config)
    import jax

    watch = _Watch(jax.process_index(), jax.process_count(), config.timeout_seconds)
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    try:
        yield
    except BaseException as error:
        watch.ended(error)
        raise
    watch.done()


def _initialise(config: ProcessesConfig) -> None:
    import jax

    # JAX's watch comes second, so that ours has the word.
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
        if config.coordinator == AUTO:
            raise UserError(
                f"--processes.coordinator=auto: nothing here says which processes there are "
                f"({error}); give HOST:PORT with --processes.count and --processes.index, or leave "
                "it out on a lone machine"
            ) from error
        raise UserError(
            f"--processes.coordinator={config.coordinator}: process {config.index} of "
            f"{config.count} cannot join: {error}"
        ) from error


class _Watch:
    """A thread that says in the coordinator's store that this process lives, and looks for others.

    It also takes SIGABRT, which is how JAX ends a process that cannot reach the coordinator.
    """

    def __init__(self, index: int, count: int, timeout: float):
        # The store has no public name; Orbax and jax.experimental take it from here too.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._coordinator = distributed.global_state.coordinator_address or ""
        self._index, self._count, self._timeout = index, count, timeout
        self._beat = min(timeout / 10, 5.0)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._take_abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._aborted)
        self._say("0")
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def done(self) -> None:
        """The run is finished here; the others may be a moment later."""
        self._stop.set()
        self._say(_DONE)

    def ended(self, error: BaseException) -> None:
        """Tells the others of an error, unless it is only the loss of one of them.

        That is told apart by waiting for the watch to find one missing; it then ends the process.
        """
        user_error = isinstance(error, UserError | OSError | KeyboardInterrupt | SystemExit)
        if not user_error:
            time.sleep(self._timeout + 2 * self._beat)
        self._stop.set()
        self._say(f"{_ENDED}{' '.join(str(error).split())[:500]}")
        code = EXIT_USER_ERROR if isinstance(error, UserError | OSError) else 1
        # Without this, JAX waits at exit for the others, which wait for this one.
        atexit.register(_exit, 130 if isinstance(error, KeyboardInterrupt) else code)

    def _say(self, value: str) -> None:
        # The coordinator may be gone; then the watch of whoever looks for it says so.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_FOLDER}{self._index}", value, allow_overwrite=True)

    def _run(self) -> None:
        start = time.monotonic()
        heard = {index: ("", start) for index in range(self._count) if index != self._index}
        number = 0
        while not self._stop.wait(self._beat):
            number += 1
            self._say(str(number))
            with contextlib.suppress(Exception):
                for key, value in self._client.key_value_dir_get(_FOLDER):
                    index = int(key.rsplit("/", 1)[1])
                    if index in heard and heard[index][0] != value:
                        heard[index] = value, time.monotonic()
            for index, (value, since) in heard.items():
                silent = time.monotonic() - since
                if value.startswith(_ENDED) and not self._stop.wait(_GRACE_SECONDS):
                    self._lose(f"process {index} {value}")
                if value != _DONE and silent > self._timeout:
                    self._lose(f"process {index} has not been heard of for {silent:.0f} seconds")

    def _take_abort(self, number: int) -> None:
        # Not by the client, whose locks the aborting thread may hold.
        host, _, at = self._coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(at)), timeout=2).close()
            reason = "it was aborted, see above"
        except OSError:
            reason = "the coordinator, process 0, has ended or cannot be reached"
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        # Not sys.exit: the main thread may wait for the lost process in compiled code, for ever.
        with self._lock:
            if not self._stop.is_set():
                text = (
                    f"process {self._index} of {self._count} ends: {reason}; start the same "
                    "command on every host again, it goes on from the newest checkpoint"
                )
                os.write(2, f"python -m trainer.pretrain: error: {text}\n".encode())
            _exit(EXIT_LOST)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
