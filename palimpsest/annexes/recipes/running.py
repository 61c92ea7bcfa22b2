"""Runs the stages of a recipe, each as its command in a process of its own."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from palimpsest.annexes.recipes import account, lock, pairs, stage_state
from palimpsest.annexes.recipes.products import Product
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from palimpsest.annexes.recipes.waiting import waited
from tasks.storage import files
from tasks.storage import lock as folder_lock
from tasks.terminal import child
from tasks.terminal.command_line import UserError


def run(
    recipe: Recipe, chosen: Sequence[Stage], redo: bool, locked: Mapping[str, Any] | None
) -> int:
    """Runs the unfinished ones among the `chosen` stages; returns an exit code.

    `locked` is the lock file that stages must agree with; None writes it.
    """
    if not locked:
        lock.check_place(recipe)
    files.make_folder(recipe.folder)
    with folder_lock.held(recipe.folder, "recipe", "--folder"):
        states = stage_state.states(recipe)
        _check_rest(recipe, chosen, states)
        states = _redone(recipe, chosen, states, redo)
        for number, stage in enumerate(chosen, 1):
            # What it reads may have been made again since.
            states[stage.name] = stage_state.state(recipe, stage, states)
            if states[stage.name].word in (stage_state.CHANGED, stage_state.DAMAGED):
                states = _redone(recipe, chosen[number - 1 :], states, redo)
            made = states[stage.name].made
            if states[stage.name].word == stage_state.FINISHED:
                print(f"{stage.name}: finished before", flush=True)
            else:
                result = _made(recipe, stage, states, f"[{number}/{len(chosen)}]")
                if isinstance(result, int):
                    return result
                made = result
                states[stage.name] = stage_state.State(stage_state.FINISHED, made=made)
            if stage.kind == "cache":
                pairs.check(recipe, stage, states)
            if locked:
                lock.check_made(recipe, stage, made or {}, locked)
        for stage in recipe.stages:
            if stage not in chosen:
                states[stage.name] = stage_state.state(recipe, stage, states)
        found = _products(states)
        if not locked:
            lock.write(recipe, found)
        print(f"{account.write(recipe, found)} says how it was made")
    return 0


def _check_rest(
    recipe: Recipe, chosen: Sequence[Stage], states: Mapping[str, stage_state.State]
) -> None:
    """Raises UserError if what the chosen stages read follows from other keys than the recipe's."""
    needed = {each.name for each in chosen}
    for stage in reversed(recipe.stages):  # a stage comes after those that it needs
        needed |= {*stage.needs} if stage.name in needed else set()
    for stage in recipe.stages:
        if (
            stage.name in needed
            and stage not in chosen
            and states[stage.name].word in stage_state.AWAY
        ):
            raise UserError(
                f"{stage.name} changed: {states[stage.name].why}. Run it first, without --only or "
                "--from"
            )


def _products(states: Mapping[str, stage_state.State]) -> dict[str, Product | None]:
    return {name: each.made for name, each in states.items()}


def _notes(recipe: Recipe, stage: Stage, states: Mapping[str, stage_state.State]) -> list[str]:
    """Returns the flag that adds the account of the stages so far to a model card."""
    if stage.command != "export" or "notes" in stage.flags:
        return []
    return [f"--notes={account.write(recipe, _products(states))}"]


def _made(
    recipe: Recipe, stage: Stage, states: Mapping[str, stage_state.State], place: str
) -> Product | int:
    """Runs a stage, and returns what it made, or the exit code of a command that failed."""
    needs = {name: states[name].made for name in stage.needs}
    if missing := [name for name, made in needs.items() if made is None]:
        raise UserError(f"{stage.name} needs {missing[0]}, which is not finished: run it first")
    if why := states[stage.name].why:
        print(f"{stage.name}: {why}")
    words = [*stage.line, *_notes(recipe, stage, states)]
    print(f"\n{place} {stage.name}: palimpsest {shlex.join(words)}", flush=True)
    stage_state.begin(recipe, stage, needs)
    if code := waited(subprocess.Popen(child.command("palimpsest", words))):
        print(f"{stage.name} ended with code {code}", file=sys.stderr)
        return code
    made = stage_state.finish(recipe, stage, needs)
    if made is None:
        raise UserError(f"{stage.name}: {stage.output} is not there after its command")
    return made


def _redone(
    recipe: Recipe,
    chosen: Sequence[Stage],
    states: dict[str, stage_state.State],
    redo: bool,
) -> dict[str, stage_state.State]:
    """Removes what changed stages and those after them wrote, if the user agrees.

    Returns the states after that. A run whose flags let it go on keeps its own checkpoints.
    """
    changed = [stage for stage in chosen if states[stage.name].word in stage_state.AWAY]
    damaged = [stage for stage in chosen if states[stage.name].word == stage_state.DAMAGED]
    done = (stage_state.FINISHED, stage_state.CHANGED)
    # A damaged stage is made again as it was, and what follows from it stays.
    follows = [each for each in recipe.after(changed) if states[each.name].word in done]
    after = [each for each in chosen if each in follows or each in damaged]
    changed = [each for each in chosen if each in changed or each in damaged]
    places = {each.name: stage_state.written(recipe, each) for each in after}
    for stage in changed:
        if why := states[stage.name].why:  # else it follows from another
            print(f"{stage.name}: {why}")
    listed = ", ".join(f"{name} ({', '.join(there)})" for name, there in places.items() if there)
    if listed and not redo:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(
                f"{changed[0].name} changed: {states[changed[0].name].why}. To be removed and run "
                f"again: {listed}. Agree with --redo, or choose another --folder"
            )
        if input(f"Remove and run again {listed}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UserError("nothing was changed; choose another --folder to keep both")
    stage_state.forget(recipe, after)
    return stage_state.states(recipe) if after else states


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
