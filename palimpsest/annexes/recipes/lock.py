"""The lock file beside a recipe: what its stages were given and made, by hash, and with what."""

import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from palimpsest.annexes.recipes import writable
from palimpsest.annexes.recipes.products import Product
from palimpsest.annexes.recipes.recipe import LOCK, Recipe, Stage
from palimpsest.annexes.recipes.stage_state import HOW
from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

_FORMAT = 2
_PROCESSES = "processes."
_PACKAGES = (
    *("palimpsest-lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain"),
    *("apache-beam", "pyarrow", "sentencepiece", "transformers"),
)


def path_of(recipe: Recipe) -> pathlib.Path:
    """Returns the lock file of a recipe: RECIPE.lock beside RECIPE.toml."""
    return recipe.path.with_suffix(LOCK)


def check_place(recipe: Recipe) -> None:
    """Raises UserError if the lock cannot be written, before anything is made."""
    path = path_of(recipe)
    if path.is_dir():
        raise UserError(f"{path} is a folder, but the name of the lock file: rename the folder")
    writable.check(str(path.parent), f"{path.name} goes there: copy the recipe to another folder")


def read(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe's lock; raises UserError if there is none."""
    path = path_of(recipe)
    if not path.is_file():
        raise UserError(f"--locked: there is no file {path}; a run without --locked writes it")
    value = files.read_json(str(path))
    stages = value.get("stages") if isinstance(value, dict) else None
    whole = isinstance(stages, dict) and all(
        isinstance(stage, dict) and {"command", "flags", "made"} <= stage.keys()
        for stage in stages.values()
    )
    if not whole or value.get("format") != _FORMAT or "software" not in value:
        raise UserError(
            f"{path} is not a lock file of this version: delete it, and run without --locked"
        )
    return value


def write(recipe: Recipe, made: Mapping[str, Product | None]) -> None:
    """Writes the lock of all stages that are finished.

    What it says of others stays, as long as it holds for their flags and for what they need.
    """
    ours, before = _given(recipe), _before(recipe)
    stages = {
        name: {**given, "made": made[name]}
        for name, given in ours.items()
        if made[name] is not None
    }
    for stage in recipe.stages:
        old, given = before.get(stage.name), ours[stage.name]
        if not old or not old.items() >= given.items():
            continue
        if all(stages.get(need) == before.get(need) for need in stage.needs):
            stages.setdefault(stage.name, old)
    files.write_json(
        str(path_of(recipe)), {"format": _FORMAT, "software": software(), "stages": stages}
    )


def _before(recipe: Recipe) -> Mapping[str, Any]:
    """Returns the stages of the lock that is there, if it was made with the same software."""
    try:
        value = read(recipe)
    except UserError:
        return {}
    return value["stages"] if value["software"] == software() else {}


def check_stages(recipe: Recipe, chosen: Sequence[Stage], locked: Mapping[str, Any]) -> None:
    """Raises UserError if flags of the chosen stages or software differ from the lock's."""
    if more := locked["stages"].keys() - {stage.name for stage in recipe.stages}:
        raise UserError(
            f"--locked: {path_of(recipe)} has the stage {min(more)}, which {recipe.path} lacks"
        )
    given = _given(recipe)
    for stage in (each.name for each in chosen):
        if stage not in locked["stages"]:
            raise UserError(f"--locked: {path_of(recipe)} has no stage {stage}")
        theirs = locked["stages"][stage]
        for key, ours in given[stage].items():
            if theirs[key] != ours:
                raise UserError(
                    f"--locked: {stage} has other {key} than in {path_of(recipe)}: "
                    f"{_first(theirs[key], ours)}"
                )
    if locked["software"] != software():
        raise UserError(
            f"--locked: {path_of(recipe)} was made with other software: "
            f"{_first(locked['software'], software())}"
        )


def check_made(recipe: Recipe, stage: Stage, made: Product, locked: Mapping[str, Any]) -> None:
    """Raises UserError if a stage did not make what the lock says."""
    theirs = locked["stages"][stage.name]["made"]
    if theirs != made:
        raise UserError(
            f"--locked: {stage.name} made something else than {path_of(recipe)} says: "
            f"{_first(theirs, made)}"
        )


def software() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that decide the results."""
    system = {"python": platform.python_version(), "machine": platform.machine()}
    return system | extras.versions(_PACKAGES)


def _given(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns each stage's command and flags, for any folder, without what changes no result."""
    return {
        stage.name: {
            "command": stage.command,
            "flags": {
                name: list(texts)
                for name, texts in stage.flags.items()
                if name not in HOW and not name.startswith(_PROCESSES)
            },
        }
        for stage in recipe.portable.values()
    }


def _first(theirs: Any, ours: Any) -> str:
    """Returns the first difference of two values in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                return f"{name}: {_first(theirs.get(name), ours.get(name))}"
    return f"{theirs} there, {ours} here"
