"""Accounts of a run's wall time: `goodput.json`, with an entry for every process of the run.

Goodput is the share of updates that count in the wall time, as in MaxText and ML Goodput
Measurement (https://github.com/AI-Hypercomputer/ml-goodput-measurement). What a process did after
the state from which a later one resumed is lost; the time between two processes is down time.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.progress import clock
from trainer.monitoring import activity as act
from trainer.monitoring.activity import Activity, Event, repeated

GOODPUT_FILE = "goodput.json"
LOST, DOWN = "lost", "down"
KINDS = {
    act.STEPPING: "updates that count, and their metrics",
    act.COMPILING: "tracing and compiling programs, or reading them from the cache",
    act.DATA: "waiting for batches",
    act.SAVING: "waiting for checkpoints",
    act.EVALUATING: "evaluations",
    act.STARTING: "imports, opening the data, restoring",
    LOST: "work after the checkpoint from which the next process resumed",
    DOWN: "between two processes",
}

# Between two writes of the file; what a killed process did since the last counts as down time.
_SECONDS, _SECONDS_REMOTE = 10.0, 60.0
# Beyond so many saved states of a process, every second one of the older half is forgotten.
_MARKS = 200


class Goodput(contextlib.ExitStack):
    """Records the wall time of a run from its first event on, in process 0; prints it at the end.

    A file that cannot be read or written costs a line on stderr, not the run.
    """

    def __init__(self, activity: Activity, model_dir: str):
        super().__init__()
        self._activity, self._path = activity, files.join(model_dir, GOODPUT_FILE)
        self._remote = files.is_remote(model_dir)
        self._entries: list[dict[str, Any]] = []
        self._own: dict[str, Any] | None = None
        self._lock, self._writing, self._warned = threading.Lock(), threading.Lock(), False
        activity.listeners.append(self._hear)

    def end(self, complete: bool) -> None:
        """Writes the last record; `complete` says that the last state is saved."""
        self.close()
        if self._own is None:
            return
        self._own["complete"] = complete
        self._write()
        print(text(self._entries), flush=True)

    def _hear(self, event: Event) -> None:
        if event.name in (act.STARTED, act.RESUMED) and not self._activity.process:
            try:
                self._entries = read(self._path)
            except Exception as error:
                print(f"the wall time of this run is not recorded: {error}", file=sys.stderr)
                return
            began = self._activity.began
            self._own = {"began": began, "from": event.step, "marks": [], "complete": False}
            self._entries.append(self._own)
            seconds = _SECONDS_REMOTE if self._remote else _SECONDS
            self.enter_context(repeated(seconds, self._write, "goodput"))
        if self._own and event.name in (act.STARTED, act.RESUMED, act.SAVED):
            with self._lock:
                marks = self._own["marks"]
                marks.append([event.step, self._seconds()])
                if len(marks) > _MARKS:
                    del marks[1 : _MARKS // 2 : 2]
            if event.name != act.SAVED or not self._remote:
                self._write()

    def _seconds(self) -> dict[str, float]:
        return {kind: round(each, 3) for kind, each in self._activity.seconds().items()}

    def _write(self) -> None:
        assert self._own
        with self._writing:
            # Not held while a slow store writes: the run adds its marks meanwhile.
            with self._lock:
                self._own |= {"step": self._activity.step, "seconds": self._seconds()}
                data = json.dumps({"processes": self._entries}).encode()
            try:
                files.write_bytes(self._path, data)
            except Exception as error:
                if not self._warned:
                    print(f"{self._path} is not written: {error}", file=sys.stderr)
                self._warned = True


def read(path: str) -> list[dict[str, Any]]:
    """Returns the entries of a goodput.json, [] without one; raises UserError if it is damaged."""
    if not files.exists(path):
        return []
    try:
        entries = files.read_json(path)["processes"]
        shares(entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: restore it from a copy, or delete it") from error
    return entries


def shares(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds of a run by kind, one of `KINDS`; their sum is its wall time."""
    found = dict.fromkeys(KINDS, 0.0)
    for number, entry in enumerate(entries):
        later = entries[number + 1 :]
        whole, kept = entry["seconds"], entry["seconds"]
        if later:
            resumed = min(each["from"] for each in later)
            if not (entry["complete"] and entry["step"] <= resumed):
                marks = [seconds for step, seconds in entry["marks"] if step <= resumed]
                kept = marks[-1] if marks else {}
            gap = later[0]["began"] - entry["began"] - sum(whole.values())
            found[DOWN] += max(0.0, gap)
        for kind, seconds in kept.items():
            found[kind] += seconds
        found[LOST] += sum(whole.values()) - sum(kept.values())
    return found


def text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line with the goodput of a run and where the rest of its time went."""
    spent = shares(entries)
    total = sum(spent.values()) or 1.0
    others = ", ".join(
        f"{kind} {seconds / total:.1%}"
        for kind, seconds in spent.items()
        if kind != act.STEPPING and seconds / total >= 0.0005
    )
    several = f" in {len(entries)} processes" if len(entries) > 1 else ""
    share = f"{spent[act.STEPPING] / total:.1%} of {clock(total)}{several}"
    return f"goodput       {share}" + (f"; {others}" if others else "")
