"""Says what a run waits for that makes no progress."""

import contextlib
import sys
import time
import traceback
from types import FrameType

from tasks.terminal.progress import clock
from trainer.monitoring.activity import COMPILING, HANG, STEPPING, Activity, repeated

# How often a run is looked at, in seconds, and at least so often per limit.
_LOOK_SECONDS, _LOOKS = 10.0, 10
# Files of JAX that trace, lower and compile.
_COMPILERS = ("/compiler.py", "/interpreters/partial_eval.py", "/interpreters/mlir.py")


class Hang(contextlib.ExitStack):
    """A thread that prints a line when the run makes no progress for `limit` seconds; 0: never.

    It prints another whenever the time has doubled. The first, and each that names another cause
    than the one before, is followed by the stack of the run's thread and told as an event. It
    cannot look while compiled code of another thread holds Python's lock.
    """

    def __init__(self, activity: Activity, limit: float):
        super().__init__()
        self._activity, self._limit, self._next = activity, limit, limit
        self._moved, self._said = activity.moved, ""
        if limit:
            look = min(_LOOK_SECONDS, limit / _LOOKS)
            self.enter_context(repeated(look, self._look, "hang"))

    def _look(self) -> None:
        activity, now = self._activity, time.monotonic()
        moved = activity.moved
        if moved != self._moved:
            self._moved, self._next, self._said = moved, self._limit, ""
        still = now - moved
        if still < self._next:
            return
        frame = sys._current_frames().get(activity.thread)
        what, self._next = _what(activity, frame), 2 * still
        first, self._said = what != self._said, what
        message = f"{what} for {clock(still)} after update {activity.step:,}"
        several = activity.processes > 1
        who = f"process {activity.process} of {activity.processes}: " if several else ""
        lines = [f"{who}no progress: {message}"]
        if frame and first:
            lines += ["the Python stack, most recent call last:"]
            lines += "".join(traceback.format_stack(frame)).splitlines()
        if first:
            activity.tell(HANG, message)
        # Nobody may read standard error; the event and the next look do not depend on it.
        with contextlib.suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)


def _what(activity: Activity, frame: FrameType | None) -> str:
    doing = activity.now()
    words = f"update {activity.step + 1:,}" if doing.words == STEPPING else doing.words
    while frame:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/jax/_src/" in path and path.endswith(_COMPILERS):
            return f"{COMPILING} ({words})"
        frame = frame.f_back
    return words
