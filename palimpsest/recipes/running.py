"""Runs the stages of a recipe, each as its command in a process of its own."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from palimpsest.recipes import lock, records
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
        states = records.states(recipe)
        states = _redone(recipe, chosen, states, redo)
        for number, stage in enumerate(chosen, 1):
            if states[stage.name].word == records.FINISHED:
                print(f"{stage.name}: finished before", flush=True)
                continue
            if missing := [name for name in stage.needs if states[name].made is None]:
                raise UserError(
                    f"{stage.name} needs {missing[0]}, which is not finished: run it first"
                )
            print(f"\n[{number}/{len(chosen)}] {stage.name}: {_line(stage)}", flush=True)
            records.begin(recipe, stage)
            if code := _run(stage):
                print(f"{stage.name} ended with code {code}", file=sys.stderr)
                return code
            made = records.finish(recipe, stage, {name: states[name].made for name in stage.needs})
            if made is None:
                raise UserError(f"{stage.name}: {stage.output} is not there after its command")
            states[stage.name] = records.State(records.FINISHED, made=made)
            if locked:
                lock.check_made(recipe, stage, made, locked)
        if not locked:
            lock.write(recipe, {name: each.made for name, each in states.items()})
    return 0


def _redone(
    recipe: Recipe,
    chosen: Sequence[Stage],
    states: dict[str, records.State],
    redo: bool,
) -> dict[str, records.State]:
    """Removes what changed stages and those after them made, if the user agrees.

    Returns the states after that. A run whose flags let it go on keeps its own checkpoints.
    """
    changed = [stage for stage in chosen if states[stage.name].word in _CHANGED]
    names, done = {each.name for each in chosen}, (records.FINISHED, records.CHANGED)
    removed = [
        each
        for each in recipe.after(changed)
        if each.name in names and states[each.name].word in done
    ]
    for stage in changed:
        print(f"{stage.name}: {states[stage.name].why}")
    if not removed:
        return states
    listed = ", ".join(f"{each.name} ({each.output})" for each in removed)
    if not redo:
        if not sys.stdin.isatty():
            raise UserError(
                f"{changed[0].name} changed: {states[changed[0].name].why}. To be removed and run "
                f"again: {listed}. Agree with --redo, or choose another --folder"
            )
        if input(f"Remove and run again {listed}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UserError("nothing was changed; choose another --folder to keep both")
    records.forget(recipe, reversed(removed))
    return records.states(recipe)


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
