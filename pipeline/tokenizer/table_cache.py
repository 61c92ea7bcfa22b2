"""Tokenizer tables in the user's cache folder."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tasks.storage import files, user_cache
from tasks.terminal.command_line import UserError

_MOST_BYTES = 1 << 30


def load_or_make(
    key: bytes, modules: Iterable[str], names: Iterable[str], make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Loads values by name; makes and stores them if `key` or a source file in `modules` is new."""
    digest = hashlib.sha256(key)
    for module in modules:
        with open(module, "rb") as file:
            digest.update(file.read())
    folder = user_cache.folder()
    path = folder / f"tokenizer-{digest.hexdigest()[:32]}.npz"
    try:
        with open(path, "rb") as stored, np.load(stored, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in names}
        return {name: array if array.ndim else array.item() for name, array in arrays.items()}
    except Exception:  # missing, or damaged in any way
        pass
    made = make()
    # No writable home, or a folder in the place of the file: continue without a cache.
    with contextlib.suppress(OSError, UserError):
        folder.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(str(path)) as file:
            np.savez(file, **made)
        user_cache.remove_oldest(folder, "tokenizer-*.npz", _MOST_BYTES)
    return made
