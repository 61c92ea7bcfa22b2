"""The record of each stage in FOLDER/.recipe: its flags, what it read, and what it made."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from palimpsest.commands import COMMANDS, command
from palimpsest.recipes.products import Product, places, product
from palimpsest.recipes.recipe import Recipe, Stage
from tasks.storage import files, store
from tasks.terminal.flags import flags_of

_FOLDER = ".recipe"
# Flags that change how a stage works, not what it makes.
HOW = frozenset(
    ("workers", "runner", "verbose", "part", "hf_token_secret", "max_quarantined", "memory_bytes")
)
# A stage with other flags either goes on from where it was, or must be made again.
TODO, BEGUN, FINISHED, CONTINUED, CHANGED = "to do", "begun", "finished", "continued", "changed"


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
        found[stage.name] = _state(recipe, stage, found)
    return found


def _state(recipe: Recipe, stage: Stage, before: dict[str, State]) -> State:
    record = _read(recipe, stage)
    if not record:
        return State(TODO)
    why = "; ".join(_differences(stage, record, decisive=True))
    inputs = {name: before[name].made for name in stage.needs}
    if not why and (record["needs"] or {}) != inputs and record["made"] is not None:
        others = [name for name in inputs if (record["needs"] or {}).get(name) != inputs[name]]
        why = f"it was made from another {' and '.join(others)}"
    made = record["made"]
    if why:
        return State(CHANGED, why)
    if made is None:
        return State(BEGUN)
    if more := "; ".join(_differences(stage, record, decisive=False)):
        return State(CONTINUED, more)
    return State(FINISHED, made=made) if product(stage) == made else State(TODO)


def _differences(stage: Stage, record: dict[str, Any], decisive: bool) -> Iterator[str]:
    """Yields how a stage's flags differ from its record's; all that matter, or the `decisive`."""
    before = {name: tuple(texts) for name, texts in record["flags"].items()}
    if record["command"] != stage.command:
        yield f"its command was {record['command']}, is {stage.command}"
    for name in sorted(before.keys() | stage.flags.keys()):
        old, new = before.get(name), stage.flags.get(name)
        if old != new and name not in HOW and not (decisive and _goes_on(stage, name)):
            yield f"{name} was {_texts(old)}, is {_texts(new)}"


def _texts(texts: tuple[str, ...] | None) -> str:
    return "not given" if texts is None else " ".join(texts)


def _goes_on(stage: Stage, name: str) -> bool:
    """Returns whether a stage that has begun goes on when this flag changes."""
    if stage.kind not in ("pretrain", "finetune"):
        return False
    from trainer.config import resuming

    known = {flag.name: flag.path for flag in flags_of(command(COMMANDS[stage.command]).flags)}
    of_run, _, path = known[name].partition(".")
    # A preset sets other fields.
    return of_run == "run" and path != "preset" and resuming.may_change(path)


def begin(recipe: Recipe, stage: Stage) -> None:
    """Records the flags with which a stage begins."""
    _write(recipe, stage, None, None)


def finish(recipe: Recipe, stage: Stage, needs: dict[str, Product | None]) -> Product | None:
    """Records and returns what a stage made."""
    made = product(stage)
    _write(recipe, stage, needs, made)
    return made


def forget(recipe: Recipe, stages: Iterable[Stage]) -> None:
    """Removes what stages made, and their records."""
    for stage in stages:
        for place in places(stage):
            fs, path = store.filesystem(place)
            if fs.exists(path):
                fs.rm(path, recursive=True)
        files.remove(_path(recipe, stage))


def _write(recipe: Recipe, stage: Stage, needs: Any, made: Any) -> None:
    value = {
        "command": stage.command,
        "flags": {name: list(texts) for name, texts in stage.flags.items()},
        "needs": needs,
        "made": made,
    }
    files.make_folder(files.join(recipe.folder, _FOLDER))
    files.write_json(_path(recipe, stage), value)


def _read(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    path = _path(recipe, stage)
    return files.read_json(path) if files.exists(path) else {}


def _path(recipe: Recipe, stage: Stage) -> str:
    return files.join(recipe.folder, _FOLDER, f"{stage.name}.json")
