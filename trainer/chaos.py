"""Kills a run again and again and audits what becomes of it: `python -m trainer.chaos`.

    python -m trainer.chaos --model_dir=DIR --kills=10 --steps=200 --seed=7

One run trains undisturbed. Another of the same configuration is killed with SIGKILL at random
moments, while it starts, makes updates, evaluates or writes a checkpoint, and started again by the
same command each time. Its final state and its whole loss curve must be the undisturbed run's, bit
for bit. Prints a table in Markdown; exits with 1 when anything differs. Any flag of
`trainer.pretrain` is handed on.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError

_DEADLINE_SECONDS = 600
# Where kills are aimed at, in these proportions; where they fall is seen afterwards.
_AIMS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}
# What the runs have besides the command's own flags: short, with dropout, all that a run does.
_SETTINGS = (
    "--batch_size=4",
    "--lengths.inputs=64",
    "--lengths.targets=18",
    "--model.dropout_rate=0.1",
    "--metrics.every_steps=1",
    "--checkpoint.best_metric=loss",
)


class Kill(NamedTuple):
    """A SIGKILL: what the run was doing, its last step with metrics, its newest checkpoint."""

    doing: str
    seconds: float
    step: int
    checkpoint: int


class Subject:
    """A run that is started again and again by the same command in `folder`."""

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
        self._log = folder.with_suffix(".log")
        self._left: set[pathlib.Path] = set()

    def start(self) -> subprocess.Popen:
        """Starts it, in a process group of its own."""
        self._left = set(self._unfinished())
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, process: subprocess.Popen) -> None:
        """Waits for its end.

        Raises:
          UserError: it failed or hung; says what it said.
        """
        try:
            code = process.wait(_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise UserError(f"a run hung for {_DEADLINE_SECONDS} s and was killed") from error
        if code:
            raise UserError(f"a run ended with {code}: {self.said()[-1000:]}")

    def said(self) -> str:
        """What it printed since it was started."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """The metrics written so far, without what depends on the machine."""
        from trainer.reporting.metrics import read_metrics

        return [
            {key: value for key, value in line.items() if key != "speed"}
            for line in read_metrics(str(self.folder))
        ]

    def checkpoint(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        names = [path.name.removeprefix("checkpoint_") for path in self.folder.glob("checkpoint_*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def writes(self) -> bool:
        """Whether a checkpoint is half written."""
        return not self._left.issuperset(self._unfinished())

    def _unfinished(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def evaluates(self) -> bool:
        """Whether a step has its training metrics and is due its evaluation's."""
        every = int(_flag(self.command, "evaluation.every_steps"))
        last = next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def doing(self) -> str:
        """What it does, as far as its files and what it prints show."""
        said = self.said()
        if "this run" not in said:
            return "starting"
        if self.writes():
            return "writing a checkpoint"
        if self.evaluates():
            return "evaluating"
        steps = [line["step"] for line in self.lines()]
        before = self.checkpoint()
        return "making updates" if steps and steps[-1] > before else "before its first update"


def _flag(command: list[str], name: str) -> str:
    """The last value given for a flag."""
    return [text for text in command if text.startswith(f"--{name}=")][-1].partition("=")[2]


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Returns when the condition holds or the process has ended."""
    end = time.monotonic() + _DEADLINE_SECONDS
    while process.poll() is None and not condition() and time.monotonic() < end:
        time.sleep(0.001)


def strike(
    subject: Subject, aim: str, target: int, start_seconds: float, generator: random.Random
) -> Kill | None:
    """Starts the run and kills it; None when it was faster and finished.

    Args:
      subject: the run.
      aim: one of _AIMS.
      target: the step that it is killed after, unless it is killed while it starts.
      start_seconds: what it takes from the command to the first update.
      generator: of the moment.
    """
    process, begin = subject.start(), time.monotonic()
    if aim == "start":
        time.sleep(generator.uniform(0, start_seconds))
    else:
        awaited = {"evaluation": subject.evaluates, "checkpoint": subject.writes}.get(aim)

        def reached() -> bool:
            lines = subject.lines()
            arrived = bool(lines) and lines[-1]["step"] >= target
            return arrived and "this run" in subject.said() and (awaited is None or awaited())

        _wait_for(process, reached)
        time.sleep(generator.uniform(0, 0.05))
    # Stopped first, so that what it was doing is what it was killed in.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGSTOP)
    ended = process.poll() is not None
    steps = [line["step"] for line in subject.lines()]
    kill = Kill(
        subject.doing(), time.monotonic() - begin, max(steps, default=0), subject.checkpoint()
    )
    _kill(process)
    if ended:
        if process.returncode:
            raise UserError(f"a run ended with {process.returncode}: {subject.said()[-1000:]}")
        return None
    return kill


def differences(one: Subject, other: Subject, step: int) -> list[str]:
    """What differs between two finished runs: tensors of the final state, lines of the curve."""
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
    # Bytes, since NaN equals nothing and 0.0 equals -0.0.
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def _start_seconds(subject: Subject, process: subprocess.Popen) -> float:
    begin = time.monotonic()
    _wait_for(process, lambda: bool(subject.lines()))
    return time.monotonic() - begin


def command() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m trainer.chaos",
        description=__doc__.splitlines()[0],
        epilog="Any flag of trainer.pretrain is handed on.",
    )
    add = parser.add_argument
    add("--model_dir", required=True, help="a new folder for the runs, kept if they differ")
    add("--cache_dir", default="demo/cache", help="what pipeline.build wrote; make demo does")
    add("--task", default="python_docs_span_corruption", help="a task of that cache")
    add("--preset", default="t5_1_1_tiny", help="the model")
    add("--kills", type=int, default=10, help="SIGKILLs")
    add("--steps", type=int, default=200, help="updates of a run")
    add("--seed", type=int, default=0, help="of what is random here; moments of kills still vary")
    return parser


def main(argv: list[str]) -> int:
    """The command; returns 1 when the runs differ."""
    flags, settings = command().parse_known_args(argv)
    folder = pathlib.Path(flags.model_dir)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder for --model_dir")
    for name, least in (("kills", 0), ("steps", 20)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name}={getattr(flags, name)}: must be at least {least}")
    if not files.exists(flags.cache_dir):
        raise UserError(f"there is no cache {flags.cache_dir}: give --cache_dir, or run make demo")
    folder.mkdir(parents=True, exist_ok=True)
    begin, generator = time.monotonic(), random.Random(flags.seed)

    undisturbed = Subject(flags, settings, folder / "undisturbed")
    process = undisturbed.start()
    start_seconds = _start_seconds(undisturbed, process)
    undisturbed.finish(process)

    kills: list[Kill] = []
    failures: list[str] = []
    runs = 0
    with progress.shown("killing", flags.kills) as bar:
        while not runs or len(kills) < flags.kills:
            runs += 1
            subject = Subject(flags, settings, folder / f"killed-{runs}")
            wanted = flags.kills - len(kills)
            # Ascending, and not so late that the run is done before it is struck.
            targets = sorted(generator.randrange(1, flags.steps * 9 // 10) for _ in range(wanted))
            for target in targets:
                aim = generator.choices([*_AIMS], [*_AIMS.values()])[0]
                kill = strike(subject, aim, target, start_seconds, generator)
                if kill is None:
                    break  # it was faster
                kills.append(kill)
                bar.update(len(kills))
            subject.finish(subject.start())
            found = differences(undisturbed, subject, flags.steps)
            failures += [f"{subject.folder}: {difference}" for difference in found]
            if not found:
                shutil.rmtree(subject.folder)
    print(table(kills))
    lines = len(undisturbed.lines())
    verdict = "differ from" if failures else "equal, bit for bit,"
    print(
        f"\nfinal state and {lines} lines of metrics of {runs} killed run(s) of {flags.steps} "
        f"updates {verdict} those of an undisturbed one; {flags.preset}, seed {flags.seed}, "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def table(kills: list[Kill]) -> str:
    """The kills as a table in Markdown."""
    lines = [
        "| SIGKILL | after, s | while it was | metrics up to step | newest checkpoint |",
        "|---:|---:|---|---:|---:|",
    ]
    lines += [
        f"| {number} | {kill.seconds:.2f} | {kill.doing} | {kill.step} | {kill.checkpoint} |"
        for number, kill in enumerate(kills, 1)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
