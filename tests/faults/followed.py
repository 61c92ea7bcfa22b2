"""Kills of builds, and of runs that follow them.

A run with --follow on a finished cache is the reference. In each trial a run starts before there is
a plan, and a build beside it; the build, the run or both are ended at random moments, and started
again by the same commands until both have finished. Every file of the cache and every bit of the
run must equal the reference's.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table
from tests.faults.command import DEADLINE_SECONDS, Command, draw_signal, stop_before_kill
from tests.faults.commands import Build, Run
from tests.faults.comparing import cache_differences, run_differences

# Large batches read the first epoch, which waits for shards, within few updates.
_SETTINGS = ("--follow", "--data.follow_shards=2", "--batch_size=64")
_BUILD, _RUN, _BOTH = "the build", "the run", "both"
_PAUSE_SECONDS = 0.005


class Pair:
    """A build in `folder` with the flags `of_build`, and a run that follows it with `settings`."""

    def __init__(
        self,
        flags: argparse.Namespace,
        settings: Sequence[str],
        folder: pathlib.Path,
        of_build: Sequence[str] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        given = [f"--{name}={getattr(flags, name)}" for name in ("task", "corpus", "vocabulary")]
        given += [f"--shard_bytes={flags.shard_bytes}", *of_build]
        self.build = Build(folder / "cache" / flags.task, folder / "build.log", *given)
        self.run = Run(flags, folder / "cache", folder / "model", [*_SETTINGS, *settings])
        self._commands: tuple[Command, Command] = self.build, self.run

    def start(self) -> None:
        for each in self._commands:
            if not each.running and not each.finished:
                each.start()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds; raises UserError, with `what`, if it cannot hold."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            for each in self._commands:
                each.check_alive()
            if time.monotonic() > end:
                said = " and ".join(f"{each.name} said {each.tail()}" for each in self._commands)
                raise UserError(f"waited {DEADLINE_SECONDS} s in vain for {what}; {said}")
            time.sleep(_PAUSE_SECONDS)

    def finish(self) -> None:
        """Starts what has not finished, and waits for the end of both; raises as `finish` does."""
        self.start()
        for each in self._commands:
            each.finish()

    def kill(self) -> None:
        for each in self._commands:
            if each.running:
                each.kill()

    def differences(self, other: "Pair", step: int) -> list[str]:
        """Returns the differences between two pairs that have finished: files, tensors, metrics."""
        return [
            *cache_differences(self.build.cache, other.build.cache),
            *run_differences(self.run.folder, other.run.folder, step),
        ]


class Kill(NamedTuple):
    """A signal that ended a build, a run or both, and what was finished and under way then."""

    trial: int
    victim: str
    name: str
    shards: int
    build: str
    step: int
    run: str


@dataclasses.dataclass
class _Trial:
    """A pair that is killed at random moments, until both have finished.

    A build has so many `shards`, and takes so many `seconds` to its first; a run makes `steps`.
    """

    number: int
    pair: Pair
    shards: int
    steps: int
    seconds: float
    random: random.Random

    def run(self, kills: list[Kill], most: int) -> None:
        """Kills up to `most` times, and finishes; appends to `kills`."""
        self.pair.run.start()
        self.pair.wait_until(lambda: self.pair.run.waits_for() == "the plan", "the run to wait")
        # Moments in their order, each with its share of the trials and the weights of the victims.
        for reach, share, victims in (
            (self._reach_the_plan, 0.5, {_BUILD: 2, _RUN: 2, _BOTH: 1}),
            (lambda: self._reach_shards(self.shards // 2), 1.0, {_BUILD: 3, _BOTH: 2}),
            (self._reach_a_wait, 1.0, {_BUILD: 4, _RUN: 2, _BOTH: 2}),
            (lambda: self._reach_shards(self.shards - 1), 0.6, {_BUILD: 2, _RUN: 1, _BOTH: 2}),
            (self._reach_an_update, 0.8, {_RUN: 4, _BOTH: 1}),
        ):
            if most > 0 and self.random.random() < share:
                reach()
                kill = self._kill(victims)
                kills += [kill] if kill else []
                most -= bool(kill)
        self.pair.finish()

    def _reach_the_plan(self) -> None:
        self.pair.start()
        time.sleep(self.random.uniform(0, self.seconds))

    def _reach_shards(self, last: int) -> None:
        self._reach_count(self.pair.build, self.pair.build.shards, last, "a shard")

    def _reach_an_update(self) -> None:
        self._reach_count(self.pair.run, self.pair.run.step, self.steps * 9 // 10, "an update")

    def _reach_count(self, command: Command, count: Callable[[], int], last: int, what: str):
        """Starts both, and waits until the command has counted to a random number."""
        self.pair.start()
        first = count() + 1
        target = self.random.randint(first, max(first, last))
        self.pair.wait_until(lambda: count() >= target or not command.running, what)

    def _reach_a_wait(self) -> None:
        """Waits until the run has overtaken the build.

        If the build has been killed, waits until the run says so, and starts the build again.
        """
        if not self.pair.run.running and not self.pair.run.finished:
            self.pair.run.start()
        if self.pair.build.running or self.pair.build.finished:
            both = (self.pair.build, self.pair.run)
            self.pair.wait_until(
                lambda: bool(self.pair.run.waits_for()) or not all(each.running for each in both),
                "the run to overtake the build",
            )
            return
        self.pair.wait_until(
            lambda: "no build is running in" in self.pair.run.output() or not self.pair.run.running,
            "the run to say that no build is running",
        )
        self.pair.build.start()
        time.sleep(self.random.uniform(0, self.seconds))

    def _kill(self, weights: dict[str, int]) -> Kill | None:
        """Ends one of the victims that are running; returns None if there is none."""
        victims: dict[str, list[Command]] = {
            _BUILD: [self.pair.build],
            _RUN: [self.pair.run],
            _BOTH: [self.pair.build, self.pair.run],
        }
        possible = [name for name in weights if all(each.running for each in victims[name])]
        if not possible:
            return None
        (victim,) = self.random.choices(possible, [weights[each] for each in possible])
        number = draw_signal(self.random)
        stop_before_kill(number, *victims[victim])
        build, run = self.pair.build, self.pair.run
        before = (build.shards(), build.activity(), run.step(), run.activity())
        kill = Kill(self.number, victim, number.name, *before)
        for each in victims[victim]:
            each.send(number)
        for each in victims[victim]:
            each.check_end(number)
        return kill


def break_pairs(flags: argparse.Namespace, settings: list[str], folder: pathlib.Path) -> list[str]:
    """Runs trials until there were `flags.kills` kills, and prints them; returns what went wrong.

    A trial that fails is the last one. Raises UserError if the reference cannot be made.
    """
    begin, generator = time.monotonic(), random.Random(flags.seed)
    kills: list[Kill] = []
    failures: list[str] = []
    trials = 0
    with contextlib.ExitStack() as stack:
        reference = Pair(flags, settings, folder / "undisturbed")
        stack.callback(reference.kill)
        reference.build.start()
        reference.wait_until(lambda: reference.build.shards() > 0, "a shard")
        seconds = time.monotonic() - begin
        reference.build.finish()
        reference.run.start()
        reference.run.finish()
        shards = reference.build.shards()
        bar = stack.enter_context(progress.shown("killing", flags.kills))
        while not failures and (not trials or len(kills) < flags.kills):
            trials += 1
            # Two workers, in every second trial, finish shards in another order than the plan's.
            workers = f"--workers={2 - trials % 2}"
            pair = Pair(flags, settings, folder / f"trial-{trials}", [workers])
            stack.callback(pair.kill)
            trial = _Trial(trials, pair, shards, flags.steps, seconds, generator)
            before = len(kills)
            try:
                trial.run(kills, flags.kills - before)
                found = reference.differences(pair, flags.steps)
                if flags.kills and len(kills) == before:
                    found.append("nothing was killed in time: give a smaller --shard_bytes")
            except UserError as error:
                pair.kill()
                found = [str(error)]
            failures += [f"{pair.folder}: {text}" for text in found]
            if not found:
                shutil.rmtree(pair.folder)
            bar.update(len(kills), f"{len(failures)} failures")
    header = (
        *("kill", "trial", "victim", "signal", f"finished shards of {shards}"),
        *("the build was", "last step with metrics", "the run was"),
    )
    print(table(header, [(number, *kill) for number, kill in enumerate(kills, 1)], markdown=True))
    lines, counts = len(reference.run.lines()), Counter(kill.victim for kill in kills)
    verdict = "differ from" if failures else "equal, bit for bit,"
    named = ", ".join(f"{counts[victim]} of {victim}" for victim in (_BUILD, _RUN, _BOTH))
    waiting = sum(kill.run.startswith("waiting") for kill in kills)
    print(
        f"\nall files of the caches, final states and {lines} lines of metrics of {trials} "
        f"build(s) of {shards} shards and of runs of {flags.steps} updates that followed them "
        f"{verdict} those of an undisturbed build and a run on its cache; {len(kills)} kills, "
        f"{named}, {waiting} while the run waited; {flags.preset}, seed {flags.seed}, "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    return failures
