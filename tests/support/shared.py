"""Folders that all processes of the tests share, made once for the sources they come from."""

import fcntl
import hashlib
import pathlib
import shutil
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = ROOT / ".pytest_cache"
_SOURCES = ("vocab", "tasks", "pipeline")


def folder(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns a folder that `make` has filled; tests must not change it.

    A change to a module that builds caches makes it again, and removes the old one.
    """
    digest = hashlib.sha256()
    for path in sorted(path for each in _SOURCES for path in (ROOT / each).rglob("*.py")):
        digest.update(path.read_bytes())
    kept, made = _FOLDER / name, _FOLDER / name / digest.hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "made").exists():
            for old in kept.glob("*/"):
                shutil.rmtree(old)
            made.mkdir()
            make(made)
            (made / "made").touch()
    return made
