"""Kills of builds, and of runs that follow them.

A run with --follow on a finished cache is the reference. In each trial a run starts before there is
a plan, and a build beside it; the build, the run or both are ended at random moments, and started
again by the same commands until both have finished. Every file of the cache and every bit of the
run must equal the reference's.
"""

import argparse
import pathlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.laboratory.build_command import Build
from tests.laboratory.commands import (
    DEADLINE_SECONDS,
    Command,
    Difference,
    draw_signal,
    stop_before_kill,
)
from tests.laboratory.comparing import cache_differences, run_differences
from tests.laboratory.run_trials import Run

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
        given += [f"--shard_bytes={flags.shard_bytes}", f"--cache_dir={folder}/cache", *of_build]
        self.build = Build(folder / "cache" / flags.task, given, folder / "build.log")
        settings = [*_SETTINGS, *settings]
        self.run = Run.given(flags, folder / "cache", folder / "model", settings)
        self._commands: tuple[Command, Command] = self.build, self.run

    def start(self) -> None:
        for each in self._commands:
            if not each.running and not each.finished:
                each.start()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds; raises a Difference, with `what`, if it cannot hold."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            for each in self._commands:
                each.check_alive()
            if time.monotonic() > end:
                said = " and ".join(f"{each.name} {each.said()}" for each in self._commands)
                raise Difference(f"waited {DEADLINE_SECONDS} s in vain for {what}; {said}")
            time.sleep(_PAUSE_SECONDS)

    def finish(self) -> None:
        """Starts what has not finished, and waits for the end of both, which must succeed."""
        self.start()
        for each in self._commands:
            each.finish()

    def kill(self) -> None:
        for each in self._commands:
            each.kill()

    def differences(self, other: "Pair") -> list[str]:
        """Returns the differences between two pairs that have finished: files, tensors, metrics."""
        return [
            *cache_differences(self.build.cache, other.build.cache),
            *run_differences(self.run.folder, other.run.folder),
        ]


def _undisturbed(flags: argparse.Namespace, folder: pathlib.Path) -> Pair:
    return Pair(flags, flags.settings, folder / "undisturbed")


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Makes the reference."""
    pair, begin = _undisturbed(flags, folder), time.monotonic()
    try:
        pair.build.start()
        pair.wait_until(lambda: pair.build.shards() > 0, "a shard")
        flags.seconds = time.monotonic() - begin
        pair.build.finish()
        flags.shards = pair.build.shards()
        pair.run.succeed()
    finally:
        pair.kill()


class Trial:
    """A pair that is killed at random moments, until both have finished."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.random = random.Random(f"{flags.seed} followed {number}")
        self._flags, self.counts = flags, Counter[str]()
        self._reference = _undisturbed(flags, folder / "shared")
        # Two workers, in every second trial, finish shards in another order than the plan's.
        workers = f"--workers={1 + number % 2}"
        self.pair = Pair(flags, flags.settings, folder / str(number), [workers])

    def run(self) -> str:
        """Kills, finishes and compares; returns the kills."""
        self.pair.run.start()
        self.pair.wait_until(lambda: self.pair.run.waits_for() == "the plan", "the run to wait")
        said, shards = list[str](), self._flags.shards
        # Moments in their order, each with its share of the trials and the weights of the victims.
        for reach, share, victims in (
            (self._reach_the_plan, 0.5, {_BUILD: 2, _RUN: 2, _BOTH: 1}),
            (lambda: self._reach_shards(shards // 2), 1.0, {_BUILD: 3, _BOTH: 2}),
            (self._reach_a_wait, 1.0, {_BUILD: 4, _RUN: 2, _BOTH: 2}),
            (lambda: self._reach_shards(shards - 1), 0.6, {_BUILD: 2, _RUN: 1, _BOTH: 2}),
            (self._reach_an_update, 0.8, {_RUN: 4, _BOTH: 1}),
        ):
            if self.random.random() < share and self.counts["kills"] < self._flags.kills:
                reach()
                said += self._kill(victims)
        self.pair.finish()
        found = self._reference.differences(self.pair)
        if self._flags.kills and not said:
            found.append("nothing was killed in time: give a smaller --shard_bytes")
        if found:
            raise Difference("; ".join([*found, *said]))
        return f"{'; '.join(said)}: equal, bit for bit, of {shards} shards"

    def clean(self) -> None:
        shutil.rmtree(self.pair.folder)

    def _reach_the_plan(self) -> None:
        self.pair.start()
        time.sleep(self.random.uniform(0, self._flags.seconds))

    def _reach_shards(self, last: int) -> None:
        self._reach_count(self.pair.build, self.pair.build.shards, last, "a shard")

    def _reach_an_update(self) -> None:
        last = self._flags.steps * 9 // 10
        self._reach_count(self.pair.run, self.pair.run.step, last, "an update")

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
        build, run = self.pair.build, self.pair.run
        if not run.running and not run.finished:
            run.start()
        if build.running or build.finished:
            self.pair.wait_until(
                lambda: bool(run.waits_for()) or not (build.running and run.running),
                "the run to overtake the build",
            )
            return
        self.pair.wait_until(
            lambda: "no build is running in" in run.output() or not run.running,
            "the run to say that no build is running",
        )
        build.start()
        time.sleep(self.random.uniform(0, self._flags.seconds))

    def _kill(self, weights: dict[str, int]) -> list[str]:
        """Ends one of the victims that are running, if there is one; returns what it was doing."""
        build, run = self.pair.build, self.pair.run
        victims: dict[str, list[Command]] = {_BUILD: [build], _RUN: [run], _BOTH: [build, run]}
        possible = [name for name in weights if all(each.running for each in victims[name])]
        if not possible:
            return []
        (victim,) = self.random.choices(possible, [weights[each] for each in possible])
        number = draw_signal(self.random)
        stop_before_kill(number, *victims[victim])
        doing = f"the build {build.activity()}, the run {run.activity()}"
        at = f"{build.shards()} shards, step {run.step()}"
        for each in victims[victim]:
            each.send(number)
        for each in victims[victim]:
            each.check_end(number)
        self.counts.update({"kills": 1, f"{number.name} of {victim}; {doing}": 1})
        return [f"{number.name} of {victim} at {at}: {doing}"]
