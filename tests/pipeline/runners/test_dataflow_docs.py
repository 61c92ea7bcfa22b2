"""Commands, flags and versions in docs/dataflow.md exist."""

import pathlib
import re
import shlex
import sys

import pytest

from pipeline import build
from pipeline.runners import beam_options
from tasks.terminal.flags import made, parse
from tests.support.processes import completed

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[3]
TEXT = (ROOT / "docs/dataflow.md").read_text()
VARIABLES = {
    "PROJECT": "ours", "REGION": "europe-west4", "BUCKET": "bucket", "WORKERS": "w@x", "IMAGE": "i",
}  # fmt: skip


def commands() -> list[str]:
    """Returns every command in the page's code blocks, on one line."""
    lines = [line[4:] for line in TEXT.splitlines() if line.startswith("    ")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def of_ours() -> list[str]:
    return [each for each in commands() if "python -m" in each and "…" not in each]


@pytest.mark.parametrize("command", of_ours())
def test_flags_exist(command):
    for name, value in VARIABLES.items():
        command = command.replace(f"${name}", value)
    assert "$" not in command
    _, _, module, *flags = shlex.split(command)
    if module != "pipeline.build":
        run = [sys.executable, "-m", module, "--help"]
        shown = completed(run, check=True).stdout
        assert all(re.search(rf"{flag.split('=')[0]}\b", shown) for flag in flags)
        return
    given = made(build.Options, parse(build.Options, flags))
    assert beam_options.arguments(given) == [f"--runner={given.runner}", *given.beam]


def test_the_page_is_read():
    assert len(of_ours()) == 10
    assert {"docker/Dockerfile.pipeline", "constraints.txt"} <= set(
        re.findall(r"[\w/.]+\.(?:pipeline|txt)", TEXT)
    )
    for path in re.findall(r"`((?:tests|docker)/[\w/.]+)`", TEXT):
        assert (ROOT / path).exists(), path


def test_the_image_has_the_beam_of_the_constraints():
    dockerfile = (ROOT / "docker/Dockerfile.pipeline").read_text()
    (beam,) = re.findall(r"apache/beam_python([\d.]+)_sdk:([\d.]+)", dockerfile)
    assert f"apache-beam=={beam[1]}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert set(re.findall(r"FROM python:([\d.]+)-slim", dockerfile)) == {beam[0]}
