"""Tokenizer tables in the user's cache folder."""

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tasks.storage import files


def load_or_make(
    key: bytes, modules: Iterable[str], kinds: tuple[Any, ...], make: Callable[[], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Loads tables, one named tuple per `kinds`, or makes and writes them.

    Their key is `key` with the contents of the source files `modules`. No two kinds share a field.
    """
    digest = hashlib.sha256(key)
    for module in modules:
        with open(module, "rb") as file:
            digest.update(file.read())
    path = os.path.join(_folder(), f"tokenizer-{digest.hexdigest()[:32]}.npz")
    try:
        with np.load(path, allow_pickle=False) as kept:
            return tuple(_from_arrays(kind, kept) for kind in kinds)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        pass  # missing or damaged: make the tables
    made = make()
    with contextlib.suppress(OSError):  # no writable home: continue without a cache
        os.makedirs(_folder(), exist_ok=True)
        with files.atomic_write(path) as file:
            arrays = {name: value for each in made for name, value in each._asdict().items()}
            np.savez(file, **arrays)
    return made


def _folder() -> str:
    """Returns the user's cache folder. Source: the XDG Base Directory Specification."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "palimpsest")


def _from_arrays(kind: Any, arrays: Any) -> Any:
    values = {name: arrays[name] for name in kind._fields}
    return kind(**{name: value if value.ndim else value.item() for name, value in values.items()})
