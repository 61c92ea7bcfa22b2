"""Faults of runs on a finished cache: kills, damaged checkpoints, runs that must be refused."""

import argparse
import os
import pathlib
import random
import shutil
import time

from tasks.terminal import progress
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from tasks.terminal.table import table
from tests.faults.command import Command, draw_signal, stop_before_kill
from tests.faults.commands import Run
from tests.faults.comparing import run_differences
from tests.support.damage import DAMAGES, any_file, damage

# Phases that kills are aimed at, with their weights. A kill may still land in another phase; the
# table shows the actual one.
_PHASE_WEIGHTS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}
# A flipped bit is twice as likely as each other damage.
_DAMAGE_WEIGHTS = {kind: 2 if kind == "bit" else 1 for kind in DAMAGES}
_KILLS_HEADER = (
    *("kill", "after (s)", "while", "last step with metrics", "newest checkpoint", "signal"),
)

# A task module that redefines a task, with windows of one token less.
_EDITED_MODULE = "edited_task_of_faults"
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


def break_runs(flags: argparse.Namespace, settings: list[str], folder: pathlib.Path) -> list[str]:
    return _Lab(flags, settings, folder).break_all()


class _Lab:
    """A run that nothing disturbs, and the runs that are compared with it."""

    def __init__(self, flags: argparse.Namespace, settings: list[str], folder: pathlib.Path):
        self._flags, self._settings, self._folder = flags, settings, folder
        self._random = random.Random(flags.seed)
        self._failures: list[str] = []

    def break_all(self) -> list[str]:
        begin = time.monotonic()
        self._undisturbed = self._run("undisturbed")
        self._undisturbed.start()
        self._undisturbed.wait_until(lambda: bool(self._undisturbed.lines()))
        self._start_seconds = time.monotonic() - begin
        self._undisturbed.finish()
        kills, runs = self._kill_runs()
        damages = self._damage_checkpoints()
        refused = {
            "a second run in the directory of a run": self._is_refused("twice", self._start_twice),
            "a run whose task was edited": self._is_refused("edited", self._edit_task),
        }
        print(table(_KILLS_HEADER, _numbered(kills), markdown=True))
        if damages:
            header = ("damage", "file", "kind", "outcome")
            print("\n" + table(header, _numbered(damages), markdown=True))
        for fault, holds in refused.items():
            print(f"\n{fault} was {'refused' if holds else 'NOT refused'}")
        verdict = "differ from" if self._failures else "equal, bit for bit,"
        print(
            f"\nfinal state and {len(self._undisturbed.lines())} lines of metrics of {runs} killed "
            f"run(s) of {self._flags.steps} updates {verdict} those of an undisturbed run; "
            f"{self._flags.preset}, seed {self._flags.seed}, "
            f"{progress.clock(time.monotonic() - begin)}"
        )
        return self._failures

    def _run(self, name: str) -> Run:
        return Run(self._flags, self._flags.cache_dir, self._folder / name, self._settings)

    def _copied_run(self, name: str) -> Run:
        """Returns a copy of the undisturbed run that lacks its last checkpoint."""
        run = self._run(name)
        shutil.copytree(self._undisturbed.folder, run.folder)
        shutil.rmtree(run.folder / f"checkpoint_{self._flags.steps}")
        return run

    def _judge(self, run: Run, found: list[str], prefix: str = "") -> bool:
        """Compares a finished run, and deletes it if all is well, which it returns.

        `found` is what went wrong before; `prefix` goes before each difference.
        """
        found = [*found, *run_differences(self._undisturbed.folder, run.folder, self._flags.steps)]
        self._failures += [f"{run.folder}: {prefix}{text}" for text in found]
        if not found:
            shutil.rmtree(run.folder)
        return not found

    def _kill_runs(self) -> tuple[list[tuple], int]:
        """Kills runs, finishes and compares them; returns the table's rows, the number of runs."""
        kills: list[tuple] = []
        runs = 0
        with progress.shown("killing", self._flags.kills) as bar:
            while not runs or len(kills) < self._flags.kills:
                runs += 1
                run = self._run(f"killed-{runs}")
                missing, last = self._flags.kills - len(kills), self._flags.steps * 9 // 10
                # Ascending, and early enough that the run is unlikely to finish before its kill.
                for target in sorted(self._random.randrange(1, last) for _ in range(missing)):
                    kill = self._start_and_kill(run, target)
                    if kill is None:
                        break
                    kills.append(kill)
                    bar.update(len(kills))
                run.start().finish()
                self._judge(run, [])
        return kills, runs

    def _start_and_kill(self, run: Run, target: int) -> tuple | None:
        """Starts the run and kills it, at its start or after the step `target`; returns a row.

        Returns None if the run finished first.
        """
        generator, begin = self._random, time.monotonic()
        (phase,) = generator.choices([*_PHASE_WEIGHTS], [*_PHASE_WEIGHTS.values()])
        run.start()
        if phase == "start":
            time.sleep(generator.uniform(0, self._start_seconds))
        else:
            in_phase = {"evaluation": run.is_evaluating, "checkpoint": run.is_saving}.get(phase)
            run.wait_until(
                lambda: run.step() >= target and run.is_training() and (not in_phase or in_phase())
            )
            time.sleep(generator.uniform(0, 0.05))
        number = draw_signal(generator)
        stop_before_kill(number, run)
        finished = not run.running
        seconds = f"{time.monotonic() - begin:.2f}"
        kill = (seconds, run.activity(), run.step(), run.checkpoint(), number.name)
        if finished:
            run.finish()
            return None
        run.end(number)
        return kill

    def _damage_checkpoints(self) -> list[tuple]:
        """Damages newest checkpoints of copies of a run, and resumes; returns the table's rows."""
        damages = []
        with progress.shown("damaging", self._flags.damages) as bar:
            for number in range(1, self._flags.damages + 1):
                damages.append(self._damage(f"damaged-{number}"))
                bar.update(number)
        return damages

    def _damage(self, name: str) -> tuple:
        run, found, outcome = self._copied_run(name), [], "harmless"
        newest = run.folder / f"checkpoint_{run.checkpoint()}"
        path = any_file(newest, self._random)
        (kind,) = self._random.choices([*_DAMAGE_WEIGHTS], [*_DAMAGE_WEIGHTS.values()])
        damage(path, kind, self._random)
        file = str(path.relative_to(newest))
        if code := run.start().wait():
            said = run.output().splitlines()[-1]
            outcome = "named; fell back"
            if code != EXIT_USER_ERROR or "is damaged" not in said:
                found.append(said)
            if "newest sound one is checkpoint_" not in said:
                found.append(f"no sound checkpoint is offered: {said}")
            run.start("--checkpoint.on_damage=fall_back").finish()
        self._judge(run, found, f"{kind} in {file}: ")
        return file, kind, outcome

    def _is_refused(self, name: str, attempt) -> bool:
        """Returns whether runs behave as they must after an `attempt`, which they must refuse."""
        run = self._copied_run(name) if attempt == self._edit_task else self._run(name)
        found = attempt(run)
        run.finish()
        return self._judge(run, found)

    def _start_twice(self, run: Run) -> list[str]:
        """Starts a run and then another in its folder; returns what went wrong."""
        run.start()
        run.wait_until(lambda: bool(run.lines()))
        second = Command("a second run", run.module, run.folder.with_suffix(".second.log"))
        return _refusal(second.start(), "another run is writing")

    def _edit_task(self, run: Run) -> list[str]:
        """Resumes a run with another objective of its task, then with its own."""
        module = self._folder / f"{_EDITED_MODULE}.py"
        module.write_text(_EDITED_TASK % self._flags.task)
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH"))))
        run.start(f"--task_module={_EDITED_MODULE}", env={**os.environ, "PYTHONPATH": path})
        found = _refusal(run, f"objective of {self._flags.task}")
        module.unlink()
        run.start()
        return found


def _refusal(command: Command, expected: str) -> list[str]:
    """Waits for a command that must be refused; returns what is wrong with its end."""
    try:
        code = command.wait()
    except UserError as error:
        return [str(error)]
    if code == EXIT_USER_ERROR and expected in command.output().splitlines()[-1]:
        return []
    return [f"{command.name} ended with {code}: {command.tail()}"]


def _numbered(rows: list[tuple]) -> list[tuple]:
    return [(number, *row) for number, row in enumerate(rows, 1)]
