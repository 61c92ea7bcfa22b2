"""Breaks training runs at random moments and checks that the result is the same, bit for bit.

    python -m trainer.chaos --model_dir=DIR --kills=10 --damages=5 --steps=200 --seed=7

One run trains undisturbed. Another run of the same configuration is ended by SIGKILL, Ctrl-C or
SIGTERM at random moments, while it starts, makes updates, evaluates or writes a checkpoint, and
restarted each time by the same command. Then files of newest checkpoints are damaged: the run must
name the newest sound one, and resume from it with `--checkpoint.on_damage=fall_back`. Last, a
second run starts in the directory of one that is going on, and a run resumes with an edited task:
both must be refused. Final states and loss curves must equal the undisturbed run's, bit for bit,
and no run may print a traceback. Prints Markdown tables; exits with 1 if anything differs. Flags of
`trainer.pretrain` are passed on to all runs.
"""

import argparse
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError
from tasks.terminal.process_group import ProcessGroup
from tasks.terminal.table import table

_DEADLINE_SECONDS = 600
# Phases that kills are aimed at, with their weights. A kill may still land in another phase; the
# table shows the actual one.
_PHASE_WEIGHTS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}
# Signals that end a run, with their weights.
_SIGNAL_WEIGHTS = {signal.SIGKILL: 6, signal.SIGINT: 2, signal.SIGTERM: 2}
# Exit codes after Ctrl-C, after SIGTERM with the state saved, and of a user's mistake.
_EXIT_INTERRUPTED, _EXIT_PREEMPTED, _EXIT_USER_ERROR = 130, 75, 2
_DAMAGES = ("bit", "bit", "cut", "zeros", "gone")
# Settings of the runs besides the command's own flags: short rows, dropout, every kind of output.
_SETTINGS = (
    "--batch_size=4",
    "--lengths.inputs=64",
    "--lengths.targets=18",
    "--model.dropout_rate=0.1",
    "--metrics.every_steps=1",
    "--checkpoint.best_metric=loss",
)


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


class Subject:
    """A run in `folder` that can be started repeatedly by the same command."""

    def __init__(self, flags: argparse.Namespace, settings: list[str], folder: pathlib.Path):
        self.folder = folder
        self.command = [
            *(sys.executable, "-m", "trainer.pretrain", f"--preset={flags.preset}"),
            *(f"--task={flags.task}", f"--cache_dir={flags.cache_dir}"),
            *(f"--train_steps={flags.steps}", f"--model_dir={folder}", *_SETTINGS),
            f"--checkpoint.every_steps={max(1, flags.steps // 12)}",
            f"--evaluation.every_steps={max(1, flags.steps // 8)}",
            *settings,
        ]
        self._leftovers: set[pathlib.Path] = set()

    def start(self, *more: str, env: dict[str, str] | None = None) -> None:
        """Starts the run, with `more` flags; `process` is its process group."""
        self._leftovers = set(self._partial_checkpoints())
        log = self.folder.with_suffix(".log")
        self.process = ProcessGroup([*self.command, *more], log, env=env)

    def end(self, number: signal.Signals) -> None:
        """Ends the run by a signal.

        Raises:
          UserError: it printed a traceback, hung, or ended with an exit code of its own.
        """
        if number == signal.SIGKILL:
            self.process.kill()
            return
        self.process.signal(number)
        self._wait()
        expected = {signal.SIGINT: _EXIT_INTERRUPTED, signal.SIGTERM: _EXIT_PREEMPTED}[number]
        # SIGTERM before the first update ends a run as any program, and a run may finish first.
        if self.process.exit_code not in (0, expected, -signal.SIGTERM):
            self.check_exit_code()
        self.check_output()

    def check_output(self) -> None:
        """Raises UserError if the run has printed a traceback."""
        if "Traceback (most recent call last)" in self.process.output():
            raise UserError(f"a run printed a traceback: {self.process.output()[-2000:]}")

    def finish(self) -> None:
        """Waits for the run to end.

        Raises:
          UserError: it failed or hung; quotes the end of its output.
        """
        self._wait()
        self.check_exit_code()
        self.check_output()

    def _wait(self) -> None:
        try:
            self.process.wait(_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"a run hung for {_DEADLINE_SECONDS} s and was killed") from error

    def check_exit_code(self) -> None:
        """Raises UserError if the run ended with an error; quotes the end of its output."""
        if code := self.process.exit_code:
            raise UserError(f"a run ended with {code}: {self.process.output()[-1000:]}")

    def lines(self) -> list[dict[str, Any]]:
        """Returns the metrics written so far, without those that depend on the machine."""
        from trainer.reporting.metrics import read_metrics

        return [
            {key: value for key, value in line.items() if key != "speed"}
            for line in read_metrics(str(self.folder))
        ]

    def checkpoint(self) -> int:
        """Returns the step of the newest checkpoint, 0 if there is none."""
        names = [path.name.removeprefix("checkpoint_") for path in self.folder.glob("checkpoint_*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def is_training(self) -> bool:
        """Returns whether the start-up text, which ends the start, has been printed."""
        return "this run" in self.process.output()

    def is_saving(self) -> bool:
        """Returns whether this process has written part of a checkpoint."""
        return not self._leftovers.issuperset(self._partial_checkpoints())

    def _partial_checkpoints(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def is_evaluating(self) -> bool:
        """Returns whether the last step has training metrics but not yet its due evaluation."""
        every = int(_flag(self.command, "evaluation.every_steps"))
        last = next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def activity(self) -> str:
        """Returns what the run is doing, judged by its files and its output."""
        if not self.is_training():
            return "starting"
        if self.is_saving():
            return "writing a checkpoint"
        if self.is_evaluating():
            return "evaluating"
        steps = [line["step"] for line in self.lines()]
        before = self.checkpoint()
        return "making updates" if steps and steps[-1] > before else "before its first update"


def _flag(command: list[str], name: str) -> str:
    """Returns the last value of a flag."""
    return [text for text in command if text.startswith(f"--{name}=")][-1].partition("=")[2]


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
            lines = subject.lines()
            arrived = bool(lines) and lines[-1]["step"] >= target
            return arrived and subject.is_training() and (in_phase is None or in_phase())

        subject.process.wait_until(reached, _DEADLINE_SECONDS)
        time.sleep(generator.uniform(0, 0.05))
    number = generator.choices([*_SIGNAL_WEIGHTS], [*_SIGNAL_WEIGHTS.values()])[0]
    # Stop the run first, so that the recorded activity is the one in which it is killed.
    if number == signal.SIGKILL:
        subject.process.signal(signal.SIGSTOP)
    finished = subject.process.exit_code is not None
    steps = [line["step"] for line in subject.lines()]
    kill = Kill(
        number.name,
        subject.activity(),
        time.monotonic() - begin,
        max(steps, default=0),
        subject.checkpoint(),
    )
    if finished:
        subject.check_exit_code()
        return None
    subject.end(number)
    return kill


class Damage(NamedTuple):
    """Damage to a file of a newest checkpoint.

    Attributes:
      file: path in the checkpoint.
      kind: one of _DAMAGES.
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
    kind = generator.choice(_DAMAGES)
    data = bytearray(path.read_bytes())
    if kind == "bit":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    contents = {"cut": bytes(data[: len(data) // 2]), "zeros": bytes(len(data))}
    path.unlink()
    if kind != "gone":
        path.write_bytes(contents.get(kind, bytes(data)))
    name, failures = str(path.relative_to(newest)), []
    subject.start()
    subject.process.wait(_DEADLINE_SECONDS)
    subject.check_output()
    outcome = "harmless"
    if subject.process.exit_code:
        said = subject.process.output().splitlines()[-1]
        outcome = "named; fell back"
        if subject.process.exit_code != _EXIT_USER_ERROR or "is damaged" not in said:
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
    subject.process.wait_until(lambda: bool(subject.lines()), _DEADLINE_SECONDS)
    log = subject.folder.with_suffix(".second.log")
    second = ProcessGroup(subject.command, log)
    second.wait(_DEADLINE_SECONDS)
    said = second.output()
    failures = []
    if second.exit_code != _EXIT_USER_ERROR or "another run is writing" not in said:
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
    subject.process.wait(_DEADLINE_SECONDS)
    subject.check_output()
    said = subject.process.output().splitlines()[-1]
    failures = []
    if subject.process.exit_code != _EXIT_USER_ERROR or f"objective of {task}" not in said:
        failures.append(f"an edited task ended with {subject.process.exit_code}: {said}")
    module.unlink()
    subject.start()
    subject.finish()
    return failures + differences(undisturbed, subject, steps)


def differences(one: Subject, other: Subject, step: int) -> list[str]:
    """Returns the differences between two finished runs: tensors of the final state, metrics."""
    import orbax.checkpoint as ocp

    from trainer.model.paths import named

    states = []
    for subject in (one, other):
        path = subject.folder.absolute() / f"checkpoint_{step}" / "state"
        states.append(named(ocp.StandardCheckpointer().restore(path)))
    found = [
        f"tensor {name}"
        for name in sorted({*states[0], *states[1]})
        if not _same(states[0].get(name), states[1].get(name))
    ]
    curves = [[json.dumps(line) for line in subject.lines()] for subject in (one, other)]
    if len(curves[0]) != len(curves[1]):
        found.append(f"the loss curves have {len(curves[0])} and {len(curves[1])} lines")
    found += [f"{a} is {b}" for a, b in zip(*curves, strict=False) if a != b]
    return found


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    if one is None or other is None:
        return False
    left, right = np.asarray(one), np.asarray(other)
    # Compares bytes, since NaN differs from itself and 0.0 equals -0.0.
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def parser() -> Parser:
    """Returns the command's parser."""
    made = Parser(
        prog="python -m trainer.chaos",
        description=__doc__.splitlines()[0],
        epilog="Flags of trainer.pretrain are passed on to both runs.",
    )
    add = made.add_argument
    add("--model_dir", required=True, help="new or empty folder for the runs; kept if they differ")
    add("--cache_dir", default="demo/cache", help="folder of caches by task; make demo writes one")
    add("--task", default="python_docs_span_corruption", help="task of a cache in --cache_dir")
    add("--preset", default="t5_1_1_tiny", help="model preset, see trainer.pretrain --help")
    add("--kills", type=int, default=10, help="number of signals that end a run, 0 or more")
    add("--damages", type=int, default=5, help="number of damaged checkpoints, 0 or more")
    add("--steps", type=int, default=200, help="updates of a run, 20 or more")
    add("--seed", type=int, default=0, help="seed of the planned kills; their timing still varies")
    return made


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if the runs differ."""
    flags, settings = parser().parse_known_args(argv)
    folder = pathlib.Path(flags.model_dir)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder for --model_dir")
    for name, least in (("kills", 0), ("damages", 0), ("steps", 20)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name}={getattr(flags, name)}: must be at least {least}")
    if not files.exists(flags.cache_dir):
        raise UserError(f"there is no cache {flags.cache_dir}: give --cache_dir, or run make demo")
    folder.mkdir(parents=True, exist_ok=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells' background jobs ignore Ctrl-C, and so would the runs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    begin, generator = time.monotonic(), random.Random(flags.seed)

    undisturbed = Subject(flags, settings, folder / "undisturbed")
    undisturbed.start()
    undisturbed.process.wait_until(lambda: bool(undisturbed.lines()), _DEADLINE_SECONDS)
    start_seconds = time.monotonic() - begin
    undisturbed.finish()

    kills: list[Kill] = []
    failures: list[str] = []
    runs = 0
    with progress.shown("killing", flags.kills) as bar:
        while not runs or len(kills) < flags.kills:
            runs += 1
            subject = Subject(flags, settings, folder / f"killed-{runs}")
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
    damages: list[Damage] = []
    with progress.shown("damaging", flags.damages) as bar:
        while len(damages) < flags.damages:
            subject = Subject(flags, settings, folder / f"damaged-{len(damages) + 1}")
            damage, found = _damage(undisturbed, subject, generator, flags.steps)
            damages.append(damage)
            failures += [f"{subject.folder}: {text}" for text in found]
            if not found:
                shutil.rmtree(subject.folder)
            bar.update(len(damages))
    refused = []
    for name, check in (
        ("twice", functools.partial(_start_twice, steps=flags.steps)),
        ("edited", functools.partial(_edit_task, task=flags.task, steps=flags.steps)),
    ):
        subject = Subject(flags, settings, folder / name)
        found = check(undisturbed, subject)
        refused.append(not found)
        failures += [f"{subject.folder}: {text}" for text in found]
        if not found:
            shutil.rmtree(subject.folder)
    print(_table(kills))
    if damages:
        rows = [(number, *damage) for number, damage in enumerate(damages, 1)]
        print("\n" + table(("damage", "file", "kind", "outcome"), rows, markdown=True))
    faults = ("a second run in the directory of a run", "a run whose task was edited")
    for fault, holds in zip(faults, refused, strict=True):
        print(f"\n{fault} was {'refused' if holds else 'NOT refused'}")
    lines = len(undisturbed.lines())
    verdict = "differ from" if failures else "equal, bit for bit,"
    print(
        f"\nfinal state and {lines} lines of metrics of {runs} killed run(s) of {flags.steps} "
        f"updates {verdict} those of an undisturbed run; {flags.preset}, seed {flags.seed}, "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _table(kills: list[Kill]) -> str:
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


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
