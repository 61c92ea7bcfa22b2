"""Tokenizer tables in the user's cache folder."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tasks.storage import files


def load_or_make(
    key: bytes, modules: Iterable[str], names: Iterable[str], make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Loads values by name; makes and stores them if `key` or a source file in `modules` is new."""
    digest = hashlib.sha256(key)
    for module in modules:
        with open(module, "rb") as file:
            digest.update(file.read())
    path = os.path.join(_folder(), f"tokenizer-{digest.hexdigest()[:32]}.npz")
    try:
        with np.load(path, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in names}
        return {name: array if array.ndim else array.item() for name, array in arrays.items()}
    except Exception:  # missing, or damaged in any way
        pass
    made = make()
    with contextlib.suppress(OSError):  # no writable home: continue without a cache
        os.makedirs(_folder(), exist_ok=True)
        with files.atomic_write(path) as file:
            np.savez(file, **made)
    return made


def _folder() -> str:
    """Returns the user's cache folder. Source: the XDG Base Directory Specification."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "palimpsest")
