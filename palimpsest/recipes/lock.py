"""The lock file beside a recipe: what its stages were given and made, by hash, and with what."""

import pathlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from palimpsest.recipes.products import Product
from palimpsest.recipes.recipe import Recipe, Stage
from palimpsest.recipes.records import HOW
from tasks.storage import files
from tasks.terminal.command_line import UserError

_FORMAT = 1
_PROCESSES = "processes."
_PACKAGES = (
    *("palimpsest-lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain"),
    *("apache-beam", "pyarrow", "sentencepiece", "transformers"),
)


def path_of(recipe: Recipe) -> pathlib.Path:
    """Returns the lock file of a recipe: RECIPE.lock beside RECIPE.toml."""
    return recipe.path.with_suffix(".lock")


def read(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe's lock; raises UserError if there is none."""
    path = path_of(recipe)
    if not path.exists():
        raise UserError(f"--locked: there is no {path}; a run without --locked writes it")
    value = files.read_json(str(path))
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise UserError(f"{path} is not a lock file: delete it, and run without --locked")
    return value


def write(recipe: Recipe, made: Mapping[str, Product | None]) -> None:
    """Writes the lock of all stages that are finished."""
    stages = {
        stage.name: {**_given(recipe, stage), "made": made[stage.name]}
        for stage in recipe.stages
        if made[stage.name] is not None
    }
    files.write_json(
        str(path_of(recipe)), {"format": _FORMAT, "software": software(), "stages": stages}
    )


def check_stages(recipe: Recipe, locked: Mapping[str, Any]) -> None:
    """Raises UserError if flags or software differ from the lock's."""
    for stage in recipe.stages:
        theirs, ours = locked["stages"].get(stage.name, {}), _given(recipe, stage)
        for key in ("command", "flags"):
            if theirs.get(key) != ours[key]:
                raise UserError(
                    f"--locked: {stage.name} has other {key} than in {path_of(recipe)}: "
                    f"{_first(theirs.get(key), ours[key])}"
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
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _given(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Returns a stage's command and flags, for any folder and without what changes no result."""
    flags = {
        name: [text.replace(recipe.folder, "{folder}", 1) for text in texts]
        for name, texts in stage.flags.items()
        if name not in HOW and not name.startswith(_PROCESSES)
    }
    return {"command": stage.command, "flags": flags}


def _first(theirs: Any, ours: Any) -> str:
    """Returns the first difference of two values in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                return f"{name}: {_first(theirs.get(name), ours.get(name))}"
    return f"{theirs} there, {ours} here"
