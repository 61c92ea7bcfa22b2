"""The software and hardware of a run, kept beside it: what its bits depend on besides its data."""

import os
import platform
import subprocess
from importlib.metadata import version
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.engine import determinism

_SOFTWARE_FILE = "software.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "palimpsest")
# The packages whose versions may change the results of a run.
_COMPUTING = ("jax", "jaxlib", "flax", "optax", "palimpsest")


def save_software(model_dir: str) -> list[str]:
    """Writes the project's commit, the versions of its dependencies and the hardware.

    Returns:
      A message for each difference from the last start in `model_dir` that may change results.
    """
    path = files.join(model_dir, _SOFTWARE_FILE)
    before = read_software(model_dir)
    now: dict[str, Any] = {
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "hardware": determinism.hardware(),
    }
    files.write_json(path, now)
    changes = _changes(before.get("hardware", {}), now["hardware"])
    old, new = (
        {name: found[name] for name in _COMPUTING if name in found}
        for found in (before.get("versions", {}), now["versions"])
    )
    return changes + _changes(old, new)


def read_software(model_dir: str) -> dict[str, Any]:
    """Returns what the last start wrote; {} if there is nothing or it is damaged."""
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
    """Returns the project's git commit; None outside a clone or without git."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    if not os.path.exists(os.path.join(root, ".git")):
        return None
    command = ["git", "-C", root, "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
