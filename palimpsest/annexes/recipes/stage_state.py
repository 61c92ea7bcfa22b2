"""The record of each stage in FOLDER/.recipe: its flags, what it read, and what it made."""

import dataclasses
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palimpsest.annexes.recipes import inputs
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.products import (
    STEP,
    Product,
    Sizes,
    lost,
    mends,
    places,
    product,
    sizes,
)
from palimpsest.annexes.recipes.recipe import ANY_FOLDER, Recipe, Stage
from palimpsest.commands import COMMANDS, command
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import Flag, flags_of

_FOLDER = ".recipe"
# Flags that change how a stage works, not what it makes.
HOW = frozenset(
    ("workers", "runner", "verbose", "part", "hf_token_secret", "max_quarantined", "memory_bytes")
)
# A stage with other flags either goes on from where it was, or must be made again.
TODO, BEGUN, FINISHED, CONTINUED, CHANGED = "to do", "begun", "finished", "continued", "changed"
AWAY = (CONTINUED, CHANGED)
# A product without some of its files, which its command does not mend.
DAMAGED = "damaged"

# What a record holds: a type, a list of one, or an object with values of one.
_RECORDED: Mapping[str, Any] = {
    "command": str,
    "flags": {str: [str]},
    "places": [str],
    "foreign": [str],
    "needs": {str: dict},
    "inputs": {str: {str: {str: object}}},
    "made": (dict, type(None)),
    "files": (dict, type(None)),
}

_Value = tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a stage, in one word; `why` names what changed since it ran."""

    word: str
    why: str = ""
    made: Product | None = None


def states(recipe: Recipe) -> dict[str, State]:
    """Returns the state of each stage, by name."""
    found: dict[str, State] = {}
    for stage in recipe.stages:
        found[stage.name] = state(recipe, stage, found)
    return found


def state(recipe: Recipe, stage: Stage, others: Mapping[str, State]) -> State:
    """Returns the state of a stage; `others` has the states of those that it needs."""
    record = _read(recipe, stage)
    if not record:
        return State(TODO)
    made = record["made"]
    why = "; ".join(_differences(recipe, stage, record, decisive=True))
    if why and made is None and _is_fresh(stage):
        why = ""
    # What is missing is made first, and compared after that.
    read = {name: others[name].made for name in stage.needs if others[name].made is not None}
    differing = [name for name in read if record["needs"].get(name) != read[name]]
    if not why and differing:
        why = f"it was made from another {' and '.join(differing)}"
    why = why or inputs.edited(recipe, stage, record["inputs"])
    if why or any(others[name].word in AWAY for name in stage.needs):
        return State(CHANGED, why)
    if made is None:
        # An export is written whole or not at all, and its command refuses one that exists.
        made = product(stage) if stage.kind == "export" else None
        return State(BEGUN) if made is None else State(FINISHED, made=made)
    if more := "; ".join(_differences(recipe, stage, record, decisive=False)):
        return State(CONTINUED, more)
    return _of_product(stage, made, record.get("files") or {})


def _of_product(stage: Stage, made: Product, sizes: Sizes) -> State:
    """Returns the state of a stage by what is there of its product."""
    now, gone = product(stage), lost(stage, made, sizes)
    if now == made and not gone:
        return State(FINISHED, made=made)
    why = f"{gone or stage.output} is missing or was changed"
    return State(TODO if mends(stage, gone) else DAMAGED, why)


def _is_fresh(stage: Stage) -> bool:
    """Returns whether a run has no checkpoint yet, so that its settings may change."""
    names = files.list_names(stage.output) if stage.kind in RUNS else [STEP]
    return not any(name.startswith(STEP) for name in names)


def _differences(
    recipe: Recipe, stage: Stage, record: dict[str, Any], decisive: bool
) -> Iterator[str]:
    """Yields how a stage's flags differ from its record's; all that matter, or the `decisive`."""
    known = {name: flag.name for flag in _flags_of(stage) for name in flag.names}  # and former ones
    before = {known.get(name, name): tuple(texts) for name, texts in record["flags"].items()}
    flags = recipe.portable[stage.name].flags
    if record["command"] != stage.command:
        yield f"its command was {record['command']}, is {stage.command}"
    for name in sorted(before.keys() | flags.keys()):
        old, new = before.get(name), flags.get(name)
        if old == new or name in HOW or (decisive and _goes_on(stage, name, old, new)):
            continue
        yield f"{name} was {_texts(old)}, is {_texts(new)}"


def _flags_of(stage: Stage) -> Sequence[Flag]:
    return flags_of(command(COMMANDS[stage.command]).flags)


def _texts(texts: tuple[str, ...] | None) -> str:
    return "not given" if texts is None else " ".join(texts)


def _goes_on(stage: Stage, name: str, old: _Value, new: _Value) -> bool:
    """Returns whether a stage that has begun goes on when this flag changes."""
    if stage.kind not in RUNS:
        return False
    from trainer.config import resuming
    from trainer.config.phases import tokens_of

    length = {"train_steps": lambda text: int(float(text)), "train_tokens": tokens_of}.get(name)
    if length and not (old and new and (length(old[0]) or 0) < (length(new[0]) or 0)):
        return False  # a run cannot become shorter
    known = {flag.name: flag.path for flag in _flags_of(stage)}
    of_run, _, path = known.get(name, name).partition(".")  # a flag of an earlier version is gone
    # A preset sets other fields.
    return of_run == "run" and path != "preset" and resuming.may_change(path)


def begin(recipe: Recipe, stage: Stage, needs: Mapping[str, Product | None]) -> None:
    """Records with which flags a stage begins, and on what.

    Raises UserError for an export that is there without a record: it may be another model's.
    """
    before = _read(recipe, stage)
    if stage.kind == "export" and not before and files.exists(stage.output):
        raise UserError(f"{stage.output} exists: name another folder, or delete it")
    there = [
        place for place in places(recipe.portable[stage.name]) if files.exists(_here(recipe, place))
    ]
    foreign = before["foreign"] if before else there
    _write(recipe, stage, needs, inputs.read(recipe, stage), foreign, None)


def finish(recipe: Recipe, stage: Stage, needs: Mapping[str, Product | None]) -> Product | None:
    """Records and returns what a stage made."""
    made, begun = product(stage), _read(recipe, stage)
    _write(recipe, stage, needs, begun["inputs"], begun["foreign"], made)
    return made


def written(recipe: Recipe, stage: Stage) -> list[str]:
    """Returns the files and folders that are there from a stage, where its record says."""
    whole = (_here(recipe, place) for place in _read(recipe, stage).get("places", ()))
    return [place for place in whole if files.exists(place)]


def _here(recipe: Recipe, place: str) -> str:
    return place.replace(ANY_FOLDER, recipe.folder, 1)


def forget(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Removes what stages wrote, and their records.

    Raises UserError, before anything is removed, for a place outside the recipe's folder, or one
    that was there before its stage: both may hold other files.
    """
    found = {stage.name: written(recipe, stage) for stage in stages}
    for stage in stages:
        foreign = [_here(recipe, each) for each in _read(recipe, stage).get("foreign", ())]
        for place in found[stage.name]:
            if not is_inside(place, recipe.folder):
                why = f"it is outside {recipe.folder}"
            elif place in foreign:
                why = "it was there before this recipe"
            else:
                continue
            raise UserError(f"{stage.name}: remove {place} yourself: {why}")
    for stage in reversed(stages):  # a report lies in the folder of its run
        for place in found[stage.name]:
            files.remove_all(place)
        if files.exists(_path(recipe, stage)):
            files.remove(_path(recipe, stage))


def is_inside(place: str, folder: str) -> bool:
    """Returns whether a path is below a folder, and not the folder itself."""
    if not files.is_remote(place):
        place, folder = (os.path.realpath(files.local_path(each)) for each in (place, folder))
    return posixpath.normpath(place).startswith(f"{posixpath.normpath(folder)}/")


def _write(
    recipe: Recipe,
    stage: Stage,
    needs: Mapping[str, Product | None],
    read: inputs.Inputs,
    foreign: list[str],
    made: Product | None,
) -> None:
    portable = recipe.portable[stage.name]
    value = {
        "command": stage.command,
        "flags": {name: list(texts) for name, texts in portable.flags.items()},
        "places": places(portable),
        "needs": dict(needs),
        "inputs": read,
        "foreign": foreign,
        "made": made,
        "files": {} if made is None else sizes(stage, made),
    }
    files.make_folder(files.join(recipe.folder, _FOLDER))
    files.write_json(_path(recipe, stage), value)


def _read(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    path = _path(recipe, stage)
    if not files.exists(path):
        return {}
    try:
        value = files.read_json(path)
    except (UserError, IsADirectoryError):
        value = None
    fits = isinstance(value, dict) and all(
        _fits(value.get(name), form) for name, form in _RECORDED.items()
    )
    if not fits:
        raise UserError(f"{path} is damaged: delete it, and {stage.name} runs again")
    return value


def _fits(value: Any, form: Any) -> bool:
    """Returns whether a value has a form of `_RECORDED`."""
    if isinstance(form, type | tuple):
        return isinstance(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    return isinstance(value, dict) and all(_fits(each, form[str]) for each in value.values())


def _path(recipe: Recipe, stage: Stage) -> str:
    return files.join(recipe.folder, _FOLDER, f"{stage.name}.json")
