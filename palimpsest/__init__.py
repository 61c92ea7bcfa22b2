"""One command line for all commands, `batches` for any trainer, and functions that annexes add.

Those are names of the slot "python", which are loaded when they are used, and JAX or Beam when a
command needs them.
"""

import importlib.abc
import importlib.util
import sys
from typing import Any

import palimpsest_home

palimpsest_home.settle(__path__[0])
_OWN = {"UserError": "tasks.terminal.command_line:UserError", "batches": "trainer.reading:batches"}


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tasks import annexes

    known = _known()
    if name == "__all__":  # a module, such as that of PyTorch, is imported by its name alone
        return sorted(each for each, reference in known.items() if ":" in reference)
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return annexes.load(known[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *_known()})


def _known() -> dict[str, str]:
    """Returns the reference of each name."""
    from tasks import annexes

    annexes.reserve("python", _OWN)
    return {**_OWN, **annexes.entries("python")}


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of annexes by their short names, as in `from palimpsest.torch import …`."""

    def find_spec(self, name: str, *_: object) -> Any:
        package, _dot, last = name.partition(".")
        found = package == __name__ and ":" not in _known().get(last, ":")
        return importlib.util.spec_from_loader(name, self) if found else None

    def exec_module(self, module: Any) -> None:
        sys.modules[module.__name__] = __getattr__(module.__name__.partition(".")[2])


sys.meta_path.append(_Modules())
