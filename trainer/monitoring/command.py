"""`--on_event`: a shell command of the user's, run for events of a run."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from trainer.monitoring import activity as act
from trainer.monitoring.activity import Activity, Event

# Events for which every process runs the command; for others, only the first.
_OF_ANY = (act.FAILED, act.HANG)
# Limits in seconds: of one command, and of the wait for those that still run when the run ends.
_LIMIT, _AT_END = 60.0, 20.0


class Command:
    """Runs a command for each event, one after another, in a thread that nothing waits for."""

    def __init__(self, activity: Activity, command: str | None, model_dir: str):
        self._activity, self._command, self._model_dir = activity, command, model_dir
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="on_event", daemon=True)
        if command:
            self._thread.start()
            activity.listeners.append(self._hear)
            activity.endings.append(self.end)

    def end(self) -> None:
        """Waits a little for commands that still run: a container ends with its run."""
        if self._command:
            self._events.put(None)
            self._thread.join(_AT_END)

    def _hear(self, event: Event) -> None:
        if event.name != act.SAVED and (event.name in _OF_ANY or not self._activity.process):
            self._events.put(event)

    def _run(self) -> None:
        while event := self._events.get():
            try:
                failure = self._failure(event)
            except Exception as error:
                failure = str(error)
            if failure:
                print(f"--on_event: {event.name}: {failure}", file=sys.stderr, flush=True)

    def _failure(self, event: Event) -> str:
        """Runs the command; returns why it failed, or ""."""
        assert self._command
        value: dict[str, Any] = {
            "event": event.name,
            "step": event.step,
            "model_dir": self._model_dir,
            "message": event.message,
        }
        variables = {f"PALIMPSEST_{name.upper()}": str(each) for name, each in value.items()}
        value |= {"process": self._activity.process, "time": time.time()}
        # A session of its own: Ctrl-C in a terminal is not for the command.
        running = subprocess.Popen(
            self._command,
            shell=True,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = running.communicate(json.dumps(value) + "\n", timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return f"ended after {_LIMIT:.0f} s"
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        return f"exit code {running.returncode}: {last}" if running.returncode else ""
