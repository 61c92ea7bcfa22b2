"""Why a run stops: a signal, an error, or evaluations that no longer improve."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax

from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from trainer.engine import processes
from trainer.monitoring import activity

# Exit code after SIGTERM, once the state is saved: EX_TEMPFAIL, "run the same command again".
EXIT_PREEMPTED = 75

_SIGTERM, _CTRL_C = "SIGTERM", "Ctrl-C"

Result = TypeVar("Result")


class Stop:
    """Why a run stops; false while it continues.

    Its context records Ctrl-C and SIGTERM, with which clouds and job queues announce a preemption.
    A second Ctrl-C has its usual effect. With several processes, JAX handles SIGTERM and makes
    all of them stop, and Ctrl-C ends them at once.

    `cause` is the signal, `error` the error that ends the run once its state is saved, `early` the
    reason why training ends before its last step.
    """

    def __init__(self) -> None:
        self.cause = _SIGTERM
        self.error: UserError | None = None
        self.early: str | None = None
        self._requested = False
        self._received = False
        self._alone = jax.process_count() == 1
        self._times = 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._requested or self.error or self.early)

    def asked(self) -> bool:
        """Returns whether a signal stops the run now; all processes must ask at the same points."""
        activity.advanced()
        self._times += 1
        self._requested |= processes.stop_agreed(self._times, self._received)
        return self._requested

    def received_alone(self) -> bool:
        """Returns whether this process received a signal and is the only one.

        Several processes agree to stop only between updates.
        """
        return self._alone and self._received

    def agreed(self, call: Callable[[], Result | None]) -> Result | None:
        """Returns the result of `call`; None, or a UserError, stops the run.

        `call` returns None when it gives up because the run was asked to stop. Raises its error
        if there are other processes, which may not know of the failure.
        """
        try:
            result = call()
        except UserError as error:
            if not self._alone:
                raise
            self.error = error
            return None
        self._requested |= result is None
        return result

    def exit_code(self, step: int, complete: bool) -> int:
        """Prints why a run ends after `step`; returns its exit code, or raises its error."""
        if self.error:
            raise self.error
        if self.early:
            print(f"stopped early at step {step}: {self.early}")
        if self.early or complete or not self._requested:
            activity.tell(
                activity.FINISHED, f"stopped early: {self.early}" if self.early else "", step
            )
            return 0
        said = f"saved step {step}; run the same command to resume"
        said = f"{self.cause}: {said if step else 'no update has been made yet'}"
        print(said, file=sys.stderr)
        if self.cause == _CTRL_C:
            return EXIT_INTERRUPTED
        activity.tell(activity.PREEMPTED, said, step)
        return EXIT_PREEMPTED

    def __enter__(self) -> Self:
        # Python lets no other thread handle signals: there, they have their usual effect.
        if self._alone and threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminated)
            # A shell that starts a command with & makes it ignore Ctrl-C.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _terminated(self, *_: Any) -> None:
        self._received = True

    def _interrupted(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        self._received, self.cause = True, _CTRL_C
        os.write(2, b"\nCtrl-C: saving the state after this update; press again to stop at once\n")
