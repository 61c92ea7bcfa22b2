"""A given run in fresh processes, killed while it starts, makes updates, evaluates or saves."""

import argparse
import os
import pathlib
import shutil
import time

from tests.laboratory import run_trials
from tests.laboratory.commands import draw_signal, stop_before_kill
from tests.laboratory.run_trials import Run

# Phases that kills of a given run are aimed at, with their weights. A kill may still land in
# another phase; the table shows the actual one.
_PHASE_WEIGHTS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}
# A task module that redefines a task, with windows of one token less.
_EDITED_MODULE = "edited_task_of_laboratory"
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


class Trial(run_trials.Trial):
    """All that is done to the run of the flags."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        super().__init__(flags, number, folder)
        self._flags = flags

    def describe(self) -> str:
        return f"{self._flags.preset} {self._flags.task}"

    def _run(self, name: str) -> Run:
        of = self._flags
        return Run.given(of, of.cache_dir, self._folder / name, of.settings)

    def run(self) -> str:
        """Makes all kills, damages and refusals; returns what was compared, in words."""
        begin, plain = time.monotonic(), self._run("a")
        plain.start().wait_until(lambda: bool(plain.lines()))
        self._start_seconds = time.monotonic() - begin
        plain.finish()
        of, runs = self._flags, 0
        while not runs or self.counts["kills"] < of.kills:
            runs += 1
            run, last = self._run(f"killed-{runs}"), of.steps * 9 // 10
            # Ascending, and early enough that the run is unlikely to finish before its kill.
            missing = range(of.kills - self.counts["kills"])
            for target in sorted(self.random.randrange(1, last) for _ in missing):
                if not self._kill_at(run, target):
                    break
            run.succeed()
            self._check_same("a", run.folder.name)
            shutil.rmtree(run.folder)
        for number in range(of.damages):
            self._damage_checkpoint(f"damaged-{number}")
        self._start_twice()
        self._edit_task()
        return f"final state and {len(plain.lines())} lines of metrics are equal, bit for bit"

    def _kill_at(self, run: Run, target: int) -> bool:
        """Starts the run and kills it, at its start or after the step `target`.

        Returns whether it was killed, and did not finish first.
        """
        (phase,) = self.random.choices([*_PHASE_WEIGHTS], [*_PHASE_WEIGHTS.values()])
        run.start()
        if phase == "start":
            time.sleep(self.random.uniform(0, self._start_seconds))
        else:
            in_phase = {"evaluation": run.is_evaluating, "checkpoint": run.is_saving}.get(phase)
            run.wait_until(
                lambda: run.step() >= target and run.is_training() and (not in_phase or in_phase())
            )
            time.sleep(self.random.uniform(0, 0.05))
        number = draw_signal(self.random)
        stop_before_kill(number, run)
        if not run.running:
            run.finish()
            return False
        self.note(f"{number.name} while {run.activity()}")
        self.counts["kills"] += 1
        run.end(number)
        return True

    def _edit_task(self) -> None:
        """Resumes a run with another objective of its task, which is refused, then with its own."""
        run, module = self._run("edited"), self._folder / f"{_EDITED_MODULE}.py"
        shutil.copytree(self._folder / "a", run.folder)
        shutil.rmtree(run.folder / f"checkpoint_{run.checkpoint()}")
        module.write_text(_EDITED_TASK % self._flags.task)
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH"))))
        run.start(f"--task_module={_EDITED_MODULE}", env={**os.environ, "PYTHONPATH": path})
        run.expect_refusal(f"objective of {self._flags.task}")
        module.unlink()
        run.succeed()
        self._check_same("a", "edited")
        self.note("edited task refused")
