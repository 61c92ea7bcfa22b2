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

PACKAGES = ("palimpsest", "pipeline", "tasks", "trainer", "vocab")
# Tells child processes, such as Beam's workers, that their parent is one of our commands.
_MARK = "_PALIMPSEST_HOME"
# The file of a user's module, which processes import under `own_name`.
_OWN_FILE = "_PALIMPSEST_OWN_FILE"
# The beginning of that name.
_OWN = "own_"
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
        # Other names must not need `own_name`, whose import would come back here.
        file = os.environ.get(_OWN_FILE) if name.startswith(_OWN) else None
        if file and name == own_name(file):
            from importlib.util import spec_from_file_location

            return spec_from_file_location(name, file)
        return None


def root() -> str:
    """Returns the folder of our packages: the current one if it has them, else this file's."""
    checkout = all(os.path.isfile(f"{package}/__init__.py") for package in PACKAGES[1:])
    return os.getcwd() if checkout else os.path.dirname(os.path.abspath(__file__))


def settle(folder: str = "") -> None:
    """Makes this process and its children import our packages from a folder, or from `root()`."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    os.environ[_MARK] = folder = folder or root()
    sys.meta_path.insert(0, _Finder(folder))
    if file := os.environ.get(_OWN_FILE):
        _find_neighbours(file)


def own_name(file: str) -> str:
    """Returns the name under which a user's file is imported, which no other module has."""
    from zlib import crc32

    folder, name = os.path.split(file)
    name = os.path.basename(folder) if name == "__init__.py" else name.removesuffix(".py")
    plain = "".join(letter if letter.isalnum() else "_" for letter in name)
    return f"{_OWN}{plain}_{crc32(os.fsencode(file)):08x}"


def importable(file: str) -> str:
    """Returns the name under which this process and its children can import a user's file."""
    settle()
    os.environ[_OWN_FILE] = file = os.path.abspath(file)
    _find_neighbours(file)
    return own_name(file)


def _find_neighbours(file: str) -> None:
    """Lets a user's file import those in its folder; libraries of the same names come first."""
    folder, name = os.path.split(file)
    folder = os.path.dirname(folder) if name == "__init__.py" else folder
    if folder not in sys.path:
        sys.path.append(folder)


def module_of(words: Sequence[str]) -> str:
    """Returns the module that a command line of Python runs by -m, or ""."""
    rest = iter(words[1:])
    for word in rest:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, "")
            continue
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
    """Settles if this process runs one of our modules, or is a worker of one that does."""
    words = sys.orig_argv
    module = module_of(words)
    package, dot, _ = module.partition(".")
    if package in PACKAGES:
        path = os.path.join(root(), *module.split("."))
        if os.path.isfile(f"{path}.py" if dot else f"{path}/__main__.py"):
            settle()
            _end_quietly()
    elif (folder := os.environ.get(_MARK)) and any(map(_is_of_a_worker, words)):
        settle(folder)


def _is_of_a_worker(word: str) -> bool:
    """Returns whether a command line with this word is our worker's, not a user's program."""
    return word.startswith(("from multiprocessing.", "from tasks.terminal import child"))


def _end_quietly() -> None:
    """Lets Ctrl-C end this process without a traceback until the command handles it."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> NoReturn:
    """Runs `palimpsest COMMAND …`."""
    _end_quietly()
    settle()
    from palimpsest.__main__ import main

    main()
