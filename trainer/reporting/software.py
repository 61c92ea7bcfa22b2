"""The versions of the software that a run uses, kept beside it."""

import os
import platform
import subprocess
from importlib.metadata import version

from tasks.storage import files

_SOFTWARE_FILE = "software.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "palimpsest")


def save_software(model_dir: str) -> None:
    """Writes the project's commit and the versions of its dependencies into `model_dir`."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    files.write_json(
        files.join(model_dir, _SOFTWARE_FILE), {"commit": _commit(), "versions": versions}
    )


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
