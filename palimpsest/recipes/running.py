"""Runs the stages of a recipe, each as its command in a process of its own."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from palimpsest.recipes import lock, records
from palimpsest.recipes.products import Product
from palimpsest.recipes.recipe import Recipe, Stage
from tasks.storage import files
from tasks.storage import lock as folder_lock
from tasks.terminal import child
from tasks.terminal.command_line import UserError

_CHANGED = (records.CHANGED, records.CONTINUED)


def run(
    recipe: Recipe, chosen: Sequence[Stage], redo: bool, locked: Mapping[str, Any] | None
) -> int:
    """Runs the unfinished ones among the `chosen` stages; returns an exit code.

    `locked` is the lock file that stages must agree with; None writes it.
    """
    files.make_folder(recipe.folder)
    with folder_lock.held(recipe.folder, "recipe", "--folder"):
        states = _redone(recipe, chosen, records.states(recipe), redo)
        for number, stage in enumerate(chosen, 1):
            # What it reads may have been made again since.
            states[stage.name] = records.state(recipe, stage, states)
            if states[stage.name].word == records.CHANGED:
                states = _redone(recipe, chosen[number - 1 :], states, redo)
            made = states[stage.name].made
            if states[stage.name].word == records.FINISHED:
                print(f"{stage.name}: finished before", flush=True)
            else:
                result = _made(recipe, stage, states, f"[{number}/{len(chosen)}]")
                if isinstance(result, int):
                    return result
                made = result
                states[stage.name] = records.State(records.FINISHED, made=made)
            if locked:
                lock.check_made(recipe, stage, made or {}, locked)
        if not locked:
            lock.write(recipe, {name: each.made for name, each in states.items()})
    return 0


def _made(
    recipe: Recipe, stage: Stage, states: Mapping[str, records.State], place: str
) -> Product | int:
    """Runs a stage, and returns what it made, or the exit code of a command that failed."""
    needs = {name: states[name].made for name in stage.needs}
    if missing := [name for name, made in needs.items() if made is None]:
        raise UserError(f"{stage.name} needs {missing[0]}, which is not finished: run it first")
    print(f"\n{place} {stage.name}: {_line(stage)}", flush=True)
    records.begin(recipe, stage, needs)
    if code := _run(stage):
        print(f"{stage.name} ended with code {code}", file=sys.stderr)
        return code
    made = records.finish(recipe, stage, needs)
    if made is None:
        raise UserError(f"{stage.name}: {stage.output} is not there after its command")
    return made


def _redone(
    recipe: Recipe,
    chosen: Sequence[Stage],
    states: dict[str, records.State],
    redo: bool,
) -> dict[str, records.State]:
    """Removes what changed stages and those after them wrote, if the user agrees.

    Returns the states after that. A run whose flags let it go on keeps its own checkpoints.
    """
    changed = [stage for stage in chosen if states[stage.name].word in _CHANGED]
    names, done = {each.name for each in chosen}, (records.FINISHED, records.CHANGED)
    after = [
        each
        for each in recipe.after(changed)
        if each.name in names and states[each.name].word in done
    ]
    places = {each.name: records.written(recipe, each) for each in after}
    for stage in changed:
        print(f"{stage.name}: {states[stage.name].why}")
    listed = ", ".join(f"{name} ({', '.join(there)})" for name, there in places.items() if there)
    if listed and not redo:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(
                f"{changed[0].name} changed: {states[changed[0].name].why}. To be removed and run "
                f"again: {listed}. Agree with --redo, or choose another --folder"
            )
        if input(f"Remove and run again {listed}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UserError("nothing was changed; choose another --folder to keep both")
    records.forget(recipe, after)
    return records.states(recipe) if after else states


def _run(stage: Stage) -> int:
    """Runs a stage's command; signals that end it leave this process in order."""
    process = subprocess.Popen(child.command("palimpsest", stage.line))
    # Ctrl-C reaches the command, too; this process waits for its end.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def told(stage: Stage, words: Sequence[str]) -> str:
    """Runs a command for `stage` and returns its output; raises UserError with its last line."""
    done = subprocess.run(
        child.command("palimpsest", words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        last = next(filter(None, reversed(lines)), f"ended with code {done.returncode}")
        raise UserError(f"[{stage.name}] {last.partition(': error: ')[2] or last}")
    return done.stdout


def _line(stage: Stage) -> str:
    return f"palimpsest {shlex.join(stage.line)}"
