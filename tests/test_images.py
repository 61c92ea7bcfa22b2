"""The container images, as far as they can be checked without Docker and without a network.

docker/check.py executes their steps.
"""

import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

from tests.support.processes import started

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGES = ("pipeline", "trainer")


def instructions(image):
    place = importlib.util.spec_from_file_location("docker_check", ROOT / "docker/check.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.instructions(ROOT / "docker" / f"Dockerfile.{image}")


def copied(image):
    """Returns what is copied from the clone."""
    found = []
    for word, rest in instructions(image):
        if word == "COPY" and not rest.startswith("--from"):
            found += rest.split()[:-1]
    return found


def installed(image):
    """Returns the command of pip and the extras that it installs."""
    values = dict(rest.split("=") for word, rest in instructions(image) if word == "ARG")
    (command,) = (rest for word, rest in instructions(image) if rest.startswith("pip "))
    for name, value in values.items():
        command = command.replace(f"${{{name}}}", value)
    return command, re.search(r"\.\[([\w,]+)\]", command)[1].split(",")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_every_package(image):
    sources = copied(image)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in sources)
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["only-include"]}
    assert {"tasks", "trainer"} <= wanted <= set(sources)
    assert {
        name for name in packages if name not in ("benchmarks", "experiments", "tests")
    } <= wanted
    named = (PROJECT["project"]["readme"], *PROJECT["project"]["license-files"])
    assert not [each for each in named if not {each, each.partition("/")[0]} & set(sources)]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_pinned_extras_that_exist(image):
    command, extras = installed(image)
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    (constraints,) = re.findall(r"--constraint (\S+)", command)
    assert constraints in copied(image)
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / constraints).read_text(), re.MULTILINE)
    assert set(command.rpartition('" ')[2].split() if '" ' in command else []) <= set(pinned)
    # One version of Python for building and running, among those that are supported.
    bases = {rest.split()[0] for word, rest in instructions(image) if rest.startswith("python:")}
    (version,) = (base.removeprefix("python:").partition("-")[0] for base in bases)
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def test_the_trainer_image_is_for_tpus_and_runs_any_command():
    assert installed("trainer")[1] == ["tpu"]
    last = dict(instructions("trainer"))
    python, *entry = json.loads(last["ENTRYPOINT"])
    assert python == "python"
    shown = started(*entry, *json.loads(last["CMD"]))
    assert shown.returncode == 0
    assert "--model_dir" in shown.stdout
    text = (ROOT / "docker/Dockerfile.trainer").read_text()
    modules = re.findall(r"IMAGE ([\w. ]+) --", text)
    assert modules == ["trainer.pretrain", "palimpsest plan"]


def test_the_image_of_workers_has_the_beam_of_the_constraints():
    dockerfile = (ROOT / "docker/Dockerfile.pipeline").read_text()
    (beam,) = re.findall(r"apache/beam_python([\d.]+)_sdk:([\d.]+)", dockerfile)
    assert f"apache-beam=={beam[1]}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert set(re.findall(r"FROM python:([\d.]+)-slim", dockerfile)) == {beam[0]}
    for path in re.findall(
        r"`((?:tests|docker)/[\w/.]+)`", (ROOT / "docs/dataflow.md").read_text()
    ):
        assert (ROOT / path).exists(), path
