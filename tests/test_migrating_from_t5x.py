"""docs/migrating_from_t5x.md: its commands and names exist."""

import importlib
import pathlib
import re
import shlex

import pytest

from tasks import registry
from tasks.terminal.flags import flags_of
from trainer.annexes.gin import includes, t5x_run_table
from trainer.annexes.mesh_gin import includes as mesh_includes
from trainer.annexes.mesh_gin import tables as mesh_tables
from trainer.config import Config, field_paths
from trainer.config.presets import model_preset

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "migrating_from_t5x.md").read_text()
CONFIG = Config("t5_1_1_small", model_preset("t5_1_1_small"))
FIELDS = {path for path, _ in field_paths.leaves(CONFIG)}


def commands():
    blocks = re.sub(r"\\\n\s+", " ", TEXT)
    found = [line.strip() for line in blocks.splitlines() if line.startswith("    python -m ")]
    assert len(found) > 4
    return found


def names_of(module):
    kind = importlib.import_module(module).main.flags
    return {f"--{name}" for flag in flags_of(kind) for name in flag.names}


@pytest.fixture(scope="module")
def known_flags():
    modules = {shlex.split(command)[2] for command in commands()}
    return {module: names_of(module) for module in modules}


@pytest.mark.parametrize("command", commands())
def test_flags_of_commands_exist(command, known_flags):
    _, _, module, *flags = shlex.split(command)
    names = {flag.partition("=")[0] for flag in flags}
    assert {name for name in names if not name.startswith("--gin.")} <= known_flags[module]
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == "--task":
            assert value in registry.names()
        if name == "--gin_file" and "/" in value:
            assert value in mesh_includes.DESCRIPTIONS


def test_flags_and_fields_in_the_text_exist(known_flags):
    every = set().union(*known_flags.values())
    for flag in re.findall(r"`(--[\w.]+)", TEXT):
        assert flag in every, flag
    table = TEXT.partition("| gin | field |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        for name in re.findall(r"`([a-z_.]+(?:\.\*)?)`", row.split("|")[2]):
            group = name.removesuffix("*")
            assert name in FIELDS or any(path.startswith(group) for path in FIELDS), name


def test_gin_names_exist():
    known = (*t5x_run_table.KNOWN, *mesh_tables.KNOWN)
    macros = {*includes.MACROS, *mesh_tables.MACROS}
    configurables = {each.short for each in known}
    arguments = {name for each in known for name in each.arguments}
    pairs = {f"{each.short}.{name}" for each in known for name in each.arguments}
    table = TEXT.partition("| gin | field |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    for name in re.findall(r"`([^`]+)`", " ".join(cells)):
        name = name.partition(" ")[0].rpartition("/")[2].removesuffix(".*")
        parts = name.split(".")
        if len(parts) > 1 and parts[-2] in configurables:
            assert ".".join(parts[-2:]) in pairs, name
        else:
            assert name in macros or parts[-1] in configurables | arguments, name
    for path in re.findall(r"models/t5\.1\.1\.\w+\.gin|objectives/\w+\.gin", TEXT):
        assert path in mesh_includes.DESCRIPTIONS
