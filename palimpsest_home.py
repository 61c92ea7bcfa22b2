"""Makes this project's packages find each other, whatever lies in the current folder.

They have everyday names. A T5X project keeps a `tasks.py` beside its gin files, and Python looks
into the current folder and PYTHONPATH first, so our packages would import, and run, that file in
place of ours. Each of them calls `settle` in its first line; programs that import none of them see
nothing of it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself is not worth its time in every process
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, NoReturn

PACKAGES = ("palimpsest", "pipeline", "tasks", "trainer", "vocab")
# The file of a user's module, which processes import under `own_name`.
_OWN_FILE = "_PALIMPSEST_OWN_FILE"
# The beginning of that name.
_OWN = "own_"


class _Finder:
    """Finds our packages in the folder `root`, before the entries of sys.path."""

    def __init__(self, root: str):
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and name in PACKAGES:
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, [self.root])
        # Other names must not need `own_name`, whose import would come back here.
        file = os.environ.get(_OWN_FILE) if name.startswith(_OWN) else None
        if file and name == own_name(file):
            from importlib.util import spec_from_file_location

            return spec_from_file_location(name, file)
        return None


def settle(folder: str) -> None:
    """Makes this process import our packages from beside `folder`, one of them.

    Raises ImportError if the program has already imported another module of such a name.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    root = os.path.dirname(os.path.abspath(folder))
    for name in PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not os.path.abspath(file).startswith(os.path.join(root, name, "")):
            raise ImportError(
                f"{file} was imported as {name}, which is the name of a package of Palimpsest: "
                f"import {os.path.basename(folder)} before it, or rename it"
            )
    sys.meta_path.insert(0, _Finder(root))
    if file := os.environ.get(_OWN_FILE):
        _find_neighbours(file)
    if sys.argv[:1] == ["-m"] and _is_named(os.path.basename(folder)):
        end_quietly()


def new(module: str, name: str) -> Any:
    """Returns a new object of a class of ours, without its state.

    For `__reduce__`: an object that a new process unpickles before it has imported any of ours.
    """
    settle(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks"))
    from importlib import import_module

    kind = getattr(import_module(module), name)
    return kind.__new__(kind)


def own_name(file: str) -> str:
    """Returns the name under which a user's file is imported, which no other module has."""
    from zlib import crc32

    folder, name = os.path.split(file)
    name = os.path.basename(folder) if name == "__init__.py" else name.removesuffix(".py")
    plain = "".join(letter if letter.isalnum() else "_" for letter in name)
    return f"{_OWN}{plain}_{crc32(os.fsencode(file)):08x}"


def importable(file: str) -> str:
    """Returns the name under which this process and its children can import a user's file."""
    os.environ[_OWN_FILE] = file = os.path.abspath(file)
    _find_neighbours(file)
    return own_name(file)


def _find_neighbours(file: str) -> None:
    """Lets a user's file import those in its folder; libraries of the same names come first."""
    folder, name = os.path.split(file)
    folder = os.path.dirname(folder) if name == "__init__.py" else folder
    if folder not in sys.path:
        sys.path.append(folder)


def _is_named(package: str) -> bool:
    """Returns whether the command line of Python names a module of the package, as after -m."""
    return any(word.partition(".")[0] == package for word in sys.orig_argv)


def end_quietly() -> None:
    """Lets Ctrl-C end this process without a traceback until the command handles it."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> NoReturn:
    """Runs `palimpsest COMMAND …`."""
    end_quietly()
    settle(os.path.join(os.path.dirname(os.path.abspath(__file__)), "palimpsest"))
    from palimpsest.__main__ import main

    main()
