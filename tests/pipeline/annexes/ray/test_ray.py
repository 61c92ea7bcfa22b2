"""The engine Ray: its flags, and its errors in one line."""

import sys
import types

import pytest

from pipeline.annexes.ray import engine
from pipeline.building.options import Options
from pipeline.runners import engines
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.clusters import nobody as nobody
from tests.support.clusters import refused

CORPUS = sources.parse("text:/corpus/*.txt")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--runner=ray", "--adress=a:1"], "unknown flag --adress (did you mean --address?)"),
        (["--address=auto"], "only --runner=ray reads --address"),
        (["--part=1/2", "--runner=ray"], "--runner=ray spreads all pieces by itself"),
    ],
)
def test_flags_that_do_not_go_together(build, tmp_path, given, says):
    assert says in refused(build, tmp_path, *given)


def test_its_flags():
    assert engines.chosen(Options("t", "v", "c", runner="ray")) == engine.Ray()


def test_the_package_is_missing(build, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(build, tmp_path, "--runner=ray")
    assert said.startswith("--runner=ray needs the package ray")
    assert "[ray]" in said


def test_a_cluster_that_does_not_answer(monkeypatch, nobody):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    for address in (nobody, f"ray://{nobody}"):
        with pytest.raises(UserError, match=f"no Ray cluster answers at --address={nobody}"):
            engine.Ray(address=address).check(CORPUS, "")
