"""The peers: programs that we are compared with, read from or export to.

A test that needs one has its mark, and a process of tests has one peer at most: `pytest
--peer=torch` runs the tests with the mark torch, `pytest` alone those without any. Other peers then
look as if they were not installed, so that no test imports one by accident, and TensorFlow and
torch never meet in one process. The commands that a test starts may import any peer.
"""

import ast
import functools
import pathlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# The mark of each peer, and the packages that only its tests may import.
PEERS = {
    "tensorflow": ("seqio", "t5", "t5x", "tensorflow", "tensorflow_datasets", "tensorflow_text"),
    "torch": ("accelerate", "lm_eval", "torch", "transformers"),
    "google": ("gcsfs",),
    "wandb": ("wandb",),
    "engines": ("pyspark", "ray"),
    "notebook": ("ipykernel", "nbclient"),
}
MARKS = {
    "tensorflow": "needs TensorFlow and seqio",
    "torch": "needs torch and transformers",
    "google": "needs gcsfs and Beam's Google Cloud parts",
    "wandb": "needs wandb",
    "engines": "needs Spark or Ray; see `make test-engines`",
    "notebook": "needs Jupyter's kernel",
}


class _Finder:
    """Finds modules as Python's own finder does, but for those of the packages `hidden`."""

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

    def __init__(self, hidden: frozenset[str]):
        self.hidden = hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        return PathFinder.find_spec(name, path, target)


def hide(peer: str | None) -> None:
    """Makes imports of every peer but one fail in this process, as if it were not installed."""
    hidden = frozenset(each for name in PEERS if name != peer for each in PEERS[name])
    if early := hidden & sys.modules.keys():
        raise RuntimeError(f"imported before the tests began: {', '.join(sorted(early))}")
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder(hidden)


@functools.cache
def marks_of(path: pathlib.Path) -> tuple[frozenset[str], bool]:
    """Returns the peers whose marks a file of tests has, and whether the whole file has one."""
    text = path.read_text()
    named = frozenset(peer for peer in PEERS if f"mark.{peer}" in text)
    if not named:
        return named, False
    whole = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    of_file = {peer for node in whole for peer in named if f"mark.{peer}" in ast.unparse(node)}
    return frozenset(of_file) or named, bool(of_file)
