"""The words that run this project's commands, for advice that can be copied."""

import contextlib
from collections.abc import Iterator, Mapping

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

    That is `palimpsest build`, or else `python -m pipeline.build`.
    """
    return _short.get(module) or f"python -m {module}"
