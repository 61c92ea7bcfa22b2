"""docs/migrating.md: every flag of ours that it names exists and parses."""

import importlib
import pathlib
import re
import shlex

import pytest

from tasks import registry
from tasks.reading import spec
from tasks.terminal.flags import flags_of
from trainer.config.from_flags import build_config
from trainer.config.optimizer import OPTIMIZER_PRESETS
from trainer.config.presets import MODEL_PRESETS

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "migrating.md").read_text()
TABLES = TEXT.partition("\n## Commands of their READMEs\n")[0]
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TABLES, re.MULTILINE | re.DOTALL))
OF_COMMANDS = ("pipeline.build", "trainer.evaluate", "trainer.export")


def cells(section):
    """Returns what the right column of a section's table quotes."""
    rows = [row for row in SECTIONS[section].splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[1])]


def of_training(section):
    """Returns the flags of trainer.pretrain in a section."""
    found = [shlex.split(cell) for cell in cells(section) if cell.startswith("--")]
    assert all(len(words) == 1 for words in found)
    return [word for (word,) in found]


def parse(flags):
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    preset = given.pop("preset", "t5_1_1_small")
    assert preset in MODEL_PRESETS
    recipe = given.pop("optimizer_preset", None)
    assert recipe is None or recipe in OPTIMIZER_PRESETS
    task = given.get("task", "")
    assert not task or task.startswith("seqio:") or task in registry.names()
    return build_config(preset, [f"--{name}={value}" for name, value in given.items()], recipe)


# Flags that one column offers for other ones: the test gives each a run of its own.
APART = ("--optimizer_preset", "--optimizer.name=adafactor", "--model.norm", "--model.feed_forward")
ADAM = ["--optimizer.name=adamw", "--optimizer.learning_rate=0.1"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_flag_exists_and_parses(section):
    flags = of_training(section)
    together = [flag for flag in flags if not flag.startswith(APART)]
    names = [flag.partition("=")[0] for flag in flags]
    if "--optimizer.name=adafactor" not in flags or section == "nanoT5":
        together = [*ADAM, *together]
    else:
        together.append("--optimizer.name=adafactor")
    _, origins = parse(together)
    assert set(origins) >= {name.removeprefix("--") for name in names if "preset" not in name}
    for flag in flags:
        if flag.startswith(APART):
            parse([flag])


@pytest.mark.parametrize("module", OF_COMMANDS)
def test_flags_of_other_commands_exist(module):
    given = [shlex.split(cell)[1:] for name in SECTIONS for cell in cells(name)
             if cell.startswith(f"{module} ")]  # fmt: skip
    assert given
    known = {
        name for flag in flags_of(importlib.import_module(module).main.flags) for name in flag.names
    }
    for flags in given:
        for flag in flags:
            name, _, value = flag.partition("=")
            assert name.removeprefix("--") in known, flag
            if name == "--corpus":
                spec.parse(value)
