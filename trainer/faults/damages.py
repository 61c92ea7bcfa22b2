"""Faults of runs on a finished cache other than kills.

They are damaged checkpoints, a second run in the same directory, and a task that is edited.
"""

import argparse
import functools
import os
import random
import shutil
from typing import NamedTuple

from tasks.terminal import progress
from tasks.terminal.command_line import EXIT_USER_ERROR
from tasks.terminal.process_group import ProcessGroup
from tasks.terminal.table import table
from trainer.faults.command import DEADLINE_SECONDS
from trainer.faults.subject import Subject, differences

_KINDS = ("bit", "bit", "cut", "zeros", "gone")


class Damage(NamedTuple):
    """Damage to a file of a newest checkpoint.

    Attributes:
      file: path in the checkpoint.
      kind: one of _KINDS.
      outcome: what the run made of it.
    """

    file: str
    kind: str
    outcome: str


def _damage(
    undisturbed: Subject, subject: Subject, generator: random.Random, steps: int
) -> tuple[Damage, list[str]]:
    """Damages a file of the newest checkpoint of a copy of a run, and resumes it.

    Returns:
      What happened, and what went wrong.
    """
    shutil.copytree(undisturbed.folder, subject.folder)
    shutil.rmtree(subject.folder / f"checkpoint_{steps}")
    newest = subject.folder / f"checkpoint_{subject.checkpoint()}"
    path = generator.choice(
        [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    )
    kind = generator.choice(_KINDS)
    data = bytearray(path.read_bytes())
    if kind == "bit":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    contents = {"cut": bytes(data[: len(data) // 2]), "zeros": bytes(len(data))}
    path.unlink()
    if kind != "gone":
        path.write_bytes(contents.get(kind, bytes(data)))
    name, failures = str(path.relative_to(newest)), []
    subject.start()
    subject.process.wait(DEADLINE_SECONDS)
    subject.check_output()
    outcome = "harmless"
    if subject.process.exit_code:
        said = subject.process.output().splitlines()[-1]
        outcome = "named; fell back"
        if subject.process.exit_code != EXIT_USER_ERROR or "is damaged" not in said:
            failures.append(f"{kind} in {name}: {said}")
        if "newest sound one is checkpoint_" not in said:
            failures.append(f"{kind} in {name}: no sound checkpoint is offered: {said}")
        subject.start("--checkpoint.on_damage=fall_back")
        subject.finish()
    failures += [f"{kind} in {name}: {text}" for text in differences(undisturbed, subject, steps)]
    return Damage(name, kind, outcome), failures


def _start_twice(undisturbed: Subject, subject: Subject, steps: int) -> list[str]:
    """Starts a run and then another in its folder; returns what went wrong."""
    subject.start()
    subject.process.wait_until(lambda: bool(subject.lines()), DEADLINE_SECONDS)
    log = subject.folder.with_suffix(".second.log")
    second = ProcessGroup(subject.command, log)
    second.wait(DEADLINE_SECONDS)
    said = second.output()
    failures = []
    if second.exit_code != EXIT_USER_ERROR or "another run is writing" not in said:
        failures.append(f"a second run ended with {second.exit_code}: {said[-300:]}")
    if "Traceback" in said:
        failures.append(f"a second run printed a traceback: {said[-1000:]}")
    subject.finish()
    return failures + differences(undisturbed, subject, steps)


# A task module that redefines a task, with windows of one token less.
_EDITED_MODULE = "chaos_edited_task"
_EDITED_TASK = """
import dataclasses

from tasks import registry

task = registry.get(%r)
objective = task.objective


class Edited(type(objective)):
    def window_tokens(self, lengths):
        return super().window_tokens(lengths) - 1


settings = {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)}
TASKS = (dataclasses.replace(task, objective=Edited(**settings)),)
"""


def _edit_task(undisturbed: Subject, subject: Subject, task: str, steps: int) -> list[str]:
    """Resumes a copy of a run with another objective of its task, then with its own.

    Returns:
      What went wrong.
    """
    shutil.copytree(undisturbed.folder, subject.folder)
    shutil.rmtree(subject.folder / f"checkpoint_{steps}")
    module = subject.folder.with_name(f"{_EDITED_MODULE}.py")
    module.write_text(_EDITED_TASK % task)
    path = os.pathsep.join(filter(None, (str(module.parent), os.environ.get("PYTHONPATH"))))
    subject.start(f"--task_module={_EDITED_MODULE}", env={**os.environ, "PYTHONPATH": path})
    subject.process.wait(DEADLINE_SECONDS)
    subject.check_output()
    said = subject.process.output().splitlines()[-1]
    failures = []
    if subject.process.exit_code != EXIT_USER_ERROR or f"objective of {task}" not in said:
        failures.append(f"an edited task ended with {subject.process.exit_code}: {said}")
    module.unlink()
    subject.start()
    subject.finish()
    return failures + differences(undisturbed, subject, steps)


def damage_checkpoints(
    flags: argparse.Namespace, settings: list[str], undisturbed: Subject, generator: random.Random
) -> tuple[list[Damage], list[str]]:
    """Damages `flags.damages` checkpoints, each of a copy of the undisturbed run.

    Returns:
      (the damages, what went wrong).
    """
    damages: list[Damage] = []
    failures: list[str] = []
    with progress.shown("damaging", flags.damages) as bar:
        while len(damages) < flags.damages:
            folder = undisturbed.folder.with_name(f"damaged-{len(damages) + 1}")
            subject = Subject(flags, settings, folder)
            damage, found = _damage(undisturbed, subject, generator, flags.steps)
            damages.append(damage)
            failures += _noted(subject, found)
            bar.update(len(damages))
    return damages, failures


def try_refused(
    flags: argparse.Namespace, settings: list[str], undisturbed: Subject
) -> tuple[dict[str, bool], list[str]]:
    """Starts runs that must be refused.

    Returns:
      (fault -> whether it was refused, what went wrong).
    """
    refused: dict[str, bool] = {}
    failures: list[str] = []
    for name, fault, check in (
        ("twice", "a second run in the directory of a run", _start_twice),
        (
            *("edited", "a run whose task was edited"),
            functools.partial(_edit_task, task=flags.task),
        ),
    ):
        subject = Subject(flags, settings, undisturbed.folder.with_name(name))
        found = check(undisturbed, subject, steps=flags.steps)
        refused[fault] = not found
        failures += _noted(subject, found)
    return refused, failures


def _noted(subject: Subject, found: list[str]) -> list[str]:
    """Returns what went wrong, with the run's folder; deletes the folder if nothing did."""
    if not found:
        shutil.rmtree(subject.folder)
    return [f"{subject.folder}: {text}" for text in found]


def damages_table(damages: list[Damage]) -> str:
    """Returns the damages as a Markdown table."""
    rows = [(number, *damage) for number, damage in enumerate(damages, 1)]
    return table(("damage", "file", "kind", "outcome"), rows, markdown=True)
