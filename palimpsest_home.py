"""Makes the commands find this project's packages, whatever lies in the current folder.

Its packages have everyday names. A T5X project keeps a `tasks.py` beside its gin files, and Python
looks into the current folder and PYTHONPATH first, so that file would be imported, and run, in
place of our package. `palimpsest_home.pth` calls `start` when Python starts where this project is
installed; other programs see nothing of it, and their `import tasks` finds their own.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself is not worth its time in every process
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import NoReturn

PACKAGES = ("benchmarks", "experiments", "palimpsest", "pipeline", "tasks", "trainer", "vocab")
# Tells child processes, such as Beam's workers, that their parent is one of our commands.
_MARK = "_PALIMPSEST_HOME"
# The file of a user's module that has one of our names; it is imported as OWN + its name.
_OWN_FILE = "_PALIMPSEST_OWN_FILE"
OWN = "own_"
# Python's options that take a value, as the next word if none is attached.
_WITH_VALUE = "WX"


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
        file = os.environ.get(_OWN_FILE, "")
        if file and name == OWN + os.path.basename(file).removesuffix(".py"):
            from importlib.util import spec_from_file_location

            return spec_from_file_location(name, file)
        return None


def root() -> str:
    """Returns the folder of our packages: the current one if it has them, else this file's."""
    here = os.path.abspath(os.path.basename(__file__))
    return os.path.dirname(here if os.path.isfile(here) else os.path.abspath(__file__))


def settle(folder: str = "") -> None:
    """Makes this process and its children import our packages from a folder, or from `root()`."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    os.environ[_MARK] = folder = folder or root()
    sys.meta_path.insert(0, _Finder(folder))


def importable(file: str) -> str:
    """Returns the name under which this process and its children can import a user's file."""
    folder, name = os.path.split(os.path.abspath(file))
    name = name.removesuffix(".py")
    if name in PACKAGES:
        settle()
        os.environ[_OWN_FILE] = os.path.join(folder, f"{name}.py")
        return OWN + name
    if folder not in sys.path:
        sys.path.insert(0, folder)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return name


def module_of(words: Sequence[str]) -> str:
    """Returns the module that a command line of Python runs by -m, or ""."""
    rest = iter(words[1:])
    for word in rest:
        if word == "-" or not word.startswith("-"):  # a script
            return ""
        for at, letter in enumerate(word[1:], 2):
            if letter == "m":
                return word[at:] or next(rest, "")
            if letter == "c":
                return ""
            if letter in _WITH_VALUE:
                if not word[at:]:
                    next(rest, "")
                break
    return ""


def start() -> None:
    """Settles if this process runs one of our modules, or was started by one that did."""
    module = module_of(sys.orig_argv)
    package, dot, _ = module.partition(".")
    path = os.path.join(root(), *module.split("."))
    if package in PACKAGES and os.path.isfile(f"{path}.py" if dot else f"{path}/__main__.py"):
        settle()
    elif folder := os.environ.get(_MARK):
        settle(folder)


def main() -> NoReturn:
    """Runs `palimpsest COMMAND …`."""
    settle()
    from palimpsest.__main__ import main

    main()
