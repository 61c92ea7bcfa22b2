"""A server's counters for Prometheus, and its access log, a line of JSON for each call."""

import collections
import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

_PREFIX = "palimpsest_serve"


class Account:
    """Counts calls and what they sent, and writes the access log to `log`, if there is one."""

    def __init__(self, log: IO[str] | None = None):
        self._log, self._lock = log, threading.Lock()
        self._begun = time.monotonic()
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._sums: collections.Counter[str] = collections.Counter()
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def gauge(self, name: str, words: str, value: Callable[[], float]) -> None:
        """Adds a value that `metrics` asks for."""
        self._gauges[name] = words, value

    def add(self, **amounts: float) -> None:
        """Adds to the sums: batches, rows, bytes, seconds of making."""
        with self._lock:
            self._sums.update(amounts)

    def ended(self, call: str, status: str, begun: float, facts: Mapping[str, Any]) -> None:
        """Counts a call that ended with a status, "ok" or why not, and logs it.

        A full disk loses lines of the log, and no call.
        """
        seconds = time.monotonic() - begun
        with self._lock:
            self._calls[call, status] += 1
            if self._log is None:
                return
            moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            line = {"time": moment, "call": call, "status": status, "seconds": round(seconds, 4)}
            with contextlib.suppress(OSError):
                self._log.write(json.dumps(line | dict(facts)) + "\n")
                self._log.flush()

    def metrics(self) -> str:
        """Returns all counters in Prometheus' text format."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        with self._lock:
            calls, sums = dict(self._calls), dict(self._sums)
        name = f"{_PREFIX}_calls_total"
        yield from _heading(name, "counter", "calls by kind and how they ended")
        for (call, status), count in sorted(calls.items()):
            yield f'{name}{{call="{call}",status="{status}"}} {count}'
        for key, total in sorted(sums.items()):
            name = f"{_PREFIX}_{key}_total"
            yield from _heading(name, "counter", f"{key.replace('_', ' ')} of batches sent")
            yield f"{name} {total:.10g}"
        gauges = {"up_seconds": ("seconds since the start", self._up), **self._gauges}
        for key, (words, value) in gauges.items():
            name = f"{_PREFIX}_{key}"
            yield from _heading(name, "gauge", words)
            yield f"{name} {value():.10g}"

    def _up(self) -> float:
        return time.monotonic() - self._begun


def _heading(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"
