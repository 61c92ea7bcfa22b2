"""Records a run's software and hardware, on which its results depend besides the data."""

import os
import platform
import subprocess
from importlib.metadata import version
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.extras import DISTRIBUTION
from trainer.engine import determinism

_SOFTWARE_FILE = "software.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Packages whose versions may change results.
_COMPUTING = ("jax", "jaxlib", "flax", "optax", "palimpsest")


def save_software(model_dir: str) -> list[str]:
    """Records commit, package versions and hardware; returns changes that may affect results."""
    path = files.join(model_dir, _SOFTWARE_FILE)
    before = read_software(model_dir)
    now: dict[str, Any] = {
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
            "palimpsest": version(DISTRIBUTION),
        },
        "hardware": determinism.hardware(),
    }
    files.write_json(path, now)
    old, new = (each.get("versions", {}) for each in (before, now))
    computing = {name: version for name, version in new.items() if name in _COMPUTING}
    return _changes(before.get("hardware", {}), now["hardware"]) + _changes(old, computing)


def read_software(model_dir: str) -> dict[str, Any]:
    """Returns the record of the last start; {} if it is missing or damaged."""
    path = files.join(model_dir, _SOFTWARE_FILE)
    try:
        found = files.read_json(path) if files.exists(path) else {}
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _commit() -> str | None:
    """Returns the project's git commit; None outside of a clone or without git."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    if not os.path.exists(os.path.join(root, ".git")):
        return None
    command = ["git", "-C", root, "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
