"""The words of --average, which commands that read a checkpoint have. No JAX."""

import re
from typing import Any

from tasks.terminal.flag_fields import Rule

_LAST = re.compile(r"last:([1-9]\d{0,5})")


def last_count(average: str) -> int | None:
    """Returns K of "last:K"; None for another text."""
    found = _LAST.fullmatch(average)
    return int(found[1]) if found else None


def label(split: str, average: str) -> str:
    """Returns the name of an average's results for SPLIT or SPLIT/TASK: "validation.last3"."""
    name, slash, task = split.partition("/")
    return f"{name}.{average.replace(':', '')}{slash}{task}"


# Keywords of the field `average` of commands that read a checkpoint.
OF_COMMANDS: dict[str, Any] = {
    "words": "use averaged parameters: last:K, the mean of the K newest checkpoints up to the "
    "step; by default the checkpoint's own parameters",
    "rule": Rule("last:K, with K of 2 or more", lambda one: (last_count(one) or 0) > 1),
}
