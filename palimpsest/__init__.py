"""One command line for all commands, `batches` for any trainer, and functions that annexes add.

Those are names of the slot "python", which are loaded when they are used, and JAX or Beam when a
command needs them.
"""

from typing import Any

import palimpsest_home

palimpsest_home.settle(__path__[0])
_OWN = {"UserError": "tasks.terminal.command_line:UserError", "batches": "trainer.reading:batches"}


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tasks import annexes

    annexes.reserve("python", _OWN)
    known = {**_OWN, **annexes.entries("python")}
    if name == "__all__":
        return sorted(known)
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return annexes.load(known[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
