"""docs/migrating.md: every flag of ours that it names exists and parses."""

import pathlib
import re
import shlex

import pytest

from tasks import registry
from tasks.reading import spec
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from trainer import pretrain
from trainer.config.optimizer import OPTIMIZER_PRESETS
from trainer.config.presets import MODEL_PRESETS
from trainer.pretrain import build_config

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "migrating.md").read_text()
TABLES, READMES = TEXT.split("\n## Commands of their READMEs\n")
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
APART = ("--optimizer_preset", "--optimizer.name=adafactor", "--model.norm", "--model.num_experts")
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


def theirs(section):
    """Returns [(a flag that the left column quotes, the right cell)] of a section's table."""
    rows = [row.strip("| ").split(" | ") for row in SECTIONS[section].splitlines()]
    cells = [(quoted, ours) for left, ours, *_ in (row for row in rows if len(row) > 1)
             for quoted in re.findall(r"`([^`]+)`", left)]  # fmt: skip
    flags = [(re.match(r"--[\w.-]+|\w+\.?\w+(?==)", quoted), ours) for quoted, ours in cells]
    return [(flag[0], ours) for flag, ours in flags if flag]


def refusal(flag):
    """Returns the message about an unknown flag, or "" where a flag of ours has its name."""
    try:
        build_config("t5_1_1_small", [f"--{flag.removeprefix('--')}=1"])
    except UserError as error:
        message = str(error)
        return message if "unknown flag" in message else ""
    return ""


@pytest.mark.parametrize("section", SECTIONS)
def test_a_flag_of_theirs_is_answered_by_ours(section):
    answers = [(refusal(flag), ours) for flag, ours in theirs(section) if refusal(flag)]
    assert len(answers) > 10
    for message, ours in answers:
        meant = re.search(r"did you mean (.+)\?\)", message)
        if not meant:
            assert "no counterpart" in message
            assert "—" in ours
            continue
        flags = [text.split("=")[0].split()[-1] for text in meant[1].split(" or ")]
        assert any(flag in ours for flag in flags), message


def test_commands_of_their_readmes_are_read(capsys):
    blocks = re.findall(r"^    (python -m trainer.pretrain --preset=(?:.*\\\n)*.*)$", READMES, re.M)
    assert len(blocks) == 4
    for block in blocks:
        words = shlex.split(block.replace("\\\n", " "))[3:]
        assert pretrain.main([*words, "--cache_dir=", "--print_config"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("# command line") == len(words)


@pytest.mark.parametrize("module", OF_COMMANDS)
def test_flags_of_other_commands_exist(module):
    given = [shlex.split(cell)[1:] for name in SECTIONS for cell in cells(name)
             if cell.startswith(f"{module} ")]  # fmt: skip
    assert given
    shown = started("-m", module, "--help").stdout
    for flags in given:
        for flag in flags:
            name, _, value = flag.partition("=")
            assert name in re.findall(r"--[a-z_]+", shown), flag
            if name == "--corpus":
                spec.parse(value)
