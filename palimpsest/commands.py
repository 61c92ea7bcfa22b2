"""The commands under the names that `palimpsest` gives them: name -> module, in groups."""

import importlib.util
import pathlib

from tasks import annexes
from tasks.terminal.command import Command

_CORE: dict[str, dict[str, str]] = {
    "all stages": {},
    "vocabularies": {"vocab train": "vocab.train"},
    "caches": {
        "build": "pipeline.build",
        "verify": "pipeline.verify",
    },
    "training": {
        "pretrain": "trainer.pretrain",
        "finetune": "trainer.finetune",
        "evaluate": "trainer.evaluate",
    },
    "models": {
        "generate": "trainer.generate",
        "export": "trainer.export",
    },
}


def _groups() -> dict[str, dict[str, str]]:
    """Returns the commands of the core and of annexes, which may add groups."""
    found = {group: dict(commands) for group, commands in _CORE.items()}
    annexes.reserve("commands", (name for commands in _CORE.values() for name in commands))
    for slot in annexes.slots():
        kind, _, group = slot.partition(".")
        if kind == "commands":
            found.setdefault(group, {}).update(annexes.entries(slot))
    return found


GROUPS = _groups()
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}
annexes.reserve("words", {"--help", "-h", "--version", *(name.split()[0] for name in COMMANDS)})


def summary(module: str) -> str:
    """Returns the first line of a command's docstring; the module is not imported."""
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # whatever the packages above it raise
        found = None
    if found is None or found.origin is None:
        return f"(no module {module})"
    with pathlib.Path(found.origin).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def command(module: str) -> Command:
    """Imports and returns the command of a module; raises BrokenAnnex if a stranger's fails."""
    found: Command = annexes.load(f"{module}:main")
    return found
