"""Limits of one client's streams, memory and requests, which leave the server to the others."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from tasks.terminal.command_line import UserError

# Seconds of requests that a client may make at once.
_BURST_SECONDS = 2.0


class Busy(UserError):
    """A client is at a limit; the same call is answered later."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Open streams of one client, bytes that they hold, and its requests in a second."""

    streams: int
    bytes: int
    requests: float


@dataclasses.dataclass
class _Client:
    allowance: float
    asked: float
    streams: int = 0
    bytes: int = 0


class Gate:
    """The clients of a server by name; there are as many as tokens."""

    def __init__(self, limits: Limits):
        self._limits, self._lock = limits, threading.Lock()
        self._clients: dict[str, _Client] = {}

    def count(self, name: str) -> None:
        """Counts a client's request; raises Busy if they come too fast."""
        now, most = time.monotonic(), self._limits.requests * _BURST_SECONDS
        with self._lock:
            client = self._clients.setdefault(name, _Client(most, now))
            earned = (now - client.asked) * self._limits.requests
            client.allowance, client.asked = min(most, client.allowance + earned), now
            if client.allowance < 1:
                raise Busy(f"more than {self._limits.requests:g} requests a second: ask later")
            client.allowance -= 1

    @contextlib.contextmanager
    def stream(self, name: str, size: int) -> Iterator[None]:
        """Holds `size` bytes for a client's stream in the block; raises Busy beyond its limits."""
        self._hold(name, size)
        try:
            yield
        finally:
            with self._lock:
                self._clients[name].streams -= 1
                self._clients[name].bytes -= size

    def _hold(self, name: str, size: int) -> None:
        limits = self._limits
        if size > limits.bytes:
            raise UserError(
                f"these batches take {size:,} bytes of the server's memory, and a client may take "
                f"{limits.bytes:,}: ask for smaller batches or for parts of them"
            )
        with self._lock:
            client = self._clients.setdefault(name, _Client(0.0, time.monotonic()))
            if client.streams >= limits.streams:
                raise Busy(f"{limits.streams} streams of this client are open: ask later")
            if client.bytes + size > limits.bytes:
                raise Busy(f"this client's streams take {client.bytes:,} bytes: ask later")
            client.streams += 1
            client.bytes += size

    @property
    def open(self) -> tuple[int, int]:
        """The open streams of all clients, and the bytes that they hold."""
        with self._lock:
            clients = list(self._clients.values())
        return sum(each.streams for each in clients), sum(each.bytes for each in clients)
