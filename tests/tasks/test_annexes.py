"""Annexes of other distributions that have faults: what is said, and what goes on working."""

import fnmatch
import os
import pathlib
import re
import sys

import pytest

from tasks import annexes
from tasks.terminal.command_line import UserError, storage_named
from tests.support.processes import completed

ROOT = pathlib.Path(__file__).parents[2]
TITLE = 'title = "X"\n'


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs an annex from the text of its file and its modules."""
    site = tmp_path / "site"
    monkeypatch.setattr(annexes, "_said", set())
    monkeypatch.setattr(annexes, "_left_out", set())
    monkeypatch.setattr(annexes, "_reserved", {name: {*annexes._reserved[name]}
                                               for name in annexes._reserved})  # fmt: skip

    def installed(text: str | bytes | None, point: str = "strange", **modules: str):
        package = site / "strange"
        package.mkdir(parents=True)
        for name, code in {"__init__": "", **modules}.items():
            (package / f"{name}.py").write_text(code)
        if text is not None:
            written = text if isinstance(text, bytes) else text.encode()
            (package / annexes.FILE).write_bytes(written)
        (points := site / "far-1.0.dist-info").mkdir()
        (points / "METADATA").write_text("Name: far\nVersion: 1.0\n")
        (points / "entry_points.txt").write_text(f"[palimpsest.annexes]\nx = {point}\n")
        monkeypatch.syspath_prepend(site)
        forget()
        return site

    yield installed
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.split(".")[0] == "strange"]:
        del sys.modules[name]
    forget()


def forget():
    for cached in (annexes.annexes, annexes.slots, annexes.entries):
        cached.cache_clear()


def packages() -> list[str]:
    return [annex.package for annex in annexes.annexes() if annex.distribution]


@pytest.mark.parametrize(
    ("text", "point", "fault"),
    [
        (TITLE, "gone", "there is no package gone"),
        (TITLE, "gone.sub", "No module named 'gone'"),
        (TITLE, "strange:main", "there is no package strange:main"),
        (TITLE, "strange.module", "there is no package strange.module"),
        (None, "strange", "there is no package strange with a file annex.toml"),
        ("title = \n", "strange", "Invalid value"),
        (b'title = "\xe9"\n', "strange", "can't decode"),
        ("[formats]\nx = '.x:X'\n", "strange", "needs a text called title"),
        (TITLE + "[formats]\nx = 3\n", "strange", "formats.x in annex.toml must be a text"),
        (TITLE + "formats = ['x']\n", "strange", "formats in annex.toml must be a text"),
        (TITLE + "needs = 'gin'\n", "strange", "must be a list of names"),
        (TITLE + "needs = ['nowhere']\n", "strange", "needs the annex nowhere"),
    ],
)
def test_an_annex_with_a_fault_is_left_out_in_one_line(install, capsys, text, point, fault):
    ours = annexes.annexes()
    install(text, point, module="")
    assert annexes.annexes() == ours
    annexes.slots()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the annex {point} of the distribution far is left out: ")
    assert fault in line
    assert line.endswith("mend it, or remove it with pip uninstall far")


def test_a_package_that_raises_is_left_out(install, capsys):
    install(TITLE, "strange.sub", __init__="raise RuntimeError('boom')")
    assert not packages()
    assert "is left out: RuntimeError: boom" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["caches", "mine"])
def test_a_name_of_another_annex_is_not_taken(install, capsys, group):
    """Commands have their names in common, whatever their group."""
    install(TITLE + "[commands.mine]\nfoo = '.foo'\n")
    assert packages() == ["strange"]
    other = annexes.Annex(
        "other", pathlib.Path(), "X", (), {f"commands.{group}": {"foo": "other.foo"}}, "further"
    )
    others, names = annexes.annexes(), set[str]()
    assert "the annex strange has the name of " in annexes._fault(other, others, names)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("slot", "name"), [("commands.caches", "build"), ("formats", "json"), ("words", "build")]
)
def test_a_name_of_the_core_is_not_taken(install, capsys, slot, name):
    install(TITLE + f"[{slot}]\n{name} = '.foo:X'\nours = '.foo:X'\n")
    annexes.reserve(slot.partition(".")[0], [name])
    assert name not in annexes.entries(slot)
    assert annexes.entries(slot)["ours"] == "strange.foo:X"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is left out of [{slot}] {name}: the core has that name" in line


def test_a_registry_reserves_its_names(install, capsys):
    install(TITLE + "[formats]\nmine = '.foo:X'\nyours = '.foo:Y'\n", foo="Y = 2")
    found = annexes.Registry("formats", {"mine": 1})
    assert (found["mine"], found["yours"]) == (1, 2)
    assert [*found].count("mine") == 1
    assert "[formats] mine: the core has that name" in capsys.readouterr().err


def test_a_misspelt_slot_is_said_and_the_rest_is_read(install, capsys):
    install(TITLE + "[comands.caches]\nfoo = '.foo'\n[formats]\nx = '.x:X'\n")
    assert annexes.entries("formats")["x"] == "strange.x:X"
    assert "fills [comands.caches], a slot that nothing reads" in capsys.readouterr().err


def test_an_entry_that_cannot_be_imported_breaks_only_its_use(install, capsys):
    install(TITLE + "[tasks]\nx = '.x:X'\n[formats]\ny = '.y:Y'\n", x="import nowhere_at_all")
    assert "x" not in annexes.loaded("tasks")
    (line,) = capsys.readouterr().err.splitlines()
    assert "fails in strange.x:X: ModuleNotFoundError: No module named 'nowhere_at_all'" in line
    with pytest.raises(annexes.BrokenAnnex, match="No module named 'nowhere_at_all'"):
        annexes.get("tasks", "x")
    with pytest.raises(UserError, match="pip uninstall far"), storage_named():
        annexes.get("tasks", "x")
    assert packages() == ["strange"]
    annexes.loaded("tasks", whole=True)
    assert not packages()
    assert "y" not in annexes.entries("formats")
    assert capsys.readouterr().err == ""  # it was said


def test_a_fault_of_ours_is_an_error():
    ours = annexes.Annex("ours", pathlib.Path(), "X", (), {})
    with pytest.raises(ValueError, match="ours fills"):
        annexes._say(ours.broken("fills a slot"))


def test_every_slot_that_is_asked_for_is_known():
    """Slots are asked for by a string, a prefix of one, or a constant of these names."""
    call = r'(?:annexes\.(?:get|entries|every|loaded)|config\.entries|Registry)\(\s*"([\w.]+)"'
    constant = r'\b(?:ANNEXES: ClassVar\[str\]|_SLOT|SLOT) = "([\w.]+)"'
    asked = {
        slot
        for package in ("tasks", "vocab", "pipeline", "trainer", "palimpsest")
        for path in (ROOT / package).rglob("*.py")
        for slot in re.findall(f"{call}|{constant}", path.read_text())
    }
    asked = {slot for pair in asked for slot in pair if slot}
    asked |= {slot for annex in annexes.annexes() for slot in annex.slots}
    assert len(asked) > 20
    known = annexes._SLOTS.split()
    unknown = [slot for slot in asked if not any(fnmatch.fnmatchcase(slot, row) for row in known)]
    assert not unknown, f"tasks/annexes/__init__.py: _SLOTS lacks {', '.join(sorted(unknown))}"


@pytest.mark.processes
def test_commands_go_on_beside_a_broken_one(install, tmp_path):
    command = "[commands.caches]\nfoo = '.foo'\nbuild = '.foo'\n"
    site = install(TITLE + command + "[settings]\nbar = '.gone:C'\n", foo="import nowhere_at_all")
    paths = os.pathsep.join([str(site), str(ROOT)])

    def palimpsest(*words):
        environment = {**os.environ, "PYTHONPATH": paths}
        words = [sys.executable, "-m", "palimpsest", *words]
        done = completed(words, env=environment, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()

    code, lines = palimpsest("build", "--help")
    assert (code, len(lines)) == (0, 1)
    assert "is left out of [commands.caches] build: the core has that name" in lines[0]
    code, lines = palimpsest("foo")
    assert code == 2
    assert lines[-1].startswith("palimpsest foo: error: the annex strange of the distribution far")
    code, lines = palimpsest("evaluate", "--model_dir=nothere")
    assert code == 2
    assert "strange.gone" in lines[-2]
    assert "nothere holds no run" in lines[-1]
