"""Kills of runs on a finished cache, while they start, update, evaluate or write a checkpoint."""

import argparse
import pathlib
import random
import shutil
import signal
import time
from typing import NamedTuple

from tasks.terminal import progress
from tasks.terminal.table import table
from trainer.faults.command import DEADLINE_SECONDS, draw_signal
from trainer.faults.subject import Subject, differences

# Phases that kills are aimed at, with their weights. A kill may still land in another phase; the
# table shows the actual one.
_PHASE_WEIGHTS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}


class Kill(NamedTuple):
    """A signal that ended a run.

    Attributes:
      name: name of the signal.
      activity: what the run was doing.
      seconds: time since the run was started.
      step: its last step with metrics.
      checkpoint: step of its newest checkpoint, 0 if there was none.
    """

    name: str
    activity: str
    seconds: float
    step: int
    checkpoint: int


def undisturbed_run(
    flags: argparse.Namespace, settings: list[str], folder: pathlib.Path
) -> tuple[Subject, float]:
    """Makes a run that nothing disturbs; returns it and the seconds to its first update."""
    begin = time.monotonic()
    undisturbed = Subject(flags, settings, folder)
    undisturbed.start()
    undisturbed.process.wait_until(lambda: bool(undisturbed.lines()), DEADLINE_SECONDS)
    start_seconds = time.monotonic() - begin
    undisturbed.finish()
    return undisturbed, start_seconds


def kill_runs(
    flags: argparse.Namespace,
    settings: list[str],
    undisturbed: Subject,
    start_seconds: float,
    generator: random.Random,
) -> tuple[list[Kill], int, list[str]]:
    """Kills runs `flags.kills` times, finishes them, and compares them with the undisturbed one.

    Returns:
      (the kills, the number of runs, what went wrong).
    """
    kills: list[Kill] = []
    failures: list[str] = []
    runs = 0
    with progress.shown("killing", flags.kills) as bar:
        while not runs or len(kills) < flags.kills:
            runs += 1
            subject = Subject(flags, settings, undisturbed.folder.with_name(f"killed-{runs}"))
            missing = flags.kills - len(kills)
            # Ascending, and early enough that the run is unlikely to finish before its kill.
            targets = sorted(generator.randrange(1, flags.steps * 9 // 10) for _ in range(missing))
            for target in targets:
                phase = generator.choices([*_PHASE_WEIGHTS], [*_PHASE_WEIGHTS.values()])[0]
                kill = _start_and_kill(subject, phase, target, start_seconds, generator)
                if kill is None:
                    break
                kills.append(kill)
                bar.update(len(kills))
            subject.start()
            subject.finish()
            found = differences(undisturbed, subject, flags.steps)
            failures += [f"{subject.folder}: {difference}" for difference in found]
            if not found:
                shutil.rmtree(subject.folder)
    return kills, runs, failures


def _start_and_kill(
    subject: Subject, phase: str, target: int, start_seconds: float, generator: random.Random
) -> Kill | None:
    """Starts the run and kills it; returns None if the run finished first.

    Args:
      subject: the run.
      phase: one of _PHASE_WEIGHTS.
      target: step after which the run is killed, unless it is killed while it starts.
      start_seconds: seconds from the command to the first update.
      generator: source of the random moment.
    """
    begin = time.monotonic()
    subject.start()
    if phase == "start":
        time.sleep(generator.uniform(0, start_seconds))
    else:
        in_phase = {"evaluation": subject.is_evaluating, "checkpoint": subject.is_saving}.get(phase)

        def reached() -> bool:
            arrived = subject.step() >= target
            return arrived and subject.is_training() and (in_phase is None or in_phase())

        subject.process.wait_until(reached, DEADLINE_SECONDS)
        time.sleep(generator.uniform(0, 0.05))
    number = draw_signal(generator)
    # Stop the run first, so that the recorded activity is the one in which it is killed.
    if number == signal.SIGKILL:
        subject.process.signal(signal.SIGSTOP)
    finished = not subject.running
    kill = Kill(
        number.name,
        subject.activity(),
        time.monotonic() - begin,
        subject.step(),
        subject.checkpoint(),
    )
    if finished:
        subject.check_exit_code()
        return None
    subject.end(number)
    return kill


def kills_table(kills: list[Kill]) -> str:
    """Returns the kills as a Markdown table."""
    header = (
        *("kill", "after (s)", "while", "last step with metrics", "newest checkpoint"),
        "signal",
    )
    rows = [
        (number, f"{kill.seconds:.2f}", kill.activity, kill.step, kill.checkpoint, kill.name)
        for number, kill in enumerate(kills, 1)
    ]
    return table(header, rows, markdown=True)
