"""The commands under the names that `palimpsest` gives them: name -> module, in groups."""

import importlib
import importlib.util
import pathlib

from tasks.terminal.command import Command

GROUPS: dict[str, dict[str, str]] = {
    "all stages": {
        "run": "palimpsest.run",
        "recipes": "palimpsest.list_recipes",
    },
    "vocabularies": {
        "vocab train": "vocab.train",
        "vocab train_tokenizer": "vocab.train_tokenizer",
        "vocab report": "vocab.report",
        "vocab compare": "vocab.compare",
        "vocab trim": "vocab.trim",
    },
    "caches": {
        "build": "pipeline.build",
        "dedup": "pipeline.dedup",
        "inspect": "pipeline.inspect",
        "verify": "pipeline.verify",
        "adopt": "pipeline.adopt",
        "cache report": "pipeline.report",
        "write_pairs": "tasks.write_pairs",
        "make_questions": "tasks.make_questions",
        "beam worker_pool": "pipeline.worker_pool",
        "beam job_service": "pipeline.job_service",
    },
    "training": {
        "plan": "trainer.plan",
        "pretrain": "trainer.pretrain",
        "finetune": "trainer.finetune",
        "evaluate": "trainer.evaluate",
        "harness": "trainer.harness",
        "report": "trainer.report",
        "compare": "trainer.compare",
        "explain": "trainer.explain",
    },
    "models": {
        "generate": "trainer.generate",
        "fill": "trainer.fill",
        "export": "trainer.export",
        "export_t5x": "trainer.export_t5x",
        "convert": "trainer.convert",
        "trim": "trainer.trim",
    },
}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


def installed() -> dict[str, str]:
    """Returns the commands of other packages: their entry points in `palimpsest.commands`."""
    from importlib.metadata import entry_points

    return {each.name: each.value for each in entry_points(group="palimpsest.commands")}


def summary(module: str) -> str:
    """Returns the first line of a command's docstring; the module is not imported."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # nor its package
        found = None
    if found is None or found.origin is None:
        return f"(no module {module})"
    with pathlib.Path(found.origin).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def command(module: str) -> Command:
    """Imports and returns the command of a module."""
    found: Command = importlib.import_module(module).main
    return found
