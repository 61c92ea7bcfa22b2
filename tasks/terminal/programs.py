"""The words that run this project's commands, for advice that can be copied."""

import contextlib
from collections.abc import Iterator, Mapping

from tasks import annexes

_short: Mapping[str, str] = {}


@contextlib.contextmanager
def named(short: Mapping[str, str]) -> Iterator[None]:
    """Calls commands by short words, given by module, within a block."""
    global _short
    before, _short = _short, short
    try:
        yield
    finally:
        _short = before


def program(module: str) -> str:
    """Returns the words before a command's flags, as the user's own command began.

    That is `palimpsest build`, or else `python -m pipeline.build`. Commands of annexes have only
    the former.
    """
    return _short.get(module) or _annexed().get(module) or f"python -m {module}"


def _annexed() -> dict[str, str]:
    return {
        module: f"palimpsest {name}"
        for slot in annexes.slots()
        if slot.startswith("commands.")
        for name, module in annexes.entries(slot).items()
    }
