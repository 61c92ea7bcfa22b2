"""Activities and events of a run.

Any code of a run says what it does with `doing`, and what happened with `tell`; outside of a run,
both do nothing. Whoever wants to know reads the run's `Activity` or is one of its `listeners`.
"""

import collections
import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Kinds of activity, as which the wall time of a process is counted.
STEPPING, COMPILING, DATA = "stepping", "compiling", "waiting for data"
SAVING, EVALUATING, STARTING = "saving", "evaluating", "starting"

# Events. SAVED is internal: no command runs for it.
STARTED, RESUMED, SAVED, FINISHED, PREEMPTED = (
    "started",
    "resumed",
    "saved",
    "finished",
    "preempted",
)
NONFINITE, SPIKE, SKIPPED, BEST = "nonfinite", "spike", "skipped", "best"
CHECKPOINT_FAILED, FAILED, HANG = "checkpoint_failed", "failed", "hang"

# Nested compilations that are remembered, so that none is counted twice.
_SPANS = 1000


class Event(NamedTuple):
    """An event of a run, after `step` updates."""

    name: str
    step: int
    message: str


class _Doing(NamedTuple):
    kind: str
    words: str
    since: float


class Activity:
    """The nested activities of the thread that makes it; the innermost one counts.

    Other threads may read it. `process` of `processes` is this process's index, `step` the number
    of updates made, `began` the Unix time of the beginning, and `moved` the monotonic time at which
    the run last made progress.
    """

    def __init__(self) -> None:
        self.began, self.moved = time.time(), time.monotonic()
        self.process, self.processes, self.step = 0, 1, 0
        self.thread = threading.get_ident()
        self.listeners: list[Callable[[Event], None]] = []
        self.endings: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._stack = [_Doing(STARTING, STARTING, self.moved)]
        self._counted = self.moved
        self._seconds: dict[str, float] = {}
        self._compiled: collections.deque[tuple[float, float]] = collections.deque(maxlen=_SPANS)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent so far, by kind."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def now(self) -> _Doing:
        """Returns the innermost activity."""
        return self._stack[-1]

    def tell(self, name: str, message: str = "", step: int | None = None) -> None:
        """Tells all listeners of an event, after `step` updates or those made so far."""
        for listener in self.listeners:
            listener(Event(name, self.step if step is None else step, message))

    def ends(self, message: str) -> None:
        """Tells of a failure that ends the process at once, and lets the listeners finish."""
        self.tell(FAILED, message)
        for ending in self.endings:
            ending()

    def enter(self, kind: str | None, words: str) -> None:
        """Begins an activity inside the present one; None counts as the same kind."""
        with self._lock:
            self._count()
            self._stack.append(_Doing(kind or self._stack[-1].kind, words, self._counted))
            self.moved = self._counted

    def leave(self) -> None:
        """Ends the innermost activity."""
        with self._lock:
            self._count()
            self._stack.pop()
            self.moved = self._counted

    def compiled(self, seconds: float) -> None:
        """Counts the `seconds` before now as compilation, but not twice."""
        end = time.monotonic()
        begin = end - seconds
        with self._lock:
            self._count()
            while self._compiled and self._compiled[-1][0] >= begin:
                first, last = self._compiled.pop()
                seconds -= last - first
            self._compiled.append((begin, end))
            self._add(self._stack[-1].kind, -seconds)
            self._add(COMPILING, seconds)

    def _count(self) -> None:
        before, self._counted = self._counted, time.monotonic()
        self._add(self._stack[-1].kind, self._counted - before)

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds


_CURRENT: contextvars.ContextVar[Activity | None] = contextvars.ContextVar("run", default=None)


def current() -> Activity | None:
    """Returns the activity of the run in this thread, or None."""
    return _CURRENT.get()


@contextlib.contextmanager
def running(activity: Activity) -> Iterator[None]:
    """Makes `activity` this thread's for the duration of the block."""
    token = _CURRENT.set(activity)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def doing(kind: str | None, words: str = "") -> Iterator[None]:
    """Says what the block does; `kind` is one of the constants, or None for the present one.

    Without `words`, the kind says enough.
    """
    activity = _CURRENT.get()
    if activity is None:
        yield
        return
    activity.enter(kind, words or kind or "")
    try:
        yield
    finally:
        activity.leave()


def advanced(step: int | None = None) -> None:
    """Says that the run makes progress, with `step` updates made if given."""
    if activity := _CURRENT.get():
        activity.moved = time.monotonic()
        if step is not None:
            activity.step = step


def tell(name: str, message: str = "", step: int | None = None) -> None:
    """Tells the listeners of this thread's run of an event."""
    if activity := _CURRENT.get():
        activity.tell(name, message, step)


def begun(step: int, resumed: bool, message: str) -> None:
    """Says that the run begins or goes on after `step` updates."""
    advanced(step)
    tell(RESUMED if resumed else STARTED, message)


def joined(process: int, processes: int) -> None:
    """Says which process of the run this is."""
    if activity := _CURRENT.get():
        activity.process, activity.processes = process, processes


@functools.cache
def count_compilations() -> None:
    """Counts what JAX compiles from now on, including programs read from its cache."""
    import jax

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/") and (activity := _CURRENT.get()):
            activity.compiled(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)


@contextlib.contextmanager
def repeated(seconds: float, call: Callable[[], None], name: str) -> Iterator[None]:
    """Calls `call` every `seconds` in a thread until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
